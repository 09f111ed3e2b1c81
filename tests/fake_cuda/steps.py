"""Steps of a real runner over a device that is not there."""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch._inductor.utils import fresh_inductor_cache

from benches.gpu.decoders import unfilled_decoder
from pyengine.attention import dispatch, flashinfer, flex
from pyengine.attention.backend import QKV, AttentionMetadata, AttentionOptions, StepInputs
from pyengine.attention.choice import choose_backend
from pyengine.attention.context import PagedContext
from pyengine.attention.flashinfer import (
    FlashInferBackend,
    FlashInferGraphMetadata,
    FlashInferMetadata,
)
from pyengine.attention.needs import OPTIONAL_PACKAGES, LayerNeeds, needs_of
from pyengine.errors import ConfigurationError
from pyengine.executor.compiled import CompiledForward
from pyengine.executor.cuda_graphs import DecodeGraphs
from pyengine.executor.input_buffers import RunnerLimits
from pyengine.executor.model_runner import Forward, ModelRunner
from pyengine.executor.states import StateSlots
from pyengine.kv_cache import BlockManager
from pyengine.kv_cache.layer_groups import choose_layer_groups
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from pyengine.kv_cache.states import StatePool, StateSpec
from pyengine.models import fallback
from pyengine.models.decoder.families import TABLE
from pyengine.models.decoder.model import attending_layers
from pyengine.models.model import Model
from pyengine.sampling.sampler import SamplingBatch, sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from pyengine.utils.dtypes import DType
from tests.fake_cuda import libraries
from tests.gpu import models
from tests.gpu.models import _BASE, FAMILIES, LONGEST, VOCABULARY, model_of
from tests.support.cuda_lowering import Lowering
from tests.support.fake_cuda import FakeCuda, kernels_warmed_up
from tests.support.graphs import record_eagerly

DEVICE = torch.device("cuda:0")
DTYPE: DType = "bfloat16"
_TOKENS, _SEQUENCES = 256, 8
PROMPTS = (40, 100, 7)
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
MORE: dict[str, dict[str, Any]] = {
    "gpt2": {
        "vocab_size": VOCABULARY,
        "n_embd": 512,
        "n_head": 4,
        "n_layer": 3,
        "n_positions": LONGEST,
    },
    "nemotron": {"head_dim": 128, "partial_rotary_factor": 0.5},
    "qwen3_moe": {"head_dim": 128, **_EXPERTS},
    "glm4_moe": {
        "head_dim": 128,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "first_k_dense_replace": 1,
    },
    "gemma4_text": {
        "head_dim": 128,
        "global_head_dim": 128,
        "num_kv_shared_layers": 1,
        "hidden_size_per_layer_input": 64,
        "vocab_size_per_layer_input": VOCABULARY,
        "sliding_window": 48,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    },
    "gemma": {"head_dim": 128},
}
"""Families beside those of `tests/gpu`; "gemma" runs as a module of transformers."""
WITH_STATES: dict[str, dict[str, Any]] = {
    **models.WITH_STATES,
    "qwen3_next": {**models.DELTA, **_EXPERTS, "shared_expert_intermediate_size": 256},
    "kimi_linear": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "linear_num_heads": 4,
        "linear_head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 256,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "jamba": {"num_experts": 1, "attn_layer_period": 2, "attn_layer_offset": 1},
}
"""Families with recurrent layers, one for each kind."""
PARAMS = (
    SamplingParams(temperature=0),
    SamplingParams(temperature=1, top_p=0.9, logprobs=2),
    SamplingParams(temperature=1, top_k=5, min_p=0.1, frequency_penalty=0.1),
)


def _model(
    device: FakeCuda, family: str, quantization: Literal["none", "fp8"]
) -> tuple[Model, tuple[LayerNeeds, ...], Sequence[StateSpec]]:
    """A decoder of ours on the device, or a module of transformers.

    And the attention of its layers, and the states of recurrent ones.
    """
    own = FAMILIES.get(family) or MORE.get(family) or WITH_STATES.get(family)
    settings = {**_BASE, **(own or {})}
    if family == "gpt2":  # it has other names for sizes
        settings = MORE[family]
    if family in TABLE:
        model, spec = unfilled_decoder(family, settings, DEVICE, quantization=quantization)
        return model, attending_layers(spec), spec.state_specs
    module = model_of(family, settings)
    layers = fallback.attending_layers(module)
    return fallback.FallbackModel(device.move(module), layers, "a test"), layers, ()


