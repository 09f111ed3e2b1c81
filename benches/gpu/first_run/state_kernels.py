"""The Triton kernels of recurrent layers, in the shapes of released models.

Each is held against torch, token by token in float32, and timed against the bytes that it moves.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import accumulate, cycle
from typing import Any, TypeAlias

import torch

from benches.engine.states import SHAPES
from benches.gpu.first_run.context import Context
from benches.gpu.first_run.kernels import ROUNDING, relative_error
from pyengine.kv_cache.states import LayerState, StateInputs
from pyengine.models.decoder.cuda_states import CudaStates
from pyengine.models.decoder.kernels import (
    ConvWeights,
    DeltaWeights,
    GatedNormWeights,
    MambaWeights,
)
from pyengine.models.decoder.loading import spec_of
from pyengine.models.decoder.recurrent import (
    Convolution,
    DeltaAttention,
    GatedDelta,
    GatedNorm,
    Mamba,
    Mamba2,
    RecurrentMixer,
    ShortConv,
)
from pyengine.models.decoder.torch_states import TorchStates

Parts: TypeAlias = tuple[torch.Tensor, ...]
Call: TypeAlias = Callable[[TorchStates, Parts, LayerState, Any], torch.Tensor]
"""Results of a kernel set for rows, states, which it changes, and sequences of its own kind."""
IN_CHUNKS = 5e-3
"""Relative error of results and states after products of chunks.

bfloat16 rounds by 0.0017. Products whose operands are cut off to tf32 add 0.001, in the interpreter
with heads of 128.
"""
STATES_BY_TOKEN = 2e-5
"""Relative error of states, float32, without such products."""
TURNS = 8
"""Sets of slots that are timed in turn: in a model, a layer's states leave caches between steps."""


class KernelStates(CudaStates):
    """The operations of CUDA devices; off CUDA, Triton's interpreter runs their kernels."""

    _has_kernels = True


@dataclass(frozen=True)
class Operation:
    """An operation of a layer: rows, a part of a wider row each, its weights, a slot's shape."""

    piece: str
    rows: Parts
    weights: ConvWeights | DeltaWeights | MambaWeights | GatedNormWeights
    shape: tuple[int, ...]
    call: Call
    has_chunks: bool = False
    """True: prompts are computed in chunks."""


def run(context: Context) -> None:
    """All operations of the layers in `mixers`; one that raises does not stop the others."""
    torch.manual_seed(0)
    for name, mixer in mixers(context).items():
        for step, lengths in steps(context).items():
            context.attempt(f"{name}, {step}", check, context, name, mixer, step, lengths)


def steps(context: Context) -> dict[str, list[int]]:
    """The numbers of tokens of each sequence of a step."""
    full = {"decodes": [1] * 32, "chunks": [512] * 4, "mixed": [512, 5, 100, *[1] * 29]}
    tiny = {"decodes": [1] * 2, "mixed": [1, 18, 3, 1]}
    chosen: dict[str, list[int]] = context.either(full, tiny)
    return chosen


def mixers(context: Context) -> dict[str, RecurrentMixer]:
    """One of each kind: those of `SHAPES`, and of models whose decays differ by channel."""
    released = {name: _recurrent(name) for name in SHAPES} if context.on_cuda else {}
    gate = GatedNorm(size=128, eps=1e-5, activation="sigmoid")
    by_channel = {
        "Kimi-Linear-48B-A3B": DeltaAttention(heads=32, head_dim=128, convolution=4, norm=gate),
        "Jamba-Mini": Mamba(width=8192, state_size=16, rank=256, convolution=4, eps=1e-6),
    }
    small = GatedNorm(size=12, eps=1e-6)
    wide = GatedNorm(size=48, eps=1e-5, gates_first=True)
    tiny = {
        "short convolution": ShortConv(width=40, convolution=3),
        "delta rule": GatedDelta(
            key_heads=1, value_heads=2, key_dim=20, value_dim=12, convolution=4, norm=small
        ),
        "delta rule by channel": DeltaAttention(heads=2, head_dim=12, convolution=4, norm=small),
        "state space": Mamba2(
            heads=2, head_dim=24, groups=1, state_size=16, convolution=4, norm=wide
        ),
        "state space by channel": Mamba(width=40, state_size=8, rank=5, convolution=4, eps=1e-6),
    }
    chosen: dict[str, RecurrentMixer] = context.either({**released, **by_channel}, tiny)
    return chosen


