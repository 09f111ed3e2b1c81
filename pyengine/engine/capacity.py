"""What fits into memory: the KV cache, the longest sequence, the largest step.

The largest step is estimated first, from below, and on a GPU it is run once to see.
"""

import ctypes
import platform
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from pyengine.cache import BlockManager, SharedPrefixes, StepBuffers
from pyengine.cache.kv_pool import (
    KVCacheSpec,
    KVPool,
    PoolSettings,
    PoolSize,
    kv_cache_specs,
    resolve_num_blocks,
)
from pyengine.cache.layer_groups import LayerGroups, choose_layer_groups, layer_windows
from pyengine.core.errors import ConfigurationError
from pyengine.core.sampling_params import SamplingParams
from pyengine.engine.intake import ModelFacts
from pyengine.models import LoadedModel
from pyengine.runner import HostArrays, RunnerLimits, StepLogits
from pyengine.runner.model_runner import ModelRunner
from pyengine.sampling import Sampler, SamplingState

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
"""Numbers of `mallopt` (glibc, malloc.h)."""
_KEPT = 1 << 30
_LARGEST = 32 << 20


@dataclass(frozen=True, slots=True)
class CachePlan:
    """A KV cache before it is allocated: the layers' specs, their groups, the size of the pool."""

    specs: list[KVCacheSpec]
    groups: LayerGroups
    size: PoolSize
    block_size: int

    def manager(self, **settings: Any) -> BlockManager:
        """The block manager over it, `settings` being those of `BlockManager` beside the sizes."""
        blocks, windows = self.size.num_blocks, self.groups.windows
        return BlockManager(blocks, self.block_size, groups=windows, **settings)

    def pool(self, loaded: LoadedModel) -> KVPool:
        """Allocate the tensors on the model's device."""
        blocks = self.size.num_blocks
        return KVPool(self.specs, blocks, self.block_size, loaded.device, self.groups)


def plan_cache(
    loaded: LoadedModel,
    settings: PoolSettings,
    max_tokens: int,
    *,
    layer_groups: bool,
    kv_dtype: torch.dtype | None = None,
) -> CachePlan:
    """Group the model's layers and size the pool; steps compute up to `max_tokens` tokens.

    `kv_dtype` is the element type of the pool, None: the model's.

    Without `layer_groups` all layers are in one group that keeps everything. Raises
    `ConfigurationError` where the pool does not fit into memory.
    """
    specs = cache_specs(loaded, kv_dtype or loaded.dtype)
    groups = LayerGroups.single(len(specs))
    if layer_groups:
        windows = [one for config in loaded.cached_configs for one in layer_windows(config)]
        groups = choose_layer_groups(windows, specs, settings.max_model_len)
    arithmetic = BlockManager(1, settings.block_size, groups=groups.windows)
    blocks_per_seq = arithmetic.blocks_for(settings.max_model_len, max_tokens)
    settings = replace(settings, blocks_per_seq=blocks_per_seq)
    size = resolve_num_blocks(settings, groups.tensor_shapes(specs), loaded.device)
    return CachePlan(specs, groups, size, settings.block_size)


def cache_specs(loaded: LoadedModel, kv_dtype: torch.dtype) -> list[KVCacheSpec]:
    """What each layer of a model keeps, and behind them each of its heads."""
    configs = loaded.cached_configs
    return [one for each in configs for one in kv_cache_specs(each, kv_dtype, loaded.kv_shards)]


def longest_sequence(manager: BlockManager, max_tokens: int, most: int) -> int:
    """Tokens, up to `most`, that one sequence may have in a pool that is empty but for it."""

    def blocks(num_tokens: int) -> int:
        return manager.blocks_for(num_tokens, max_tokens)

    return bisect_right(range(1, most + 1), manager.num_blocks, key=blocks)


def model_facts(
    loaded: LoadedModel,
    settings: PoolSettings,
    manager: BlockManager,
    max_tokens: int,
    asked: int | None,
) -> ModelFacts:
    """The longest sequence, and what sets it: the model's positions, the pool, or the caller.

    `asked` is the caller's `max_model_len`. Raises `ConfigurationError` if that cannot be had.
    """
    if asked is not None and asked > loaded.max_model_len:
        raise ConfigurationError(
            f"max_model_len={asked}: {loaded.name} has {loaded.max_model_len} positions"
        )
    longest = longest_sequence(manager, max_tokens, settings.max_model_len)
    pool = f"the KV pool holds {manager.num_blocks} blocks of {manager.block_size} tokens"
    if longest == settings.max_model_len:
        positions = f"the model has {loaded.max_model_len} positions"
        limited_by = positions if asked is None else f"max_model_len={asked}"
    else:
        wanted = longest + 1 if asked is None else asked
        taken = f"{wanted} tokens take {manager.blocks_for(wanted, max_tokens)}"
        limited_by = f"{pool}, {taken}"
        if asked is not None or longest < 2:
            raise ConfigurationError(
                f"max_model_len={wanted} does not fit: {limited_by}; give a larger num_blocks"
            )
    return ModelFacts(
        vocab_size=loaded.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_model_len=longest,
        limited_by=limited_by,
        max_num_seqs=settings.max_num_seqs,
    )


