"""Counts what a decode step asks of the device for one layer, on a CPU.

    python -m benches.gpu.launches [--compiled]

Twice: as transformers has the model, and as it runs on CUDA, where products of the same rows are
fused, and attention's kernel of the KV write does the norm of heads and the rotary embedding. Two
random models of a family differ by a period of layers: so do the operations that they dispatch.
Eager: on torch's device "meta", which has shapes and computes nothing; views are not counted.
Compiled: the kernels and library calls that torch's compiler leaves of the same graph, of the model
as it runs on CUDA, compiled for the CPU, with a stand-in for attention. The KV write and the
attention kernel are one operation each in all.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.utils import fresh_inductor_cache, run_and_get_code
from torch.utils._python_dispatch import TorchDispatchMode

from pyengine.attention.backend import AttentionOptions, Rows
from pyengine.attention.dispatch import (
    CompiledModel,
    PagedContext,
    register_paged_attention,
    running,
)
from pyengine.models.linear import fuse_linears
from pyengine.models.rotary import take_over_rotations
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
FEWEST = 2
"""Layers; the other model has twice as many, so that kinds of layers that alternate count alike."""


class Launches(TorchDispatchMode):
    """Counts operators that make or write a tensor; views and metadata are none."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count, and go on."""
        found = func(*args, **(kwargs or {}))
        if not func.is_view and isinstance(found, torch.Tensor):
            self.counts[str(func)] += 1
        return found


class Counting:
    """Attention that counts as a KV write and a kernel."""

    def forward(self, _layer: int, rows: Rows, _options: AttentionOptions) -> torch.Tensor:
        """Something of the right shape, by two operations."""
        query, _, value = rows
        return query.new_empty(*query.shape[:2], value.shape[-1]).zero_()


def model(family: str, layers: int) -> Any:
    """A random one, through paged attention, on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        family, **{**SMALL, **FAMILIES[family], "num_hidden_layers": layers}
    )
    models: Any = AutoModelForCausalLM
    with quiet_transformers():
        made = models.from_config(config, dtype=torch.bfloat16)
    made.set_attn_implementation(register_paged_attention())
    return made.eval()


def as_on_cuda(made: Any) -> Any:
    """Fused as an engine does it there."""
    take_over_rotations(made)
    fuse_linears(made)
    return made


def eager(family: str, prepared: Callable[[Any], Any] = as_on_cuda) -> float:
    """Launches of a layer, one operator after the other."""
    found = []
    for layers in (FEWEST, 2 * FEWEST):
        made = prepared(model(family, layers)).to("meta")
        ids = torch.zeros(1, ROWS, dtype=torch.int64, device="meta")
        context = PagedContext(Counting(), [None] * layers)
        with torch.no_grad(), Launches() as seen:  # inference mode leaves composites whole
            made(input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1, paged=context)
        found.append(seen.counts)
    return sum((found[1] - found[0]).values()) / FEWEST


def compiled(family: str) -> float:
    """Launches of a layer that the compiler leaves: its kernels, matrix products, attention."""
    found = []
    for number, layers in enumerate((FEWEST, 2 * FEWEST)):
        torch._dynamo.reset()
        made = as_on_cuda(model(family, layers))
        paged, context = CompiledModel(1000 + number), PagedContext(Counting(), [None] * layers)

        def forward(ids: torch.Tensor, made: Any = made, paged: Any = paged) -> Any:
            return made(
                input_ids=ids, position_ids=ids, use_cache=False, logits_to_keep=1, paged=paged
            ).logits

        ids = torch.zeros(1, ROWS, dtype=torch.int64)
        with torch.no_grad(), running(paged.number, context), fresh_inductor_cache():
            _, sources = run_and_get_code(torch.compile(forward, fullgraph=True), ids)
        found.append(sum(_calls(source) for source in sources))
    return (found[1] - found[0]) / FEWEST


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
    print(
        "| family | as transformers has it | as it runs on CUDA | compiled |\n|---|---:|---:|---:|"
    )
    for family in FAMILIES:
        least = f"{compiled(family):g}" if options.compiled else ""
        plain, ours = eager(family, lambda made: made), eager(family)
        print(f"| {family} | {plain:g} | {ours:g} | {least} |", flush=True)


if __name__ == "__main__":
    main()