def check(
    context: Context, model: str, mixer: RecurrentMixer, step: str, lengths: Sequence[int]
) -> None:
    """Results and states of each operation, bits of slots that it must not write, and its time."""
    for operation in operations(context, mixer, sum(lengths)):
        inputs, num_slots = _sequences(context, lengths)
        state = torch.randn(num_slots, *operation.shape, device=context.device)
        before, expected_state = state.clone(), state.clone()
        call, kernels = operation.call, KernelStates()
        actual = call(kernels, operation.rows, _layer(state), kernels.sequences(inputs))
        exact = tuple(part.float() for part in operation.rows)
        expected = call(TorchStates(), exact, _layer(expected_state), inputs)
        is_exact = not operation.has_chunks or max(lengths) == 1
        error, state_error = relative_error(actual, expected), 0.0
        wrong = [] if error < (ROUNDING if is_exact else IN_CHUNKS) else ["results"]  # NaN, too
        if operation.shape:
            kept = inputs.slots[inputs.slots >= 0]
            state_error = relative_error(state[kept], expected_state[kept])
            if not state_error < (STATES_BY_TOKEN if is_exact else IN_CHUNKS):
                wrong.append("states")
            others = torch.ones(num_slots, dtype=torch.bool, device=context.device)
            others[kept] = False
            if not torch.equal(state[others], before[others]):
                wrong.append("slots of others")
        context.record(
            piece=operation.piece,
            model=model,
            step=step,
            tokens=sum(lengths),
            error=error,
            state_error=state_error,
            wrong=wrong,
            **_times(context, operation, lengths, actual),
        )


def operations(context: Context, mixer: RecurrentMixer, count: int) -> list[Operation]:
    """The operations of a layer on random rows `[count, ...]`."""
    make = partial(_rows, context, count)
    match mixer:
        case ShortConv():
            first, second, rows = make(*[(mixer.width,)] * 3)
            return [_conv(context, mixer.conv, (rows, first, second))]
        case GatedDelta():
            keys, heads = (mixer.key_heads, mixer.key_dim), mixer.value_heads
            values = (heads, mixer.value_dim)
            inputs, gate = make((mixer.conv.channels,), (heads * mixer.value_dim,))
            rate_gate, opened = make((heads,), (heads,))
            parts = (*make(keys, keys, values), opened, rate_gate)
            return [
                _conv(context, mixer.conv, (inputs,)),
                _delta(context, parts, heads),
                _norm(context, mixer.norm, mixer.value_dim, gate.reshape(-1, mixer.value_dim)),
            ]
        case DeltaAttention():
            heads, shape = mixer.heads, (mixer.heads, mixer.head_dim)
            [opened], [rate_gate], [gate] = make((mixer.width,)), make((heads,)), make(shape)
            parts = (*make(shape, shape, shape), opened, rate_gate)
            return [
                _delta(context, parts, mixer.width),
                _norm(context, mixer.norm, mixer.head_dim, gate.reshape(-1, mixer.head_dim)),
            ]
        case Mamba2():
            shape, groups = (mixer.heads, mixer.head_dim), (mixer.groups, mixer.state_size)
            gate, inputs, time = make((mixer.width,), (mixer.conv.channels,), (mixer.heads,))
            x, b, c = make(shape, groups, groups)
            made = [_conv(context, mixer.conv, (inputs,))]
            if mixer.norm is None:
                return [*made, _space(context, (x, time, b, c, gate.view_as(x)), (mixer.heads,))]
            made.append(_space(context, (x, time, b, c), (mixer.heads,)))
            return [*made, _norm(context, mixer.norm, mixer.width, gate)]
        case Mamba():
            inputs, gate = make((mixer.width,), (mixer.width,))
            [x], [time] = make((mixer.width,)), make((mixer.width,))
            [b], [c] = make((mixer.state_size,)), make((mixer.state_size,))
            return [
                _conv(context, mixer.conv, (inputs,)),
                _space(context, (x, time, b, c, gate), (mixer.state_size, mixer.width)),
            ]


def _conv(context: Context, conv: Convolution, rows: Parts) -> Operation:
    weight = torch.randn(conv.channels, conv.size, device=context.device)
    bias = torch.randn(conv.channels, device=context.device) if conv.has_bias else None
    weights = ConvWeights(conv, weight, bias)

    def call(kernels: TorchStates, parts: Parts, state: LayerState, sequences: Any) -> torch.Tensor:
        gates = (parts[1], parts[2]) if len(parts) > 1 else None
        return kernels.short_conv(parts[0], weights, state, sequences, gates)

    return Operation("short convolution", rows, weights, conv.state.shape, call)


