"""What the command line asks of an engine, and how it gets one.

Commands take the factory from typer's context object, so a test hands in a fake engine and
nothing here imports torch before a command really opens a model.
"""

import atexit
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import typer

from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams

GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Settings of the engine as given on the command line; `None` leaves the choice to it."""

    model: str | None = None
    device: str = "auto"
    dtype: str = "auto"
    attention_backend: str = "auto"
    compile: bool = False
    kv_cache_dtype: str = "auto"
    block_size: int | None = None
    num_blocks: int | None = None
    kv_cache_gib: float | None = None
    gpu_memory_utilization: float = 0.9
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    in_flight_sharing: bool = True
    layer_groups: bool = True
    seed: int = 0
    tensor_parallel_size: int = 1


class StatsView(Protocol):
    """The part of the engine's statistics that the closing line reads."""

    @property
    def counters(self) -> Mapping[str, int]:
        """The block manager's counters; they only grow."""


class Engine(Protocol):
    """The part of `pyengine.LLM` that the commands use."""

    @property
    def model_path(self) -> Path:
        """The local folder the model was loaded from."""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer of transformers, or None for a model without one."""

    def generate(
        self, prompts: Any, sampling_params: SamplingParams | None = None, use_tqdm: bool = True
    ) -> list[RequestOutput]:
        """Run a batch to its end; results in the order of the prompts."""

    def stream(
        self, prompt: Any, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Run one prompt; every item holds the text so far."""

    def recording(self, path: Path) -> AbstractContextManager[None]:
        """Record what the block manager does meanwhile."""

    def apply_chat_template(self, messages: Any) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer."""

    def stats(self) -> StatsView:
        """The ledger and the counters as of now."""

    def describe(self) -> Mapping[str, object]:
        """Versions, device, dtype, attention backend and why, pool size."""


EngineFactory = Callable[[EngineOptions], Engine]


def open_llm(options: EngineOptions) -> Engine:
    """Load the model and build a real engine. Imports torch and transformers."""
    from pyengine.engine import LLM

    budget = options.kv_cache_gib
    llm = LLM(
        options.model,
        device=options.device,
        dtype=options.dtype,
        attention_backend=options.attention_backend,
        compile=options.compile,
        kv_cache_dtype=options.kv_cache_dtype,
        block_size=options.block_size,
        num_blocks=options.num_blocks,
        kv_cache_memory=None if budget is None else int(budget * GIB),
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_num_seqs=options.max_num_seqs,
        max_num_batched_tokens=options.max_num_batched_tokens,
        max_model_len=options.max_model_len,
        enable_prefix_caching=options.enable_prefix_caching,
        in_flight_sharing=options.in_flight_sharing,
        layer_groups=options.layer_groups,
        seed=options.seed,
        tensor_parallel_size=options.tensor_parallel_size,
    )
    gc.freeze()  # what was imported and loaded stays: later collections pass it over
    atexit.register(gc.unfreeze)  # at the end it goes as usual
    gc.enable()
    return llm


def factory_of(context: typer.Context) -> EngineFactory:
    """The factory a caller handed in as the context object, else the one of real engines."""
    factory: EngineFactory | None = context.find_root().obj
    return factory or open_llm
