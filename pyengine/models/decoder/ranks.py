"""The ranks of a divided model, and the part of it that each of them has.

The division is that of Megatron-LM (Shoeybi et al., 2019, arXiv:1909.08053): attention is divided
by heads, feed-forward parts by the elements in their middle, embedding and head by the vocabulary.
Norms, routers and what produces latents are whole on every rank. A layer's spec says how large the
part of a rank is (`divided`); `Weights` reads that part only.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.decoder.spec import (
    MLP,
    Attention,
    AttentionMixer,
    DecoderSpec,
    Experts,
    FeedForward,
    Layer,
)
from pyengine.utils.tensors import array_of, tensor_of

Rows = Any


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `size` processes that divide a model, in torch's default group; or the only one.

    All ranks call `sum` and `gather` in the same order. Both take tensors of torch, and arrays of
    NumPy (uint16: the bits of bfloat16).
    """

    number: int = 0
    size: int = 1

    def sum(self, rows: Rows) -> Rows:
        """The sum of all ranks' rows, which it may overwrite."""
        if self.size == 1:
            return rows
        import torch.distributed as dist

        tensor = tensor_of(rows)
        dist.all_reduce(tensor)
        return _like(rows, tensor)

    def gather(self, rows: Rows, width: int) -> Rows:
        """The columns of all ranks, `[T, width]`, from the `part(width)` that each one has."""
        if self.size == 1:
            return rows
        import torch
        import torch.distributed as dist

        tensor, per_rank = tensor_of(rows), -(-width // self.size)
        if tensor.shape[1] < per_rank:
            tensor = torch.nn.functional.pad(tensor, (0, per_rank - tensor.shape[1]))
        gathered = tensor.new_empty(self.size * len(tensor), per_rank)
        dist.all_gather_into_tensor(gathered, tensor.contiguous())
        by_rank = gathered.view(self.size, len(tensor), per_rank)
        return _like(rows, by_rank.transpose(0, 1).flatten(1)[:, :width])

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Raise the `ModelLoadError` of any rank in all of them, after what is inside."""
        failure = None
        try:
            yield
        except ModelLoadError as error:
            failure = error
        words = None if failure is None else str(failure)
        first = next((text for text in self._of_all(words) if text is not None), None)
        if failure is not None:
            raise failure
        if first is not None:
            raise ModelLoadError(first)

    def _of_all(self, words: str | None) -> list[str | None]:
        if self.size == 1:
            return [words]
        import torch.distributed as dist

        gathered: list[str | None] = [None] * self.size
        dist.all_gather_object(gathered, words)
        return gathered

    def part(self, count: int) -> slice:
        """This rank's part of `count` numbers; the last ranks may have fewer than the others."""
        per_rank = -(-count // self.size)
        return slice(min(self.number * per_rank, count), min((self.number + 1) * per_rank, count))


WHOLE = Rank()
"""The only process of a model that is not divided."""


def rank_of(size: int) -> Rank:
    """This process in torch's default group of `size` processes; without one: `WHOLE`."""
    if size == 1:
        return WHOLE
    import torch.distributed as dist

    return Rank(dist.get_rank(), size)


def divided(spec: DecoderSpec, size: int) -> DecoderSpec:
    """The spec of one rank's part of a model, divided by `size`.

    Raises `ConfigurationError` unless `size` divides the heads and the middle of every layer, with
    these numbers and the possible sizes, and for layers that keep a state.
    """
    if size == 1:
        return spec
    if spec.recurrent:
        raise ConfigurationError(
            f"tensor_parallel_size={size}: {spec.family} has layers that keep a state, which are "
            "not divided; use tensor_parallel_size=1"
        )
    check_divides(size, _divided_sizes(spec), spec.family)
    layers, mtp = (
        tuple(_divided_layer(layer, size) for layer in group)
        for group in (spec.layers, spec.mtp_layers)
    )
    return replace(spec, layers=layers, mtp_layers=mtp)


def check_divides(size: int, labelled: Iterable[tuple[str, int]], name: str) -> None:
    """Raise `ConfigurationError` unless `size` divides every size of the model `name`.

    `labelled` are the sizes as text, and their numbers.
    """
    sizes = sorted(set(labelled))
    odd = [f"{number} {label}" for label, number in sizes if number % size]
    if not odd:
        return
    common = gcd(*(number for _, number in sizes))
    fitting = [str(index) for index in range(2, common + 1) if common % index == 0]
    way_out = f"use {' or '.join(fitting)}" if fitting else "only tensor_parallel_size=1 does"
    have = ", ".join(f"{number} {label}" for label, number in sizes)
    raise ConfigurationError(
        f"tensor_parallel_size={size} does not divide {' and '.join(odd)}; this model "
        f"({name}) has {have}: {way_out}"
    )


def _divided_sizes(spec: DecoderSpec) -> Iterator[tuple[str, int]]:
    """The sizes that are divided, as text, and their numbers."""
    for layer in (*spec.layers, *spec.mtp_layers):
        mixer = layer.attention
        if mixer is not None:
            yield "query heads", mixer.heads
        if isinstance(mixer, Attention):
            yield "KV heads", mixer.kv_heads
        part = layer.feed_forward
        if isinstance(part, MLP):
            yield "of intermediate_size", part.size
            continue
        if part is None:
            continue
        yield "of the experts' intermediate size", part.mlp.size
        if part.shared is not None:
            yield "of the shared expert's intermediate size", part.shared.size


def _divided_layer(layer: Layer, size: int) -> Layer:
    mixer, part = layer.attention, layer.feed_forward
    return replace(
        layer,
        mixer=None if mixer is None else _divided_mixer(mixer, size),
        feed_forward=None if part is None else _divided_feed_forward(part, size),
    )


def _divided_mixer(mixer: AttentionMixer, size: int) -> AttentionMixer:
    if isinstance(mixer, Attention):
        return replace(mixer, heads=mixer.heads // size, kv_heads=mixer.kv_heads // size)
    return replace(mixer, heads=mixer.heads // size)


def _divided_feed_forward(part: FeedForward, size: int) -> FeedForward:
    if isinstance(part, Experts):
        shared = None if part.shared is None else _divided_mlp(part.shared, size)
        return replace(part, mlp=_divided_mlp(part.mlp, size), shared=shared)
    return _divided_mlp(part, size)


def _divided_mlp(mlp: MLP, size: int) -> MLP:
    return replace(mlp, size=mlp.size // size)


def _like(rows: Rows, tensor: Any) -> Rows:
    """A tensor as the kind of array that `rows` is."""
    return tensor if tensor.__class__ is rows.__class__ else array_of(tensor)
