"""Kernels of recurrent layers: refusals, and the numbers of transformers' functions in torch."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pyengine.cpu import (
    BufferError,
    ConfigError,
    CpuAttention,
    CpuStateStep,
    gated_delta,
    gated_norm,
    mamba,
    mamba2,
    short_conv,
)

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers.models.falcon_h1 import modeling_falcon_h1  # noqa: E402
from transformers.models.jamba import modeling_jamba  # noqa: E402
from transformers.models.kimi_linear import modeling_kimi_linear  # noqa: E402
from transformers.models.mamba2 import modeling_mamba2  # noqa: E402
from transformers.models.qwen3_next import modeling_qwen3_next  # noqa: E402

pytestmark = pytest.mark.levels

THREADS = CpuAttention(2)
LENS = (1, 70, 3)
TOKENS = sum(LENS)
SLOTS = (2, 0, 3)
NUM_SLOTS = 4
Array = Any
Run = Callable[[CpuStateStep, slice, Array, Array], None]
"""Computes rows of tokens: the step, the rows, states, results."""


def numbers(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(-1, 1, shape).astype(np.float32)


def states_of(*shape: int) -> Array:
    return numbers(NUM_SLOTS, *shape, seed=9)


def step_of(lens: tuple[int, ...], sources: Any, slots: Any) -> CpuStateStep:
    return CpuStateStep(
        query_start_loc=np.cumsum([0, *lens], dtype=np.int32),
        sources=np.array(sources, np.int64),
        slots=np.array(slots, np.int64),
    )


def computed(run: Run, states: Array, width: tuple[int, ...]) -> list[tuple[Array, Array]]:
    """Results and final states of each sequence.

    The same bits are demanded of each sequence alone, in chunks of 1, 5 and 64 tokens.
    """
    after, out = states.copy(), np.full((TOKENS, *width), np.nan, np.float32)
    run(step_of(LENS, SLOTS, SLOTS), slice(0, TOKENS), after, out)
    results, start = [], 0
    for length, slot in zip(LENS, SLOTS, strict=True):
        end = start + length
        for chunk in (1, 5, 64):
            own, part = states.copy(), np.full_like(out[start:end], np.nan)
            for first in range(start, end, chunk):
                rows = slice(first, min(first + chunk, end))
                count = rows.stop - rows.start
                target = part[first - start : first - start + count]
                run(step_of((count,), (slot,), (slot,)), rows, own, target)
            assert part.tobytes() == out[start:end].tobytes()
            assert own[slot].tobytes() == after[slot].tobytes()
        results.append((out[start:end], after[slot]))
        start = end
    return results


def close(actual: Array, expected: Any) -> None:
    np.testing.assert_allclose(actual, expected.float().numpy(), rtol=2e-4, atol=2e-5)


def sequences(*arrays: Array) -> Any:
    """The tokens of each sequence as tensors with a batch of one."""
    ends = np.cumsum(LENS)[:-1]
    parts = [np.split(array, ends) for array in arrays]
    return zip(*([torch.from_numpy(part)[None] for part in split] for split in parts), strict=True)


@pytest.mark.parametrize("kernel_size", [3, 4])
def test_short_convolutions_are_those_of_transformers(kernel_size: int) -> None:
    x, weight, bias = numbers(TOKENS, 40), numbers(kernel_size, 40, seed=1), numbers(40, seed=2)
    states = states_of(kernel_size - 1, 40)

    def run(step: CpuStateStep, rows: slice, states: Array, out: Array) -> None:
        options = {"bias": bias, "activation": "silu"}
        short_conv(THREADS, step, x[rows], weight, states, out, **options)

    results = computed(run, states, (40,))
    for (out, after), slot, (tokens,) in zip(results, SLOTS, sequences(x), strict=True):
        before = torch.from_numpy(states[slot].T.copy())[None]
        inputs = torch.cat([before, tokens.transpose(1, 2)], -1)
        expected = modeling_qwen3_next.causal_conv1d_fn(
            inputs,
            torch.from_numpy(weight.T.copy()),
            torch.from_numpy(bias),
            activation="silu",
        )
        close(out, expected[0, :, -len(out) :].T)
        close(after, inputs[0, :, -(kernel_size - 1) :].T)


def test_gates_of_a_short_convolution_multiply_inputs_and_results() -> None:
    fused, weight, states = numbers(TOKENS, 3 * 24), numbers(3, 24, seed=1), states_of(2, 24)
    first, second, x = (fused[:, start : start + 24] for start in (0, 24, 48))
    step = step_of(LENS, SLOTS, SLOTS)
    out, plain, other = (np.empty((TOKENS, 24), np.float32) for _ in range(3))
    after, before = states.copy(), states.copy()
    short_conv(THREADS, step, x, weight, after, out, gates=(first, second))
    short_conv(THREADS, step, first * x, weight, before, plain)
    np.multiply(plain, second, out=other)
    assert out.tobytes() == other.tobytes()
    assert after.tobytes() == before.tobytes()


def decays_of(gates: Array, rate: Array, bias: Array) -> Array:
    """The logarithms of decays that transformers' models compute outside of their functions."""
    steps = torch.nn.functional.softplus(torch.from_numpy(gates + bias))
    return (torch.from_numpy(rate) * steps).numpy()


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 2), (2, 4)])
@pytest.mark.parametrize("beta_scale", [1.0, 2.0])
def test_gated_delta_rules_are_those_of_qwen3_next_and_olmo_hybrid(
    key_heads: int, value_heads: int, beta_scale: float
) -> None:
    query, key = (numbers(TOKENS, key_heads, 16, seed=seed) for seed in (1, 2))
    value = numbers(TOKENS, value_heads, 32, seed=3)
    gates, betas = (numbers(TOKENS, value_heads, seed=seed) for seed in (4, 5))
    bias, rate = numbers(value_heads, seed=6), numbers(value_heads, seed=7) - 1
    states = states_of(value_heads, 16, 32)

    def run(step: CpuStateStep, rows: slice, states: Array, out: Array) -> None:
        arrays = query[rows], key[rows], value[rows], gates[rows], betas[rows]
        options = {"scaling": 16**-0.5, "epsilon": 1e-6, "beta_scale": beta_scale}
        gated_delta(THREADS, step, *arrays, (rate, bias), states, out, **options)

    results = computed(run, states, (value_heads, 32))
    beta = (beta_scale * torch.sigmoid(torch.from_numpy(betas))).numpy()
    tokens = sequences(query, key, value, decays_of(gates, rate, bias), beta)
    for (out, after), slot, arrays in zip(results, SLOTS, tokens, strict=True):
        for function in (
            modeling_qwen3_next.torch_recurrent_gated_delta_rule,
            modeling_qwen3_next.torch_chunk_gated_delta_rule,
        ):
            expected, expected_state = function(
                *arrays,
                initial_state=torch.from_numpy(states[slot])[None],
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )
            close(out, expected[0])
            close(after, expected_state[0])


