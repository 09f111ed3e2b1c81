"""Stand-ins for CUDA graphs, on any device."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pyengine.executor.cuda_graphs import Between, Compute, Interrupt


class EagerRecorder:
    """No graph: the launches are made again. The oracle of graphs."""

    def __call__(self, compute: Compute) -> Compute:
        return compute

    def pieces(self, compute: Callable[[Interrupt], torch.Tensor]) -> Compute:
        """Attention between pieces has the tensors of the first run, filled anew."""
        calls: list[tuple[Between, list[torch.Tensor], torch.Tensor]] = []

        def first(
            between: Between, sources: Sequence[torch.Tensor], shape: Sequence[int]
        ) -> torch.Tensor:
            result = sources[0].new_zeros(shape)
            calls.append((between, [source.clone() for source in sources], result.clone()))
            return result

        logits = compute(first)

        def replay() -> torch.Tensor:
            left = iter(calls)

            def again(
                _: Between, sources: Sequence[torch.Tensor], shape: Sequence[int]
            ) -> torch.Tensor:
                between, fixed, result = next(left)
                for target, source in zip(fixed, sources, strict=True):
                    assert target.shape == source.shape
                    target.copy_(source)
                between(fixed, result)
                assert result.shape == tuple(shape)
                return result.clone()

            logits.copy_(compute(again))
            assert next(left, None) is None
            return logits

        return replay


record_eagerly = EagerRecorder()


class TapeRecorder:
    """Captures the operators of a pass, and replays them into the same tensors, as a CUDA graph.

    So what Python decided in the capture stays. Before a replay, memory that it must fill again is
    poisoned. Compiled code is not seen, unless its compiler leaves operators.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        self.replays = 0
        self.num_pieces: list[int] = []
        """Of each capture."""
        self._fails_at = fails_at

    def pieces(self, compute: Callable[[Interrupt], torch.Tensor]) -> Compute:
        """See `RecordPieces`."""
        tape = _Tape()
        num_pieces = 1

        def interrupt(
            between: Between, sources: Sequence[torch.Tensor], shape: Sequence[int]
        ) -> torch.Tensor:
            nonlocal num_pieces
            num_pieces += 1
            if len(self.num_pieces) == self._fails_at:
                raise RuntimeError("operation not permitted when stream is capturing")
            with tape.paused():
                result = sources[0].new_full(shape, float("nan"))
            tape.made.append(result)
            tape.steps.append(partial(between, sources, result))
            return result

        with tape:
            logits = compute(interrupt)
        self.num_pieces.append(num_pieces)

        def replay() -> torch.Tensor:
            self.replays += 1
            for tensor in tape.made:
                tensor.fill_(float("nan") if tensor.is_floating_point() else 0)
            for step in tape.steps:
                step()
            return logits

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Callable[[], object]] = []
        self.made: list[torch.Tensor] = []

    @classmethod
    def is_infra_mode(cls) -> bool:
        """Else torch runs nothing compiled inside."""
        return True

    def paused(self) -> Any:
        return torch.utils._python_dispatch._disable_current_modes()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call = partial(func, *args, **(kwargs or {}))
        found = call()
        if func is torch.ops.pyengine.paged_attention.default:
            return found  # it has interrupted the capture
        inputs = {_memory(leaf) for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)}
        fresh = [
            leaf if _memory(leaf) not in inputs else None
            for leaf in tree_leaves(found)
            if _is_tensor(leaf)
        ]
        mutates = func._schema.is_mutable
        if mutates or any(tensor is not None for tensor in fresh):
            self.made += [tensor for tensor in fresh if tensor is not None]
            self.steps.append(partial(_again, call, fresh))
        return found


def _again(call: Callable[[], Any], fresh: Sequence[torch.Tensor | None]) -> None:
    tensors = [leaf for leaf in tree_leaves(call()) if _is_tensor(leaf)]
    for target, tensor in zip(fresh, tensors, strict=True):
        if target is not None:
            target.copy_(tensor)


def _is_tensor(leaf: object) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.numel() > 0


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
