"""Counts what a decode step asks of the device for one layer, on a CPU.

    python -m benches.gpu.launches [--compiled]

Twice: as transformers has the model, and by our decoder with the kernels of CUDA, where attention's
kernel of the KV write does the norm of heads and the rotary embedding. Two models of a family
differ by a period of layers: so do the operations that they dispatch. Eager: on torch's device
"meta", which has shapes and computes nothing; a Triton kernel counts as one operation, views and
memory as none. Compiled: the kernels and library calls that torch's compiler leaves of our decoder,
compiled for the CPU, with a stand-in for attention. The KV write and the attention kernel are one
operation each in all.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from benches.engine.states import SHAPES
from benches.gpu.decoders import unfilled_decoder
from pyengine.attention.backend import QKV, AttentionOptions
from pyengine.attention.context import PagedContext
from pyengine.attention.dispatch import CompiledModel, running
from pyengine.kv_cache.states import LayerState, StateInputs
from pyengine.models.decoder.model import DecoderModel
from pyengine.models.fallback import FallbackModel, attending_layers
from pyengine.models.model import Model
from pyengine.models.transformers_calls import quiet_transformers

ROWS = 64
SMALL = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "gemma3_text": {"query_pre_attn_scalar": 32, "sliding_window": 64},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 64},
}
RECURRENT: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["full_attention", "conv"]},
    "qwen3_5_text": {"layer_types": ["full_attention", "linear_attention"]},
    "granitemoehybrid": {
        "layer_types": ["attention", "mamba"],
        "mamba_n_heads": 8,
        "mamba_d_head": 32,
        "mamba_d_state": 16,
        "shared_intermediate_size": 256,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
    },
}
"""Families with one layer that attends before others, which keep states, all of one kind."""
FEWEST = 2
"""Layers; the other model has twice as many, so that kinds of layers that alternate count alike."""
_BY_LENGTH = ("_recurrent_kernel", "_chunked_kernel")
_KERNELS = {
    **dict.fromkeys(("add_norm", "gate", "grouped_linear", "short_conv"), ("_kernel",)),
    "gated_norm": ("_kernel",),
    **dict.fromkeys(("delta_rule", "state_space"), _BY_LENGTH),
}
"""The Triton kernels of a step's layers, by module of `pyengine.kernels`."""


class Launches(TorchDispatchMode):
    """Counts operators that write a tensor, and Triton kernels; views and memory are none."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on."""
        result = func(*args, **(kwargs or {}))
        is_memory = "empty" in str(func)
        is_view = func.is_view or func is torch.ops.aten._unsafe_view.default
        if not is_view and not is_memory and isinstance(result, torch.Tensor):
            self.counts[str(func)] += 1
        return result

    @contextmanager
    def of_kernels(self) -> Iterator[None]:
        """Inside, our Triton kernels are there, compute nothing and are counted."""
        with ExitStack() as stack:
            stack.enter_context(patch("pyengine.kernels.has_kernels", lambda _device: True))
            for name, kernels in _KERNELS.items():
                module = import_module(f"pyengine.kernels.{name}")
                for kernel in kernels:
                    counted = _Kernel(name, self.counts)
                    stack.enter_context(patch.object(module, kernel, counted))
            yield


class _Kernel:
    """A Triton kernel that is counted."""

    def __init__(self, name: str, counts: Counter[str]) -> None:
        self._name, self._counts = name, counts

    def __getitem__(self, _grid: object) -> Callable[..., None]:
        """A launch."""

        def launch(*_arguments: object, **_named: object) -> None:
            self._counts[self._name] += 1

        return launch


class Counting:
    """Attention that counts as a KV write and a kernel."""

    def forward(self, _layer: int, qkv: QKV, _options: AttentionOptions) -> torch.Tensor:
        """Zeros of the right shape, by two operations."""
        query, _, value = qkv
        return query.new_empty(*query.shape[:2], value.shape[-1]).zero_().zero_()


def settings_of(family: str, layers: int) -> dict[str, Any]:
    """A configuration with so many layers."""
    settings = {**SMALL, **{**FAMILIES, **RECURRENT}[family], "num_hidden_layers": layers}
    if family in RECURRENT:
        first, others = RECURRENT[family]["layer_types"]
        settings["layer_types"] = [first, *[others] * (layers - 1)]
    return settings


def decoder(family: str, layers: int, device: str, dtype: torch.dtype = torch.bfloat16) -> Model:
    """Our decoder, with the kernels of CUDA."""
    return unfilled_decoder(family, settings_of(family, layers), torch.device(device), dtype)[0]