def test_delta_attention_is_that_of_kimi_linear() -> None:
    query, key, value = (numbers(TOKENS, 3, 16, seed=seed) for seed in (1, 2, 3))
    gates, betas = numbers(TOKENS, 48, seed=5), numbers(TOKENS, 3, seed=4)
    bias, rate = numbers(48, seed=6), numbers(3, seed=7) - 1
    states = states_of(3, 16, 16)

    def run(step: CpuStateStep, rows: slice, states: Array, out: Array) -> None:
        arrays = query[rows], key[rows], value[rows], gates[rows], betas[rows]
        options = {"scaling": 0.25, "epsilon": 1e-6}
        gated_delta(THREADS, step, *arrays, (rate, bias), states, out, **options)

    results = computed(run, states, (3, 16))
    decays = decays_of(gates, np.repeat(rate, 16), bias).reshape(TOKENS, 3, 16)
    beta = torch.sigmoid(torch.from_numpy(betas)).numpy()
    tokens = sequences(query, key, value, decays, beta)
    for (out, after), slot, arrays in zip(results, SLOTS, tokens, strict=True):
        expected, expected_state = modeling_kimi_linear.recurrent_kimi_delta_attention(
            *arrays,
            initial_state=torch.from_numpy(states[slot])[None],
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        close(out, expected[0])
        close(after, expected_state[0])


def test_heads_of_keys_are_shared_by_consecutive_heads_or_by_tiled_ones() -> None:
    query, key = (numbers(TOKENS, 2, 8, seed=seed) for seed in (1, 2))
    value, gates = numbers(TOKENS, 4, 16, seed=3), numbers(TOKENS, 4, seed=4)
    weights, step = (-np.ones(4, np.float32), np.ones(4, np.float32)), step_of(LENS, SLOTS, SLOTS)

    def run(heads: list[int], *, tiled_heads: bool) -> bytes:
        out, states = np.empty_like(value), states_of(4, 8, 16)
        keys = query.take(heads, 1), key.take(heads, 1)
        arrays = *keys, value, gates, gates, weights, states, out
        gated_delta(THREADS, step, *arrays, scaling=1.0, tiled_heads=tiled_heads)
        return out.tobytes() + states.tobytes()

    assert run([0, 1], tiled_heads=False) == run([0, 0, 1, 1], tiled_heads=False)
    assert run([0, 1], tiled_heads=True) == run([0, 1, 0, 1], tiled_heads=False)
    assert run([0, 1], tiled_heads=True) != run([0, 1], tiled_heads=False)


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.4, 0.9)])
def test_mamba2_is_that_of_transformers(limits: tuple[float, float]) -> None:
    heads, size, groups, state_size = 4, 24, 2, 16
    x, dt = numbers(TOKENS, heads, size, seed=1), numbers(TOKENS, heads, seed=2)
    b, c = (numbers(TOKENS, groups, state_size, seed=seed) for seed in (3, 4))
    a, dt_bias, d = (numbers(heads, seed=seed) for seed in (5, 6, 7))
    weights, states = (a - 1.5, dt_bias, d), states_of(heads, state_size, size)

    def run(step: CpuStateStep, rows: slice, states: Array, out: Array) -> None:
        arrays = x[rows], dt[rows], b[rows], c[rows], weights, states, out
        mamba2(THREADS, step, *arrays, dt_limits=limits)

    results = computed(run, states, (heads, size))
    growth, bias, skip = (torch.from_numpy(vector) for vector in weights)
    for (out, after), slot, arrays in zip(results, SLOTS, sequences(x, dt, b, c), strict=True):
        hidden, steps, into, from_ = arrays
        expected, expected_state = modeling_mamba2.mamba2_chunk_scan(
            hidden,
            steps,
            growth,
            into,
            from_,
            chunk_size=16,
            D=skip,
            dt_bias=bias,
            initial_states=torch.from_numpy(states[slot].swapaxes(1, 2).copy())[None],
            dt_softplus=True,
            dt_limit=limits,
            return_final_states=True,
        )
        close(out, expected[0])
        close(after, expected_state[0].transpose(1, 2))


