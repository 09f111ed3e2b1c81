"""nano-vllm's `BlockManager` and `ModelRunner.prepare_decode`, its own code from its checkout.

Timed is what its scheduler does around the manager for the same work: the sequence is made,
`can_allocate`, `allocate`, `hash_blocks`, `deallocate`. The package's `__init__` imports CUDA
kernels, so its modules are loaded without it, and what the model runner imports but
`prepare_decode` never uses is replaced by empty names.
"""

# ruff: noqa: D102 (base.py says what each method does)

import importlib
import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from benches.peers.adapters.base import ABORT, DECODE, FILL, PREFILL, STEPS, Manager, Tokens

UNUSED = {
    "nanovllm.config": "Config",
    "nanovllm.models.qwen3": "Qwen3ForCausalLM",
    "nanovllm.layers.sampler": "Sampler",
    "nanovllm.utils.loader": "load_model",
}


class OnHost:
    """A tensor whose copy to the device is skipped."""

    __slots__ = ("tensor",)

    def __init__(self, data: list[Any], dtype: torch.dtype, pin_memory: bool) -> None:
        self.tensor = torch.tensor(data, dtype=dtype)

    def cuda(self, non_blocking: bool) -> torch.Tensor:
        """The tensor itself."""
        return self.tensor


def package() -> Path:
    """The folder `nanovllm`; registers it as a package without running its `__init__`."""
    spec = importlib.util.find_spec("nanovllm")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError("nanovllm is not on the path", name="nanovllm")
    folder = Path(spec.submodule_search_locations[0])
    bare = ModuleType("nanovllm")
    bare.__path__ = [str(folder)]
    sys.modules["nanovllm"] = bare
    for name, needed in UNUSED.items():
        sys.modules[name] = ModuleType(name)
        setattr(sys.modules[name], needed, None)
    return folder


def commit_of(folder: Path) -> str:
    """The commit of the checkout."""
    command = ["git", "-C", str(folder), "rev-parse", "--short=10", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


VERSION = commit_of(package())
manager_module = importlib.import_module("nanovllm.engine.block_manager")
sequence_module = importlib.import_module("nanovllm.engine.sequence")
runner_module: Any = importlib.import_module("nanovllm.engine.model_runner")
runner_module.torch = SimpleNamespace(tensor=OnHost, int64=torch.int64, int32=torch.int32)


class NanoVllm(Manager):
    """With any block size; nano-vllm itself takes multiples of 256."""

    name = "nano-vllm"
    works = frozenset({PREFILL, DECODE, FILL, STEPS, ABORT})

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = manager_module.BlockManager(num_blocks, block_size)
        base = sequence_module.Sequence
        self.sequence = type("Sequence", (base,), {"block_size": block_size})
        self.runner = object.__new__(runner_module.ModelRunner)
        self.runner.block_size = block_size
        self.running: list[Any] = []

    def prompt(self, tokens: Tokens) -> Any:
        return tokens.tolist()

    def submit(self, prompt: Any) -> Any:
        return self.sequence(prompt)

    def register(self, sequence: Any) -> None:
        """Register blocks as its `postprocess` does before it appends the token."""
        self.manager.hash_blocks(sequence)
        sequence.num_cached_tokens += sequence.num_scheduled_tokens
        sequence.num_scheduled_tokens = 0

    def compute(self, sequence: Any) -> None:
        """Matches, allocates and registers."""
        num_cached = self.manager.can_allocate(sequence)
        if num_cached < 0:
            raise MemoryError("nano-vllm's pool is full")
        self.manager.allocate(sequence, num_cached)
        sequence.num_scheduled_tokens = sequence.num_tokens - sequence.num_cached_tokens
        self.register(sequence)

    def cold(self, prompt: Any) -> None:
        sequence = self.submit(prompt)
        self.compute(sequence)
        self.manager.deallocate(sequence)

    def held(self, prompt: Any) -> Any:
        """A computed prompt, running."""
        sequence = self.submit(prompt)
        self.compute(sequence)
        sequence.append_token(1)
        return sequence

    def abort(self, sequence: Any) -> None:
        """Frees a running sequence."""
        self.manager.deallocate(sequence)

    def start(self, prompts: list[Any]) -> None:
        self.running = [self.held(prompt) for prompt in prompts]

    def plan(self) -> None:
        """The decode half of its `schedule`, without the queues."""
        can_append, may_append = self.manager.can_append, self.manager.may_append
        for sequence in self.running:
            if can_append(sequence):
                sequence.num_scheduled_tokens = 1
                sequence.is_prefill = False
                may_append(sequence)

    def fill(self) -> None:
        """Without pinned memory and without the copies to the device."""
        self.runner.prepare_decode(self.running)

    def commit(self, sampled: Any) -> None:
        """Its `postprocess`, without the test for the end."""
        for sequence, token in zip(self.running, sampled, strict=True):
            self.register(sequence)
            sequence.append_token(token)

    def stop(self) -> None:
        self.release(self.running)
        self.running = []

    def open_step(self, budget: int) -> None:
        """Steps are the scheduler's, not the manager's."""

    def admit(self, request: Any, budget: int) -> int | None:
        num_cached = self.manager.can_allocate(request)
        if num_cached < 0:
            return None
        new = request.num_tokens - num_cached * self.manager.block_size
        if new > budget:
            return None
        self.manager.allocate(request, num_cached)
        request.num_scheduled_tokens = new
        return new

    def close_step(self, requests: list[Any]) -> None:
        for request in requests:
            self.register(request)

    def release(self, requests: list[Any]) -> None:
        for request in requests:
            self.manager.deallocate(request)

    def blocks(self, request: Any) -> list[int]:
        return list(request.block_table)


MANAGERS = [NanoVllm]