class Machine:
    """A model of `family` and its KV pool on the device, with `backend`."""

    def __init__(
        self,
        device: FakeCuda,
        family: str,
        backend: str,
        kv_dtype: DType | None = None,
        *,
        quantises: bool = False,
    ) -> None:
        rounding: Literal["none", "fp8"] = "fp8" if quantises else "none"
        self.model, layers, states = _model(device, family, rounding)
        needs = needs_of(layers, DEVICE, DTYPE, kv_dtype=kv_dtype)
        needs = replace(needs, packages=frozenset(OPTIONAL_PACKAGES))
        choice = choose_backend(backend, needs)
        specs = [
            KVCacheSpec(each.kv_heads, each.head_dim_k, each.head_dim_v, needs.cache_dtype)
            for each in layers
        ]
        windows = [each.window for each in layers]
        self.groups = choose_layer_groups(windows, [each.token_bytes for each in specs], LONGEST)
        size = choice.block_size
        slots = StatePool(states, _SEQUENCES, DEVICE) if states else None
        blocks = 64 * 64 // size
        self.pool = KVPool(specs, blocks, size, DEVICE, self.groups, slots)
        self.backend = choice.build(self.pool)
        limits = RunnerLimits(
            max_num_batched_tokens=_TOKENS,
            max_num_seqs=_SEQUENCES,
            max_blocks_per_seq=-(-LONGEST // size),
            num_groups=len(self.groups.windows),
            has_states=bool(states),
        )
        loaded: Any = SimpleNamespace(
            model=self.model, mtp_layers=None, num_mtp_layers=0, device=DEVICE, dtype=DTYPE
        )
        self.runner = ModelRunner(
            loaded,
            self.pool,
            self.backend,
            limits,
            record=record_eagerly if self.backend.supports_graphs else None,
        )

    def capture(self) -> None:
        """Capture decode steps, and others in pieces, if the backend supports graphs.

        All sizes must have one.
        """
        runner: Any = self.runner
        if self.backend.supports_graphs:
            runner.capture()
            assert runner.graphs.sizes == runner.graph_sizes
        if self.backend.supports_graphs and self.pool.snapshots is None:
            runner.capture_piecewise(record_eagerly.pieces)
            assert runner.piecewise.sizes == runner.piecewise_sizes

    def steps(self, shared: int = 0, *, ahead: bool = False) -> int:
        """Chunks of prompts beside decodes, then decodes alone; returns the number of steps.

        The prompts have `shared` more tokens in front, the same ones. With `ahead`, each step is
        prepared before the one before it runs, whose tokens are unknown then.
        """
        blocks, size = self.pool.num_blocks, self.pool.block_size
        snapshots = self.pool.snapshots
        for_states: dict[str, Any] = {}
        if snapshots is not None:  # no chunk is cut
            for_states = {"state_blocks": snapshots.num_blocks, "snapshot_min_tokens": LONGEST}
        manager = BlockManager(blocks, size, groups=self.groups.windows, **for_states)
        states = [
            SamplingState(params, [1, 2, 3], seed=row, vocab_size=VOCABULARY)
            for row, params in enumerate(PARAMS)
        ]
        first, second, third = (
            manager.sequence([*range(shared), *np.arange(length) + 13 * length])
            for length in PROMPTS
        )
        steps: list[Callable[[Any], object]] = [
            lambda plan: (plan.prefill(first, 40 + shared), plan.prefill(second, 64)),
            lambda plan: (plan.decode([first]), plan.prefill(second, 100), plan.prefill(third, 7)),
            *[lambda plan: plan.decode([first, second, third])] * 3,
            lambda plan: plan.decode([first]),
        ]
        rows = [(first, second), (first, second, third), *[(first, second, third)] * 3, (first,)]

        def slots_of(number: int) -> StateSlots | None:
            if snapshots is None:
                return None
            return StateSlots([each.id for each in rows[number]], range(len(rows[number])))

        waiting: list[tuple[Any, Forward]] = []
        sampled: torch.Tensor | None = None
        for number, fill in enumerate(steps):
            plan = manager.begin_step(_TOKENS)
            fill(plan)
            waiting.append((plan, self.runner.prepare(plan, states=slots_of(number))))
            ids = self.runner._other_buffers.arrays.input_ids[: plan.num_tokens]
            assert bool((ids < 0).any()) == (ahead and number > 0), "tokens that are not known yet"
            if len(waiting) > ahead:
                sampled = self._run(*waiting.pop(0), states, sampled)
        for plan, forward in waiting:
            sampled = self._run(plan, forward, states, sampled)
        return len(steps)

    def _run(
        self,
        plan: Any,
        forward: Forward,
        states: Sequence[SamplingState],
        before: torch.Tensor | None,
    ) -> torch.Tensor:
        logits = forward(before).sampling
        assert logits.shape == (plan.num_samples, VOCABULARY) and logits.is_cuda
        drawn: torch.Tensor = sample(logits, SamplingBatch(states[: len(logits)])).token_ids
        assert drawn.shape == (len(logits),) and drawn.is_cuda
        plan.commit(np.ones(len(logits), dtype=np.int64))
        return drawn


class CompiledOnDevice:
    """A compiled forward pass whose graphs are lowered for `device`; attention is not in them."""

    def __init__(self, device: FakeCuda, machine: Machine) -> None:
        self.lowering = Lowering()
        self._device = device
        # On fake tensors, torch runs the operator's fake: no layer is counted.
        uncounted = patch.object(fallback.FallbackModel, "check_attended")
        with device.paused(), uncounted:
            lowered: Any = self.lowering
            self._compiled = CompiledForward(machine.model, machine.pool.num_layers, lowered)

    def __call__(self, inputs: StepInputs, context: PagedContext) -> torch.Tensor:
        inside = replace(context, metadata=_OnDevice(self._device, context.metadata))
        # On fake tensors, torch runs the operator's fake.
        operator = SimpleNamespace(default=_attend_as_promised)
        with (
            self._device.paused(),
            patch.object(torch.ops.pyengine, "paged_attention", operator),
        ):
            logits: torch.Tensor = self._compiled(inputs, inside)
        context.attended = inside.attended
        return logits


def _attend_as_promised(*arguments: Any) -> torch.Tensor:
    """Attention, whose result is laid out as the graph was compiled for: it reads no strides."""
    found = dispatch._attend_opaquely(*arguments)
    promised = dispatch._shape(*arguments)
    assert (found.dtype, found.device) == (promised.dtype, promised.device), "a broken promise"
    assert _layout(found) == _layout(promised), "a broken promise"
    return found


def _layout(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Sizes and strides; the stride of a single element is not one."""
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return [(size, stride if size > 1 else 0) for size, stride in pairs]


class _OnDevice:
    def __init__(self, device: FakeCuda, metadata: AttentionMetadata) -> None:
        self._device = device
        self._metadata = metadata

    def forward(self, layer: int, qkv: QKV, options: AttentionOptions) -> torch.Tensor:
        with self._device.resumed():
            return self._metadata.forward(layer, qkv, options)


def run_compiled(capability: str, backend: str, family: str) -> None:
    """The default configuration: compiled, CUDA graphs, the next step prepared ahead.

    The compiled graphs check the sizes and strides of what attention gives.
    """
    _run_compiled(capability, backend, family)


def run_compiled_in_fp8(capability: str, backend: str, family: str) -> None:
    """The same with weights in 8-bit floats."""
    _run_compiled(capability, backend, family, quantises=True, lowers_flex=False)


def run_compiled_without_flex(capability: str, backend: str, family: str) -> None:
    """The same with FlexAttention by torch's operators."""
    _run_compiled(capability, backend, family, lowers_flex=False)


def _run_compiled(
    capability: str,
    backend: str,
    family: str,
    *,
    quantises: bool = False,
    lowers_flex: bool = True,
) -> None:
    major, minor = divmod(int(capability), 10)
    device = FakeCuda((major, minor))
    libraries.install(backend)
    attending = lowered_flex(device) if lowers_flex else uncompiled_flex()
    with graphs_lowered_anew(), device, kernels_warmed_up(), attending as of_attention:
        machine = Machine(device, family, backend, quantises=quantises)
        compiled = CompiledOnDevice(device, machine)
        assert compiled.lowering.num_graphs == 2
        kernels = compiled.lowering.kernels
        assert len(kernels) > 5
        assert all(code.startswith(b"\x7fELF") for code in kernels.values())
        machine.runner._forward.compiled = compiled  # type: ignore[assignment]
        machine.capture()
        device.waits.clear()
        machine.steps()
        with counted_replays() as replays:
            machine.steps(ahead=True)
        assert len(replays) == (4 if machine.backend.supports_graphs else 0)
    assert compiled.lowering.num_graphs == 2
    assert not device.waits, "\n".join(device.waits)
    if backend == "flex" and of_attention is not None:
        _check_flex(of_attention)


@contextmanager
def counted_replays() -> Iterator[list[int]]:
    """The batch sizes of the steps that graphs run."""
    run, sizes = DecodeGraphs.run, []

    def counting(graphs: DecodeGraphs, inputs: StepInputs) -> torch.Tensor:
        sizes.append(len(inputs.seq_lens))
        return run(graphs, inputs)

    with patch.object(DecodeGraphs, "run", counting):
        yield sizes


def run_broken(way: str) -> None:
    """Results of attention that are not as promised, by a compiled graph: an error."""
    attend = dispatch._attend_opaquely

    def broken(*arguments: Any) -> torch.Tensor:
        return BROKEN[way](attend(*arguments))

    with (
        patch.object(dispatch, "_attend_opaquely", broken),
        pytest.raises(AssertionError, match="a broken promise"),
    ):
        run_compiled("90", "gather", "llama")


BROKEN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "heads first": lambda found: found.transpose(0, 1).contiguous().transpose(0, 1),
    "part of a wider one": lambda found: torch.cat([found, found], -1)[..., : found.shape[-1]],
    "a head less": lambda found: found[:, 1:].contiguous(),
    "in float16": lambda found: found.half(),
}
"""Ways in which a result may differ from what the operator's fake gives."""


def run_flex(capability: str, family: str) -> None:
    """The same with FlexAttention compiled to machine code, outside of a compiled forward pass."""
    major, minor = divmod(int(capability), 10)
    device = FakeCuda((major, minor))
    with graphs_lowered_anew(), device, kernels_warmed_up(), lowered_flex(device) as lowering:
        machine = Machine(device, family, "flex")
        machine.capture()
        device.waits.clear()
        machine.steps()
    assert not device.waits, "\n".join(device.waits)
    _check_flex(lowering)


def _check_flex(lowering: Lowering) -> None:
    """It has kernels of FlexAttention for decodes, and for steps with prefills."""
    codes = [code for (_, name), code in lowering.kernels.items() if "flex_attention" in name]
    assert len(codes) >= 2, list(lowering.kernels)
    assert all(code.startswith(b"\x7fELF") for code in codes)


@contextmanager
def graphs_lowered_anew() -> Iterator[None]:
    """No graph comes from the compiler's cache; kernels may come from Triton's."""
    kernels = os.environ["TRITON_CACHE_DIR"]
    with fresh_inductor_cache(), patch.dict(os.environ, TRITON_CACHE_DIR=kernels):
        yield


@contextmanager
def lowered_flex(device: FakeCuda) -> Iterator[Lowering]:
    """FlexAttention compiled for `device`; its results have the strides of the compiled kernel."""
    lowering, traced = Lowering(), flex.compiled

    def lowered(attend: Any) -> Callable[..., Any]:
        compiled = traced(attend, backend=lowering)

        def call(*tensors: torch.Tensor, **options: Any) -> Any:
            with device.paused():
                return compiled(*tensors, **options)

        return call

    with patch("pyengine.attention.flex.compiled", lowered):
        yield lowering


def run(backend: str, *families: str) -> None:
    """Capture, then steps: no number is read, nothing makes the host wait."""
    _run(FakeCuda(), backend, families)


def run_sharing(*families: str) -> None:
    """The same with prompts that share blocks, which flashinfer reads once."""
    device = FakeCuda()
    libraries.install("flashinfer")
    eager: list[bool] = []
    replayed: list[bool] = []
    metadata, refresh = FlashInferBackend.metadata, FlashInferGraphMetadata.refresh

    def building(backend: FlashInferBackend, inputs: StepInputs) -> FlashInferMetadata:
        built = metadata(backend, inputs)
        eager.append(built._cascade is not None)
        return built

    def refreshing(of_graph: FlashInferGraphMetadata, inputs: StepInputs) -> None:
        refresh(of_graph, inputs)
        replayed.append(inputs.cascade is not None and bool(of_graph._sharers))

    for family in families:
        eager.clear()
        replayed.clear()
        with (
            device,
            kernels_warmed_up(),
            patch.object(FlashInferBackend, "metadata", building),
            patch.object(FlashInferGraphMetadata, "refresh", refreshing),
            patch.object(flashinfer, "_WORTH_A_CASCADE", 1),
        ):
            machine = Machine(device, family, "flashinfer")
            machine.capture()
            graphs: Any = machine.runner.graphs
            assert graphs.sharing_sizes == machine.runner.graph_sizes[1:]
            device.waits.clear()
            machine.steps(shared=64)
        assert eager[-1], "a chunk of a prompt beside a decode"
        assert replayed == [True] * 3 + [False], replayed  # three sequences decode, then one
        assert not device.waits, "\n".join([family, *device.waits])


def needed_modules() -> None:
    """flashinfer asks for one prefill module for each kind of layer, and for the one that merges.

    For graphs, for steps without one, and for steps that share blocks.
    """
    device = FakeCuda()
    libraries.install("flashinfer")
    with patch.object(flashinfer, "_WORTH_A_CASCADE", 1):
        for (family, kv_dtype), expected in MODULES.items():
            libraries.used_modules.clear()
            with device, kernels_warmed_up():
                machine = Machine(device, family, "flashinfer", kv_dtype)
                machine.capture()
                machine.steps()
                machine.steps(shared=64)
            used = libraries.used_modules
            assert used == {*expected, "cascade"}, (family, kv_dtype, used)


def _module(head_dim: int, window: bool = False, softcap: bool = False, kv: str = "bf16") -> str:
    """The name of the module with flashinfer's kernels of "fa2" for a kind of layer."""
    return (
        f"batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_{kv}_dtype_o_bf16_dtype_idx_i32_"
        f"head_dim_qk_{head_dim}_head_dim_vo_{head_dim}_posenc_0_use_swa_{window}_"
        f"use_logits_cap_{softcap}_f16qk_False"
    )


MODULES: dict[tuple[str, DType | None], set[str]] = {
    ("llama", None): {_module(128)},
    ("llama", "float8_e4m3fn"): {_module(128, kv="e4m3")},
    ("gemma2", None): {_module(128, softcap=True), _module(128, window=True, softcap=True)},
    ("gpt_oss", None): {_module(64), _module(64, window=True)},
}
"""The modules that a family needs with a type of KV cache; None: the model's."""


def run_in_8_bits(backend: str, *families: str) -> None:
    """The same with a KV cache of 8-bit floats."""
    _run(FakeCuda(), backend, families, "float8_e4m3fn")


def run_with_weights_in_fp8(backend: str, *families: str) -> None:
    """The same with weights in 8-bit floats: torch checks the sizes and strides of its products."""
    _run(FakeCuda(), backend, families, quantises=True)


def run_release(release: str, *families: str) -> None:
    """The same with another release of flash-attn."""
    device = FakeCuda()
    libraries.install("flash-attn")
    libraries.flash_attn_as(release)
    _run(device, "flash-attn", families)


def _run(
    device: FakeCuda,
    backend: str,
    families: Sequence[str],
    kv_dtype: DType | None = None,
    *,
    quantises: bool = False,
) -> None:
    libraries.install(backend)
    for family in families:
        with device, kernels_warmed_up() as kernels, uncompiled_flex():
            machine = Machine(device, family, backend, kv_dtype, quantises=quantises)
            machine.capture()
            device.waits.clear()
            assert machine.steps() == 6
            machine.pool.copy_blocks([(0, 1), (1, 2)])
        assert kernels, family
        assert not device.waits, "\n".join([family, *device.waits])


def refused(backend: str, reason: str, *families: str) -> None:
    """The backend says that it cannot serve these families, with `reason` in its words."""
    device = FakeCuda()
    libraries.install(backend)
    for family in families:
        with device, pytest.raises(ConfigurationError, match=f"cannot serve.*{reason}"):
            Machine(device, family, backend)


@contextmanager
def uncompiled_flex() -> Iterator[None]:
    """FlexAttention by torch's operators: compiling is left to other tests."""
    from torch.nn.attention import flex_attention

    with (
        patch("pyengine.attention.flex.compiled", lambda attend: attend),
        patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True),
    ):
        yield