def check_step_fits(limits: RunnerLimits, settings: PoolSettings, loaded: LoadedModel) -> None:
    """Raise `ConfigurationError` where the largest step can't fit into the available memory.

    What it takes is estimated from below: the inputs, which exist twice; of the activations four
    hidden states per token; the logits. Nothing is allocated.
    """
    available = settings.available_memory
    tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
    text = loaded.config.get_text_config()
    per_token = 2 * 8 * (2 + limits.num_groups)
    hidden = 4 * text.hidden_size * loaded.dtype.itemsize
    per_sequence = 2 * 4 * limits.num_groups * limits.max_blocks_per_seq
    useful = min(tokens, sequences * settings.max_model_len)  # no step has more
    for_sequences = sequences * per_sequence + limits.max_num_samples * 4 * loaded.vocab_size
    needed = tokens * per_token + useful * hidden + for_sequences
    if available is None or needed <= available:
        return
    asked = f"max_num_batched_tokens={tokens} and max_num_seqs={sequences}"
    fitting = (available - for_sequences) // (per_token + hidden)
    if fitting >= sequences:
        way_out = f"at most max_num_batched_tokens={fitting} would fit"
    else:
        way_out = "give fewer max_num_seqs, or a smaller max_model_len"
    raise ConfigurationError(
        f"the largest step does not fit into memory: {asked} take at least {_gib(needed)} beside "
        f"weights and KV pool, {_gib(available)} are available on {loaded.device}; {way_out}"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.2f} GiB"


class MemoryMeter(Protocol):
    """Tells how much memory something takes at its worst moment, and afterwards."""

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that are allocated while `run` runs, beyond those that are before it."""
        ...

    def kept(self, run: Callable[[], object]) -> int:
        """Bytes that are free no longer once `run` has run."""
        ...


class CudaMeter:
    """What torch's allocator hands out on a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def peak(self, run: Callable[[], object]) -> int:
        """See `MemoryMeter.peak`. The allocator's cache is empty afterwards."""
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        run()
        torch.cuda.synchronize(self._device)
        taken = torch.cuda.max_memory_allocated(self._device) - before
        torch.cuda.empty_cache()
        return taken

    def kept(self, run: Callable[[], object]) -> int:
        """See `MemoryMeter.kept`. Counts what the driver keeps beside torch, too."""
        before = self._free()
        run()
        return max(0, before - self._free())

    def _free(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(self._device)[0]


class LargestStep:
    """A plan of as many sequences and tokens as a step may have, all of them new prompts.

    Their tables are full of the null block and no token is kept, so a pool of one block will do.
    """

    def __init__(self, limits: RunnerLimits, arrays: HostArrays, null_block: int) -> None:
        self.num_tokens = limits.max_num_batched_tokens
        self.num_sequences = min(limits.max_num_seqs, self.num_tokens)
        self.num_samples = min(limits.max_num_samples, self.num_tokens)
        self._arrays = arrays
        self._null_block = null_block

    def copies(self) -> list[tuple[int, int]]:
        """None."""
        return []

    def fill(self, buffers: StepBuffers, /, *, shared: SharedPrefixes | None = None) -> None:
        """Write the step into the arrays; `buffers` stand over the same memory."""
        arrays, tokens, count = self._arrays, self.num_tokens, self.num_sequences
        arrays.slot_mapping[:, :tokens] = -1
        arrays.block_tables[:, :count] = self._null_block
        row = 0
        for sequence in range(count):
            length = tokens // count + (sequence < tokens % count)
            arrays.positions[row : row + length] = range(length)
            row += length
            arrays.query_start_loc[sequence + 1] = row
            arrays.seq_lens[sequence] = length
        for sample in range(self.num_samples):
            last = tokens // self.num_samples * (sample + 1)
            last += min(sample + 1, tokens % self.num_samples) - 1
            arrays.logits_indices[sample] = last


def activation_bytes(
    runner: ModelRunner, limits: RunnerLimits, null_block: int, vocab_size: int, meter: MemoryMeter
) -> int:
    """Bytes that the largest step takes: forward pass, logits, and sampling at its most costly.

    `runner` may stand over a pool of a single block, whose null block is `null_block`. Raises
    `ConfigurationError` where that is more than there is.
    """
    plan = LargestStep(limits, runner.buffers.arrays, null_block)
    params = SamplingParams(temperature=1, top_p=0.9, logprobs=1, frequency_penalty=0.1)
    states = [
        SamplingState(params, [0], seed=row, vocab_size=vocab_size)
        for row in range(plan.num_samples)
    ]

    def run() -> None:
        logits: StepLogits = runner.prepare(plan)(None)
        Sampler()(logits.sampling, states)

    try:
        return meter.peak(run)
    except torch.OutOfMemoryError as error:
        raise ConfigurationError(
            f"the largest step, of max_num_batched_tokens={limits.max_num_batched_tokens} and "
            f"max_num_seqs={limits.max_num_seqs}, does not fit into the device's memory ({error}); "
            "give less of both"
        ) from error


def graph_bytes(runner: ModelRunner, meter: MemoryMeter) -> int:
    """Bytes that the graphs of decode steps keep, `runner` being able to capture them.

    They share what the largest takes. So two are captured: the second stands for each further one.
    """
    sizes = runner.graph_sizes
    largest, second = sizes[-1:], sizes[-2:-1]
    first = meter.kept(lambda: runner.capture(largest))
    another = meter.kept(lambda: runner.capture(second))
    return first + another * (len(sizes) - 1) if second else first


def keep_freed_memory() -> bool:
    """Have glibc keep up to 1 GiB that was freed, and use it again; whether it will.

    Every operator of a forward pass allocates its result and frees its inputs. By default glibc
    returns what is free at the end of its heap to the system each time, and the next operator pays
    for fresh pages: a fifth of a prefill. This is a setting of the process, as there is one heap;
    other C libraries are left as they are.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    kept = libc.mallopt(_M_TRIM_THRESHOLD, _KEPT)
    found = libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST)  # else it is no longer adjusted
    return bool(kept and found)
