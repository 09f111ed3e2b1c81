"""How much memory the largest step takes beside the weights and the KV pool: it is run once."""

from collections.abc import Callable
from typing import Protocol

import torch

from pyengine.cache import StepBuffers
from pyengine.core.sampling_params import SamplingParams
from pyengine.runner import HostArrays, RunnerLimits, StepLogits
from pyengine.runner.model_runner import ModelRunner
from pyengine.sampling import Sampler, SamplingState


class MemoryMeter(Protocol):
    """Tells how much memory something takes at its worst moment."""

    def peak(self, run: Callable[[], object]) -> int:
        """Bytes that are allocated while `run` runs, beyond those that are before it."""
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


class LargestStep:
    """A plan of as many sequences and tokens as a step may have, all of them new prompts.

    Their tables are full of the trash block and no token is kept, so a pool of one block will do.
    """

    def __init__(self, limits: RunnerLimits, arrays: HostArrays, trash_block: int) -> None:
        self.num_tokens = limits.max_num_batched_tokens
        self.num_sequences = self.num_samples = min(limits.max_num_seqs, self.num_tokens)
        self._arrays = arrays
        self._trash_block = trash_block

    def copies(self) -> list[tuple[int, int]]:
        """None."""
        return []

    def fill(self, buffers: StepBuffers, /) -> None:
        """Write the step into the arrays; `buffers` stand over the same memory."""
        arrays, tokens, count = self._arrays, self.num_tokens, self.num_sequences
        arrays.slot_mapping[:, :tokens] = -1
        arrays.block_tables[:, :count] = self._trash_block
        row = 0
        for sequence in range(count):
            length = tokens // count + (sequence < tokens % count)
            arrays.positions[row : row + length] = range(length)
            row += length
            arrays.query_start_loc[sequence + 1] = row
            arrays.seq_lens[sequence] = length
            arrays.logits_indices[sequence] = row - 1


def activation_bytes(
    runner: ModelRunner, limits: RunnerLimits, trash_block: int, vocab_size: int, meter: MemoryMeter
) -> int:
    """Bytes that the largest step takes: forward pass, logits, and sampling at its most costly.

    `runner` may stand over a pool of a single block, whose trash block is `trash_block`.
    """
    plan = LargestStep(limits, runner.buffers.arrays, trash_block)
    params = SamplingParams(temperature=1, top_p=0.9, logprobs=1, frequency_penalty=0.1)
    states = [
        SamplingState(params, [0], seed=row, vocab_size=vocab_size)
        for row in range(plan.num_samples)
    ]

    def run() -> None:
        logits: StepLogits = runner.prepare(plan)(None)
        Sampler()(logits.sampling, states)

    return meter.peak(run)
