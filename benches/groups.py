"""Savings of layer groups: peak KV memory of one sequence, as two markdown tables.

    python benches/groups.py

The first table is the block manager at work without a model: real layer counts, windows and KV
shapes, bfloat16, a prompt computed in chunks of 2,048 tokens and then 64 decodes. "prefill" is the
most that is held while a chunk is computed, "decode" the most while the answer grows; "saved" is
the share of the full tables that the larger of the two leaves free, and "in decode" the latter. The
second is a real run of small random models of both families, with and without groups.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pyengine import LLM, BlockManager, SamplingParams
from pyengine.kv_cache.layer_groups import LayerGroups, choose_layer_groups
from pyengine.kv_cache.pool import KVCacheSpec, bytes_per_block
from pyengine.models.decoder.loading import spec_of
from pyengine.models.transformers_calls import quiet_transformers

BLOCK_SIZE, CHUNK, DECODES = 16, 2048, 64
CONTEXTS = (1024, 4096, 16_384, 32_768)
MIB = 1 << 20
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {  # as their config.json say
    "gemma-3-1b": (
        "gemma3_text",
        {
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
            "max_position_embeddings": 32_768,
        },
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "num_hidden_layers": 24,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "max_position_embeddings": 131_072,
        },
    ),
}
SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
    "sliding_window": 32,
    "max_position_embeddings": 2048,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


@dataclass(frozen=True)
class Held:
    """The most bytes of KV that one sequence held, while its prompt was computed and after."""

    prefill: int
    decode: int


def walk(groups: LayerGroups, specs: Sequence[KVCacheSpec], context: int) -> Held:
    """Take one sequence of `context` tokens through the block manager, and weigh its blocks."""
    num_blocks = len(groups.windows) * (context + DECODES) // BLOCK_SIZE + 64
    manager = BlockManager(num_blocks, BLOCK_SIZE, groups=groups.windows, prefix_caching=False)
    sequence = manager.sequence(range(context))
    prefill = decode = 0
    while sequence.num_computed_tokens < context:
        plan = manager.begin_step(CHUNK)
        plan.prefill(sequence, CHUNK)
        prefill = max(prefill, manager.usage().active)
        plan.commit([0] * plan.num_samples)
    for _ in range(DECODES):
        plan = manager.begin_step(1)
        plan.decode([sequence])
        decode = max(decode, manager.usage().active)
        plan.commit([0])
    manager.check()
    size = bytes_per_block(groups.tensor_shapes(specs), BLOCK_SIZE)
    return Held(prefill * size, decode * size)


def print_shapes() -> None:
    """The table of real shapes."""
    print("| model | context | full tables, MiB | groups: prefill | decode | saved | in decode |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (family, settings) in SHAPES.items():
        spec = spec_of(AutoConfig.for_model(family, **settings).to_dict(), name)
        specs = spec.cache_specs("bfloat16")
        length = settings["max_position_embeddings"]
        groups = choose_layer_groups(spec.windows, specs, length)
        print(f"{name}: {groups}", file=sys.stderr)
        for context in CONTEXTS:
            full = walk(LayerGroups.single(len(specs)), specs, context).decode
            held = walk(groups, specs, context)
            cells = (full / MIB, held.prefill / MIB, held.decode / MIB)
            numbers = " | ".join(f"{cell:,.1f}" for cell in cells)
            saved = [1 - most / full for most in (max(held.prefill, held.decode), held.decode)]
            shares = " | ".join(f"{share:.0%}" for share in saved)
            print(f"| {name} | {context:,} | {numbers} | {shares} |")


@dataclass(frozen=True)
class Run:
    """A generation: its tokens, the most blocks in use while a step ran, and a block's bytes."""

    tokens: list[list[int]]
    peak: int
    block_bytes: int


def run(folder: Path, *, layer_groups: bool) -> Run:
    """Four prompts of 400 tokens, 400 new ones each."""
    llm = LLM(
        folder,
        device="cpu",
        num_blocks=2048,
        max_num_seqs=4,
        max_num_batched_tokens=256,
        enable_prefix_caching=False,
        layer_groups=layer_groups,
    )
    runner, peaks = llm._engine._executor.runner, [0]
    prepare = runner.prepare

    def watched(plan: Any, **rows: Any) -> Any:
        peaks.append(llm.stats().usage.active)
        return prepare(plan, **rows)

    runner.prepare = watched  # type: ignore[method-assign]
    prompts = [[3 + (7 * name + at * at) % 90 for at in range(400)] for name in range(4)]
    greedy = SamplingParams(temperature=0, ignore_eos=True, max_tokens=400)
    outputs = llm.generate(prompts, greedy, use_tqdm=False)
    tokens = [output.outputs[0].token_ids for output in outputs]
    size = int(str(llm.describe()["kv_cache_bytes"])) // 2049
    return Run(tokens, max(peaks), size)


def print_runs() -> None:
    """The table of real runs."""
    print("| small model | tables | peak blocks | KiB per block | peak KiB | same tokens |")
    print("|---|---|---:|---:|---:|---|")
    for family, _ in SHAPES.values():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, **SMALL)
        with TemporaryDirectory() as folder, quiet_transformers():
            AutoModelForCausalLM.from_config(config).save_pretrained(folder)
            runs = {
                name: run(Path(folder), layer_groups=name == "groups")
                for name in ("full", "groups")
            }
        for name, item in runs.items():
            same = "yes" if item.tokens == runs["full"].tokens else "no"
            kib = item.block_bytes / 1024
            cells = f"{item.peak} | {kib:g} | {item.peak * kib:,.0f} | {same}"
            print(f"| {family} | {name} | {cells} |")


if __name__ == "__main__":
    print_shapes()
    print()
    print_runs()