def test_a_gate_multiplies_the_results_of_mamba2() -> None:
    x, gate = numbers(TOKENS, 2, 16), numbers(TOKENS, 2, 16, seed=1)
    dt, b = numbers(TOKENS, 2, seed=2), numbers(TOKENS, 1, 8, seed=3)
    weights = (-np.ones(2, np.float32), np.ones(2, np.float32), np.ones(2, np.float32))
    step, states = step_of(LENS, SLOTS, SLOTS), states_of(2, 8, 16)
    out, plain, after = np.empty_like(x), np.empty_like(x), states.copy()
    mamba2(THREADS, step, x, dt, b, b, weights, states, out, gate=gate)
    mamba2(THREADS, step, x, dt, b, b, weights, after, plain)
    close(out, torch.from_numpy(plain) * torch.nn.functional.silu(torch.from_numpy(gate)))
    assert states.tobytes() == after.tobytes()


def test_mamba_is_that_of_jamba() -> None:
    channels, state_size = 40, 16
    x, dt, gate = (numbers(TOKENS, channels, seed=seed) for seed in (1, 2, 8))
    b, c = (numbers(TOKENS, state_size, seed=seed) for seed in (3, 4))
    a = numbers(state_size, channels, seed=5) - 1.5
    dt_bias, d = (numbers(channels, seed=seed) for seed in (6, 7))
    weights, states = (a, dt_bias, d), states_of(state_size, channels)

    def run(step: CpuStateStep, rows: slice, states: Array, out: Array) -> None:
        arrays = x[rows], dt[rows], b[rows], c[rows], weights, states, out
        mamba(THREADS, step, *arrays, gate=gate[rows])

    results = computed(run, states, (channels,))
    growth, bias, skip = (torch.from_numpy(vector) for vector in (a.T.copy(), dt_bias, d))
    tokens = sequences(x, dt, b, c, gate)
    for (out, after), slot, arrays in zip(results, SLOTS, tokens, strict=True):
        state = torch.from_numpy(states[slot].T.copy())[None]
        for at, row in enumerate(out):
            hidden, steps, into, from_, z = (array[:, at] for array in arrays)
            expected = modeling_jamba.mamba_selective_state_update(
                state, hidden, steps, growth, into, from_, skip, bias, dt_softplus=True, z=z
            )
            close(row, expected[0])
        close(after, state[0].T)