def module(family: str, layers: int, device: str) -> Model:
    """The module of transformers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **settings_of(family, layers))
    models: Any = AutoModelForCausalLM
    with quiet_transformers():
        model = models.from_config(config, dtype=torch.bfloat16).eval().to(device)
    return FallbackModel(model, attending_layers(model), "to be counted")


def eager(family: str, build: Callable[[str, int, str], Model] = decoder) -> float:
    """Launches of a layer, one operator after the other."""
    few, many = (_launches(partial(build, family, FEWEST * times, "meta")) for times in (1, 2))
    return sum((many - few).values()) / FEWEST


def whole_step(name: str) -> Counter[str]:
    """Launches of a decode step of one of `SHAPES`, from tokens to logits."""
    settings = {**SHAPES[name]}
    family, device = settings.pop("model_type"), torch.device("meta")
    return _launches(lambda: unfilled_decoder(family, settings, device)[0])


def _launches(build: Callable[[], Model]) -> Counter[str]:
    """Those of a decode of `ROWS` sequences, one operator after the other."""
    seen = Launches()
    with seen.of_kernels():
        model = build()
        ids = torch.zeros(ROWS, dtype=torch.int64, device="meta")
        context = PagedContext(Counting(), [None] * 2 * FEWEST, states=_states(model))
        with torch.no_grad(), seen:  # inference mode leaves composites whole
            model(ids, ids, ids[:1], context)
    return seen.counts


def _states(model: Model) -> StateInputs | None:
    """The states of a decode, if the model is a decoder with recurrent layers."""
    specs = model._decoder.spec.state_specs if isinstance(model, DecoderModel) else ()
    if not specs:
        return None
    indices = torch.zeros(ROWS, dtype=torch.int64, device="meta")
    starts = torch.zeros(ROWS + 1, dtype=torch.int32, device="meta")
    layers = [
        LayerState(*(torch.zeros(ROWS, *array.shape, device="meta") for array in spec.arrays))
        for spec in specs
    ]
    return StateInputs(starts, indices, indices, layers)


def compiled(family: str) -> float:
    """Launches of a layer that the compiler leaves: its kernels, matrix products, attention."""
    counts = []
    for number, layers in enumerate((FEWEST, 2 * FEWEST)):
        torch._dynamo.reset()
        model = decoder(family, layers, "cpu")
        paged, context = CompiledModel(1000 + number), PagedContext(Counting(), [None] * layers)

        def forward(ids: torch.Tensor, model: Any = model, paged: Any = paged) -> Any:
            return model(ids, ids, ids[:1], paged)

        ids = torch.zeros(ROWS, dtype=torch.int64)
        with torch.no_grad(), running(paged.number, context), fresh_inductor_cache():
            _, sources = run_and_get_code(torch.compile(forward, fullgraph=True), ids)
        counts.append(sum(_calls(source) for source in sources))
    return (counts[1] - counts[0]) / FEWEST


def _calls(source: str) -> int:
    """Kernels and operators that a compiled graph's code calls; attention counts as two."""
    _, _, body = source.partition("def call(")
    kernels = re.findall(r"^\s+(?:cpp|triton)_\w+\(", body, re.MULTILINE)
    library = re.findall(
        r"(?:^\s+|= )(?:extern_kernels|torch\.ops)\.([\w.]+)\(", body, re.MULTILINE
    )
    return len(kernels) + len(library) + sum(name.startswith("pyengine.") for name in library)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(prog="python -m benches.gpu.launches", description=__doc__)
    parser.add_argument("--compiled", action="store_true", help="too; takes minutes")
    options = parser.parse_args()
    print("| family | as transformers has it | on CUDA | on CUDA, compiled |\n|---|---:|---:|---:|")
    for family in FAMILIES:
        launches = f"{compiled(family):g}" if options.compiled else ""
        plain, ours = eager(family, module), eager(family)
        print(f"| {family} | {plain:g} | {ours:g} | {launches} |", flush=True)
    print("\n| family | its layer that keeps a state |\n|---|---:|")
    for family in RECURRENT:
        print(f"| {family} | {eager(family):g} |", flush=True)
    print("\n| model | a decode step |\n|---|---:|")
    for name in SHAPES:
        print(f"| {name} | {whole_step(name).total():,} |", flush=True)


if __name__ == "__main__":
    main()
