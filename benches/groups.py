"""Savings of layer groups: peak KV memory of one sequence, as a markdown table.

    python benches/groups.py

The block manager at work without a model: real layer counts, windows and KV
shapes, bfloat16, a prompt computed in chunks of 2,048 tokens and then 64 decodes. "prefill" is the
most that is held while a chunk is computed, "decode" the most while the answer grows; "saved" is
the share of the full tables that the larger of the two leaves free, and "in decode" the latter.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig

from pyengine import BlockManager
from pyengine.kv_cache.layer_groups import LayerGroups, choose_layer_groups
from pyengine.kv_cache.pool import KVCacheSpec, bytes_per_block, tensor_specs
from pyengine.models.decoder.loading import spec_of

BLOCK_SIZE, CHUNK, DECODES = 16, 2048, 64
CONTEXTS = (1024, 4096, 16_384, 32_768)
MIB = 1 << 20


def _every(period: int, num_layers: int) -> list[str]:
    """Layers that slide, but for the last one of each `period`."""
    return [
        "full_attention" if layer % period == period - 1 else "sliding_attention"
        for layer in range(num_layers)
    ]


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
    "gemma-4-E2B": (
        "gemma4_text",
        {
            "num_hidden_layers": 35,
            "layer_types": _every(5, 35),
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "num_kv_shared_layers": 20,
            "sliding_window": 512,
            "max_position_embeddings": 131_072,
        },
    ),
    "gemma-4-E4B": (
        "gemma4_text",
        {
            "num_hidden_layers": 42,
            "layer_types": _every(6, 42),
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "num_kv_shared_layers": 18,
            "sliding_window": 512,
            "max_position_embeddings": 131_072,
        },
    ),
    "gemma-4-26B-A4B": (
        "gemma4_text",
        {
            "num_hidden_layers": 30,
            "layer_types": _every(6, 30),
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "num_global_key_value_heads": 2,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "max_position_embeddings": 262_144,
        },
    ),
    "gemma-4-31B": (
        "gemma4_text",
        {
            "num_hidden_layers": 60,
            "layer_types": _every(6, 60),
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "num_global_key_value_heads": 4,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 1024,
            "max_position_embeddings": 262_144,
        },
    ),
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
    size = bytes_per_block(tensor_specs(specs, groups), BLOCK_SIZE)
    return Held(prefill * size, decode * size)


def print_shapes() -> None:
    """The table of real shapes."""
    print("| model | context | full tables, MiB | groups: prefill | decode | saved | in decode |")
    print("|---|---:|---:|---:|---:|---:|---:|")
    for name, (family, settings) in SHAPES.items():
        spec = spec_of(AutoConfig.for_model(family, **settings).to_dict(), name)
        specs = spec.cache_specs("bfloat16")
        length = settings["max_position_embeddings"]
        groups = choose_layer_groups(spec.windows, [each.token_bytes for each in specs], length)
        print(f"{name}: {groups}", file=sys.stderr)
        for context in CONTEXTS:
            full = walk(LayerGroups.single(len(specs)), specs, context).decode
            held = walk(groups, specs, context)
            cells = (full / MIB, held.prefill / MIB, held.decode / MIB)
            numbers = " | ".join(f"{cell:,.1f}" for cell in cells)
            saved = [
                1 - held_bytes / full
                for held_bytes in (max(held.prefill, held.decode), held.decode)
            ]
            shares = " | ".join(f"{share:.0%}" for share in saved)
            print(f"| {name} | {context:,} | {numbers} | {shares} |")


if __name__ == "__main__":
    print_shapes()