def test_gated_norms_are_those_of_transformers() -> None:
    rows, gates = numbers(50, 96), numbers(50, 96, seed=1)
    tensors = torch.from_numpy(rows), torch.from_numpy(gates)
    heads = [tensor.view(-1, 32) for tensor in tensors]
    cases = [
        (modeling_qwen3_next.Qwen3NextRMSNormGated(32), heads, 32, {}),
        (modeling_kimi_linear.KimiLinearRMSNormGated(32), heads, 32, {"function": "sigmoid"}),
        (modeling_mamba2.MambaRMSNormGated(96, 48), tensors, 48, {"is_norm_first": False}),
        (
            modeling_falcon_h1.FalconH1RMSNormGated(96, n_groups=3, norm_before_gate=True),
            [tensor[None] for tensor in tensors],
            32,
            {},
        ),
    ]
    out = np.empty_like(rows)
    for norm, arrays, group_size, options in cases:
        weight = numbers(len(norm.weight), seed=2)
        norm.weight.data = torch.from_numpy(weight)
        numbers_of_norm = weight, out, norm.variance_epsilon
        gated_norm(THREADS, rows, gates, *numbers_of_norm, group_size=group_size, **options)
        with torch.no_grad():
            close(out, norm(*arrays).reshape(50, 96))


def halves(array: Array) -> Array:
    """As bfloat16, whose bits are the upper halves: the numbers have no others."""
    return (array.view(np.uint32) >> 16).astype(np.uint16)


def rounded(array: Array) -> Array:
    return (array.view(np.uint32) & 0xFFFF0000).view(np.float32)


def test_bfloat16_is_float32_that_was_rounded() -> None:
    query, key, value = (rounded(numbers(TOKENS, 2, 16, seed=seed)) for seed in (1, 2, 3))
    gates, betas = (rounded(numbers(TOKENS, 2, seed=seed)) for seed in (4, 5))
    arrays = query, key, value, gates, betas
    weights = (-np.ones(2, np.float32), np.ones(2, np.float32))
    step, states = step_of(LENS, SLOTS, SLOTS), states_of(2, 16, 16)
    out, half = np.empty((TOKENS, 2, 16), np.float32), np.empty((TOKENS, 2, 16), np.uint16)
    after = states.copy()
    gated_delta(THREADS, step, *arrays, weights, states, out, scaling=1.0)
    gated_delta(THREADS, step, *map(halves, arrays), weights, after, half, scaling=1.0)
    expected = torch.from_numpy(out).to(torch.bfloat16).view(torch.int16).numpy()
    assert half.tobytes() == expected.tobytes()
    assert states.tobytes() == after.tobytes()


def test_initial_states_of_other_slots_stay() -> None:
    x, weight, states = numbers(3, 8), numbers(3, 8, seed=1), states_of(2, 8)
    before, out = states.copy(), np.empty((3, 8), np.float32)
    short_conv(THREADS, step_of((1, 2), (1, 1), (0, -1)), x, weight, states, out)
    assert (states[1:] == before[1:]).all()
    assert (states[0] == [before[1, 1], x[0]]).all()
    zeros, expected = np.zeros_like(states), np.empty((1, 8), np.float32)
    short_conv(THREADS, step_of((1,), (0,), (-1,)), x[:1], weight, zeros, expected)
    short_conv(THREADS, step_of((1,), (-1,), (0,)), x[:1], weight, states, out[:1])
    assert (out[:1] == expected).all()


@pytest.mark.parametrize(
    ("sources", "slots", "message"),
    [
        ((0, 1), (0, 0), "slot 0 is written by one of the sequences 0 and 1"),
        ((0, 1), (1, 2), "slot 1 is written by one of the sequences"),
        ((-2, 1), (0, 1), r"sources\[0\]=-2: it must be a slot"),
        ((0,), (0, 1), "sources has 1 elements"),
    ],
)
def test_slots_that_contradict_each_other_are_named(
    sources: tuple[int, ...], slots: tuple[int, ...], message: str
) -> None:
    with pytest.raises(BufferError, match=message):
        step_of((1, 1), sources, slots)


