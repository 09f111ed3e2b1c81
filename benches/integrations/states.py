"""Tokens that models with recurrent layers compute: vLLM's manager in align mode, and ours.

    .venv-peers/bin/python -m benches.integrations.states [--requests 32] [--shared 2048] [--own 16]

from the root of the repository; it prints a markdown table. No model computes: the managers alone
are driven, and the tokens of the steps are counted. 32 prompts have 2,048 shared tokens and 16 of
their own, and one token each is sampled. They come one after the other, or all at once to steps of
8,192 tokens. Both pools have 16 GiB.

vLLM's manager has the groups that vLLM makes of the model: one of attention and three of recurrent
layers, with blocks as large as the state of as many layers (`_align_hybrid_block_size`). Chunks are
cut by vLLM's own Scheduler (`_mamba_block_aligned_split`). `prefix_match_unit` is its option for
hits inside blocks; by default, hits end at block boundaries. Ours has blocks of 16 tokens and its
default policy of snapshots. Tokens whose keys and values are cached, but computed again for their
state, count as computed.
"""

import argparse
import importlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from pyengine import BlockManager, Prefilled

POOL_BYTES = 16 << 30
BUDGET = 8192
BLOCK = 16  # ours; also what vLLM's attention kernels require a block to be a multiple of
FLOAT32, BFLOAT16 = 4, 2