def _delta(context: Context, rows: Parts, biases: int) -> Operation:
    """States forget half of a token within one token to hundreds."""
    _, key, value, _, _ = rows
    heads = value.shape[1]
    rate = -16 * torch.rand(heads, device=context.device)
    weights = DeltaWeights(rate, torch.randn(biases, device=context.device) - 4)

    def call(kernels: TorchStates, parts: Parts, state: LayerState, sequences: Any) -> torch.Tensor:
        return kernels.gated_delta(parts, weights, state, sequences)

    shape = (heads, key.shape[2], value.shape[2])
    return Operation("delta rule", rows, weights, shape, call, has_chunks=True)


def _space(context: Context, rows: Parts, rates: tuple[int, ...]) -> Operation:
    """As `_delta`. `rates` is the shape of decay rates: of Mamba, if there are two sizes."""
    x, _, b, *_ = rows
    is_mamba = len(rates) > 1
    bias = torch.randn(rates[-1], device=context.device) - 4
    skip = torch.randn(rates[-1], device=context.device)
    weights = MambaWeights(-16 * torch.rand(rates, device=context.device), bias, skip)

    def call(kernels: TorchStates, parts: Parts, state: LayerState, sequences: Any) -> torch.Tensor:
        gate = parts[4] if len(parts) > 4 else None
        return kernels.mamba(parts[:4], weights, state, sequences, gate)

    shape = rates if is_mamba else (x.shape[1], b.shape[2], x.shape[2])
    return Operation("state space", rows, weights, shape, call, has_chunks=not is_mamba)


def _norm(context: Context, norm: GatedNorm, width: int, gate: torch.Tensor) -> Operation:
    """Rows are contiguous, as the operation before has them; this one has no state."""
    weights = GatedNormWeights(norm, _numbers(context, width))

    def call(kernels: TorchStates, parts: Parts, _state: LayerState, _of: Any) -> torch.Tensor:
        return kernels.gated_norm(parts[0], parts[1], weights)

    return Operation("gated norm", (_numbers(context, *gate.shape), gate), weights, (), call)


def _times(
    context: Context, operation: Operation, lengths: Sequence[int], results: torch.Tensor
) -> dict[str, float]:
    """Microseconds of sequences that continue in place, and those in which their bytes are moved.

    Rows, weights and states are read once, `results` and states are written once.
    """
    kernels, count, turns = KernelStates(), len(lengths), context.either(TURNS, 1)
    slots = torch.randperm(turns * count, device=context.device).view(turns, count)
    state = _layer(torch.zeros(turns * count, *operation.shape, device=context.device))
    sequences = cycle(
        [kernels.sequences(StateInputs(_starts(context, lengths), own, own, ())) for own in slots]
    )
    call = partial(operation.call, kernels, operation.rows, state)
    repeat, warm = context.either((20, TURNS), (1, 0))
    seconds = context.bench("tiny").seconds_of(lambda: call(next(sequences)), repeat, warm)
    own = [getattr(operation.weights, each.name) for each in fields(operation.weights)]
    moved = [results, *operation.rows, *(each for each in own if isinstance(each, torch.Tensor))]
    num_bytes = sum(each.numel() * each.element_size() for each in moved)
    if operation.shape:
        num_bytes += 2 * state.conv[:count].nbytes
    return {
        "us": 1e6 * seconds,
        "TB_s": num_bytes / seconds / 1e12,
        "bound_us": 1e6 * num_bytes / context.rates()[0],
    }


def _sequences(context: Context, lengths: Sequence[int]) -> tuple[StateInputs, int]:
    """Sequences in place, from another slot, from zeros and not kept, in turn; and all slots."""
    indices = torch.arange(len(lengths), device=context.device)
    sources, slots, kind = 2 * indices, 2 * indices, indices % 4
    sources = torch.where(kind == 2, -1, sources)
    slots = torch.where(kind == 3, -1, slots + (kind == 1))
    return StateInputs(_starts(context, lengths), sources, slots, ()), 2 * len(lengths)


def _starts(context: Context, lengths: Sequence[int]) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=context.device)


def _layer(state: torch.Tensor) -> LayerState:
    """A state array, for any operation."""
    return LayerState(state, state)


def _rows(context: Context, count: int, *shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Random rows of these shapes: views of one product, as models pass them."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    whole = _numbers(context, count, sum(sizes)).split(sizes, -1)
    return [part.unflatten(-1, shape) for part, shape in zip(whole, shapes, strict=True)]


def _numbers(context: Context, *shape: int) -> torch.Tensor:
    """float16 off CUDA: rows in float32 have no chunks, and the interpreter truncates bfloat16."""
    dtype = context.either(torch.bfloat16, torch.float16)
    return torch.randn(shape, device=context.device).to(dtype)


def _recurrent(name: str) -> RecurrentMixer:
    """The recurrent layers of a shape; all are equal."""
    found = (layer.recurrent for layer in spec_of(SHAPES[name], name).layers)
    return next(mixer for mixer in found if mixer is not None)