def test_starts_that_decrease_are_named() -> None:
    slots = np.zeros(1, np.int64)
    with pytest.raises(BufferError, match=r"query_start_loc\[1\]=-1"):
        CpuStateStep(query_start_loc=np.array([0, -1], np.int32), sources=slots, slots=slots)
    with pytest.raises(BufferError, match="array slots has format"):
        CpuStateStep(
            query_start_loc=np.array([0, 1], np.int32), sources=slots, slots=slots.astype(np.int32)
        )


def delta_arrays(**changed: Array) -> dict[str, Array]:
    arrays = {
        "query": numbers(3, 2, 4),
        "key": numbers(3, 2, 4),
        "value": numbers(3, 4, 5),
        "decay_gate": numbers(3, 4),
        "beta_gate": numbers(3, 4),
        "weights": (-np.ones(4, np.float32), np.ones(4, np.float32)),
        "states": states_of(4, 4, 5),
        "out": np.full((3, 4, 5), 7, np.float32),
    }
    return {**arrays, **changed}


@pytest.mark.parametrize(
    ("name", "array"),
    [
        ("query", numbers(3, 2, 5)),
        ("key", numbers(4, 2, 4)),
        ("key", numbers(3, 1, 4)),
        ("key", np.zeros((3, 2, 4), np.uint16)),
        ("value", numbers(3, 4, 4)),
        ("value", numbers(3, 5, 4).swapaxes(1, 2)),
        ("decay_gate", numbers(3, 16)),
        ("beta_gate", numbers(3, 2)),
        ("states", states_of(4, 4, 5).astype(np.float64)),
        ("states", states_of(4, 5, 4).swapaxes(2, 3)),
        ("out", np.full((3, 4, 4), 7, np.float32)),
    ],
)
def test_arrays_of_a_delta_rule_that_do_not_fit_are_named(name: str, array: Array) -> None:
    arrays = delta_arrays(**{name: array})
    states, out = arrays["states"].copy(), arrays["out"].copy()
    with pytest.raises(BufferError, match=f"array {name} "):
        gated_delta(THREADS, step_of((1, 2), (-1, 0), (1, 0)), **arrays, scaling=1.0)
    assert (arrays["states"] == states).all()
    assert (arrays["out"] == out).all()


@pytest.mark.parametrize(("rate", "bias"), [(3, 4), (4, 3), (4, 8)])
def test_weights_of_a_delta_rule_that_do_not_fit_are_named(rate: int, bias: int) -> None:
    arrays = delta_arrays(weights=(numbers(rate), numbers(bias)))
    name = "dt_bias" if rate == 4 else "rate"
    with pytest.raises(BufferError, match=f"array {name} has shape"):
        gated_delta(THREADS, step_of((1, 2), (-1, 0), (1, 0)), **arrays, scaling=1.0)


def test_slots_and_heads_that_are_not_there_are_named() -> None:
    arrays, few = delta_arrays(), step_of((1, 2), (-1, 0), (4, 0))
    with pytest.raises(BufferError, match=r"slots\[0\]=4 is neither -1 nor one of the 4 slots"):
        gated_delta(THREADS, few, **arrays, scaling=1.0)
    uneven = delta_arrays(query=numbers(3, 3, 4), key=numbers(3, 3, 4))
    with pytest.raises(ConfigError, match="4 heads cannot share 3 heads of keys evenly"):
        gated_delta(THREADS, step_of((1, 2), (-1, 0), (1, 0)), **uneven, scaling=1.0)
    with pytest.raises(BufferError, match="the other arrays require"):
        gated_delta(THREADS, step_of((1, 1), (-1, 0), (1, 0)), **arrays, scaling=1.0)
    assert (arrays["out"] == 7).all()


def test_arrays_that_share_memory_are_refused() -> None:
    step, memory = step_of((2,), (0,), (0,)), numbers(4, 2, 8)
    with pytest.raises(BufferError, match="arrays out and x share memory"):
        short_conv(THREADS, step, memory[0], numbers(3, 8), states_of(2, 8), memory[0])
    with pytest.raises(BufferError, match="arrays states and x share memory"):
        short_conv(THREADS, step, memory[0], numbers(3, 8), memory, np.empty_like(memory[0]))
    with pytest.raises(BufferError, match="arrays out and rows share memory"):
        gated_norm(THREADS, memory[0], memory[1], numbers(8), memory[0], 1e-5)
    with pytest.raises(ValueError, match='function is "gelu"'):
        gated_norm(THREADS, memory[0], memory[1], numbers(8), memory[2], 1e-5, function="gelu")