@dataclass(frozen=True)
class Shape:
    """Layers of a model, per recurrent layer 32 heads of 128 x 128, and 8,192 channels of a
    convolution over four tokens; bytes of an element of the state."""

    name: str
    attention_layers: int
    recurrent_layers: int
    kv_heads: int
    state_element: int

    @property
    def token_bytes(self) -> int:
        """Keys and values of a token in one layer, heads of 256 in bfloat16."""
        return 2 * self.kv_heads * 256 * BFLOAT16

    @property
    def state_bytes(self) -> int:
        """The state of one layer."""
        return 32 * 128 * 128 * self.state_element + 3 * 8192 * BFLOAT16

    @property
    def stock_block(self) -> int:
        """Tokens of vLLM's block: the fewest whose keys and values are as large as a state."""
        return BLOCK * -(-self.state_bytes // (BLOCK * self.token_bytes))

    @property
    def stock_block_bytes(self) -> int:
        """vLLM's groups have as many layers as there are attention layers."""
        return self.attention_layers * self.stock_block * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Of ours."""
        return self.attention_layers * BLOCK * self.token_bytes

    @property
    def state_blocks(self) -> int:
        """Of ours, for a snapshot of all recurrent layers."""
        return -(-self.recurrent_layers * self.state_bytes // self.block_bytes)


SHAPES = (
    Shape("Qwen3-Next-80B-A3B, states in bfloat16", 12, 36, 2, BFLOAT16),
    Shape("Qwen3.5-4B, states in float32", 8, 24, 4, FLOAT32),
)


class Stock:
    """vLLM's manager in align mode, and as much of its Scheduler as cuts chunks."""

    def __init__(self, shape: Shape, unit: int | None) -> None:
        import torch
        from vllm.v1.kv_cache_interface import (
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            MambaSpec,
        )

        own: Any = importlib.import_module("vllm.v1.core.kv_cache_manager").KVCacheManager
        size = shape.stock_block
        attention = FullAttentionSpec(
            block_size=size, num_kv_heads=shape.kv_heads, head_size=256, dtype=torch.bfloat16
        )
        state = torch.float32 if shape.state_element == FLOAT32 else torch.bfloat16
        recurrent = MambaSpec(
            block_size=size,
            shapes=((3, 8192), (32, 128, 128)),
            dtypes=(torch.bfloat16, state),
            page_size_padded=attention.page_size_bytes,
            mamba_cache_mode="align",
        )
        specs = [attention, *[recurrent] * (shape.recurrent_layers // shape.attention_layers)]
        config = KVCacheConfig(
            num_blocks=POOL_BYTES // shape.stock_block_bytes,
            kv_cache_tensors=[],
            kv_cache_groups=[
                KVCacheGroupSpec([f"layers {index}"], spec) for index, spec in enumerate(specs)
            ],
            prefix_cache_retention_interval=0,  # vLLM's default
        )
        self.unit = unit or size
        self.manager = own(
            config,
            max_model_len=1 << 18,
            scheduler_block_size=size,
            hash_block_size=self.unit,
            max_in_flight_tokens=BUDGET,
        )
        self.scheduler = SimpleNamespace(
            block_size=size,
            cache_config=SimpleNamespace(block_size=size),
            use_eagle_block_drop=False,
            max_num_scheduled_tokens=BUDGET,
            scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
            mamba_partial_cache_hit=unit is not None
            and self.manager.coordinator.enable_partial_hash_hits,
            mamba_shared_prefix_checkpoint=self.manager.mamba_shared_prefix_checkpoint,
            hash_block_size=self.unit,
            mamba_has_prefill_checkpoint_blocks=False,
            mamba_prefill_checkpoint_alignment=None,
        )

    def run(self, prompts: list[list[int]]) -> int:
        """Prompts that wait at the same time; the tokens computed."""
        from tests.peers.world import hasher, make_request

        hash_blocks = hasher(self.unit, ours=False)
        waiting = [
            make_request(f"{id(tokens)}", tokens, hash_blocks, max_tokens=1) for tokens in prompts
        ]
        running: list[Any] = []
        computed = 0
        while waiting or running:
            self.manager.new_step_starts()
            work = list(self.plan(running, waiting))
            if not work:
                raise SystemExit("no request fits into vLLM's pool")
            _, retained = self.manager.take_kv_cache_block_copies()
            self.manager.block_pool.free_blocks(retained)
            self.manager.take_boundary_state_offloads()
            for request, end in work:
                computed += end - request.num_computed_tokens
                request.num_computed_tokens = end
                if end == request.num_tokens:
                    running.remove(request)
                    self.manager.free(request)
        return computed

    def plan(self, running: list[Any], waiting: list[Any]) -> Iterator[tuple[Any, int]]:
        """Requests of a step, and how many tokens each has computed then."""
        split = importlib.import_module(
            "vllm.v1.core.sched.scheduler"
        ).Scheduler._mamba_block_aligned_split
        budget = BUDGET
        for request in list(running):
            count = min(request.num_tokens - request.num_computed_tokens, budget)
            count = split(self.scheduler, request, count)
            if count and self.manager.allocate_slots(request, count) is not None:
                budget -= count
                yield request, request.num_computed_tokens + count
        while waiting and budget:
            request = waiting[0]
            blocks, hit, junction = self.manager.get_computed_blocks(request)
            request.shared_prefix_boundary = junction
            count = split(self.scheduler, request, min(request.num_tokens - hit, budget), hit)
            if not count or self.manager.allocate_slots(request, count, hit, blocks) is None:
                return
            running.append(waiting.pop(0))
            request.num_computed_tokens = hit
            budget -= count
            yield request, hit + count


class Ours:
    """Our manager with snapshots."""

    def __init__(self, shape: Shape) -> None:
        blocks = POOL_BYTES // shape.block_bytes
        self.manager = BlockManager(blocks, BLOCK, state_blocks=shape.state_blocks)

    def run(self, prompts: list[list[int]]) -> int:
        """Prompts that wait at the same time; the tokens computed."""
        waiting = [self.manager.sequence(tokens) for tokens in prompts]
        computed = 0
        while waiting:
            plan = self.manager.begin_step(BUDGET)
            sampled = []
            for sequence in waiting:
                answer = plan.prefill(sequence, BUDGET)
                if isinstance(answer, Prefilled):
                    computed += answer.num_tokens
                    sampled += [sequence] if answer.samples else []
            if not plan.num_tokens:
                raise SystemExit("no request fits into our pool")
            plan.copies()
            plan.commit([0] * len(sampled))
            for sequence in sampled:
                waiting.remove(sequence)
                sequence.free()
        return computed


def count(arm: Stock | Ours, prompts: list[list[int]], *, together: bool) -> int:
    """The tokens that these prompts compute."""
    if together:
        return arm.run(prompts)
    return sum(arm.run([prompt]) for prompt in prompts)


def main() -> None:
    """Count and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--shared", type=int, default=2048)
    parser.add_argument("--own", type=int, default=16)
    options = parser.parse_args()
    chance = Random(1)
    shared = [chance.randrange(1000) for _ in range(options.shared)]
    prompts = [
        shared + [chance.randrange(1000) for _ in range(options.own)]
        for _ in range(options.requests)
    ]
    total = sum(map(len, prompts))
    print("| model | requests | no cache | vLLM, align | with `prefix_match_unit=16` | ours |")
    print("|---|---|---:|---:|---:|---:|")
    for shape in SHAPES:
        for together in (False, True):
            figures = [
                count(arm, prompts, together=together)
                for arm in (Stock(shape, None), Stock(shape, BLOCK), Ours(shape))
            ]
            cells = " | ".join(f"{figure:,} ({total / figure:.1f} x)" for figure in figures)
            label = f"{shape.name}: blocks of {shape.stock_block} and {BLOCK}"
            come = "all at once" if together else "one after the other"
            print(f"| {label} | {come} | {total:,} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
