"""The memory of the largest step: estimated from below, and on a GPU measured by running it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from pyengine.errors import ConfigurationError
from pyengine.executor.input_buffers import HostArrays, RunnerLimits
from pyengine.executor.model_runner import ModelRunner, StepLogits
from pyengine.kv_cache import SharedPrefixes, StepBuffers
from pyengine.kv_cache.memory import in_gib
from pyengine.kv_cache.pool_size import PoolSettings
from pyengine.models.loaded import LoadedModel
from pyengine.sampling.sampler import sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling_params import SamplingParams
from pyengine.utils.devices import Device, for_torch
from pyengine.utils.dtypes import itemsize
from pyengine.utils.openmp import loaded_torch

if TYPE_CHECKING:
    from pyengine.executor.cuda_graphs import DecodeGraphs, RecordPieces
    from pyengine.executor.piecewise_graphs import PiecewiseGraphs


def check_step_fits(limits: RunnerLimits, settings: PoolSettings, loaded: LoadedModel) -> None:
    """Raise `ConfigurationError` if the largest step can't fit into the available memory.

    Its memory is estimated from below: the inputs, which exist twice; four hidden states per token
    of the activations; the logits. Allocates no memory.
    """
    available = settings.available_memory
    tokens, sequences = limits.max_num_batched_tokens, limits.max_num_seqs
    per_token = 2 * 8 * (2 + limits.num_groups)
    hidden = 4 * loaded.hidden_size * itemsize(loaded.dtype)
    per_sequence = 2 * 4 * limits.num_groups * limits.max_blocks_per_seq
    useful = min(tokens, sequences * settings.max_model_len)  # no step has more
    for_sequences = sequences * per_sequence + limits.max_num_samples * 4 * loaded.vocab_size
    needed = tokens * per_token + useful * hidden + for_sequences
    if available is None or needed <= available:
        return
    largest = f"max_num_batched_tokens={tokens} and max_num_seqs={sequences}"
    fitting = (available - for_sequences) // (per_token + hidden)
    if fitting >= sequences:
        way_out = f"at most max_num_batched_tokens={fitting} would fit"
    else:
        way_out = "give fewer max_num_seqs, or a smaller max_model_len"
    raise ConfigurationError(
        f"the largest step does not fit into memory: {largest} take at least {in_gib(needed)} "
        f"beside weights and KV pool, {in_gib(available)} are available on {loaded.device}; "
        f"{way_out}"
    )


class CudaMeter:
    """Memory that torch's allocator has allocated on a CUDA device."""

    def __init__(self, device: Device) -> None:
        import torch

        self._cuda, self._device = torch.cuda, for_torch(device)

    def peak(self, run: Callable[[], object]) -> int:
        """Peak bytes allocated while `run` runs, beyond those before.

        The allocator's cache is empty afterwards.
        """
        self._cuda.synchronize(self._device)
        self._cuda.reset_peak_memory_stats(self._device)
        before = self._cuda.memory_allocated(self._device)
        run()
        self._cuda.synchronize(self._device)
        taken = self._cuda.max_memory_allocated(self._device) - before
        self._cuda.empty_cache()
        return taken

    def kept(self, run: Callable[[], object]) -> int:
        """Bytes that `run` leaves allocated, of the driver's memory beside torch's, too."""
        before = self._free()
        run()
        return max(0, before - self._free())

    def _free(self) -> int:
        self._cuda.synchronize(self._device)
        self._cuda.empty_cache()
        return self._cuda.mem_get_info(self._device)[0]


class LargestStep:
    """A plan of as many sequences and tokens as a step may have, all of them new prompts.

    Their tables are full of the null block and no token is stored, so a pool of one block is
    enough.
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
        """Write the step into the arrays, which `buffers` share."""
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
        for number in range(self.num_samples):
            last = tokens // self.num_samples * (number + 1)
            last += min(number + 1, tokens % self.num_samples) - 1
            arrays.logits_indices[number] = last


def activation_bytes(
    runner: ModelRunner, limits: RunnerLimits, null_block: int, vocab_size: int, meter: CudaMeter
) -> int:
    """Bytes of the largest step: forward pass, logits, and sampling at its most costly.

    `runner` may have a pool of a single block, whose null block is `null_block`. Raises
    `ConfigurationError` if they exceed the memory.

    The sampler's kernels are compiled here, and not during requests: with and without filters, of
    changed logits, which are float32, and of others.
    """
    plan = LargestStep(limits, runner.buffers.arrays, null_block)
    several = (
        SamplingParams(temperature=1, top_p=0.9, logprobs=1, frequency_penalty=0.1),
        SamplingParams(temperature=1, frequency_penalty=0.1),
        SamplingParams(temperature=1, top_p=0.9),
        SamplingParams(temperature=1),
    )

    def run() -> None:
        logits: StepLogits = runner.prepare(plan)(None)
        for params in several:
            states = [
                SamplingState(params, [0], seed=row, vocab_size=vocab_size)
                for row in range(plan.num_samples)
            ]
            for state in states:
                state.append(0)
            sample(logits.sampling, states).wait()

    try:
        return meter.peak(run)
    except RuntimeError as error:
        torch = loaded_torch()
        if torch is None or not isinstance(error, torch.OutOfMemoryError):
            raise
        raise ConfigurationError(
            f"the largest step, of max_num_batched_tokens={limits.max_num_batched_tokens} and "
            f"max_num_seqs={limits.max_num_seqs}, does not fit into the device's memory ({error}); "
            "give less of both"
        ) from error


def graph_bytes(
    runner: ModelRunner, meter: CudaMeter, record_pieces: "RecordPieces | None" = None
) -> int:
    """Bytes that graphs keep: of decode steps, and of others in pieces; `runner` can capture them.

    Those of a kind share the memory of the largest. So two are captured: the second measures each
    further one.
    """
    decodes = _kept_by(runner.graph_sizes, runner.capture, lambda: runner.graphs, meter)
    if record_pieces is None:
        return decodes
    capture = partial(runner.capture_piecewise, record_pieces)
    return decodes + _kept_by(runner.piecewise_sizes, capture, lambda: runner.piecewise, meter)


def _kept_by(
    sizes: Sequence[int],
    capture: Callable[[Sequence[int]], None],
    captured: "Callable[[], DecodeGraphs | PiecewiseGraphs | None]",
    meter: CudaMeter,
) -> int:
    largest, second = sizes[-1:], sizes[-2:-1]
    first = meter.kept(lambda: capture(largest))
    graphs = captured()
    if graphs is None or not graphs.sizes:
        return first
    another = meter.kept(lambda: capture(second))
    return first + another * (len(sizes) - 1) if second else first
