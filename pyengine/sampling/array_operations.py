"""The operations of the sampler on NumPy arrays: by the Rust kernels, without torch."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pyengine.cpu import draw_tokens, largest_logits, token_logprobs
from pyengine.cpu.threads import step_threads
from pyengine.sampling.draws import DrawBatch
from pyengine.utils.devices import CPU
from pyengine.utils.dtypes import Rows, widened

_OCTETS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
_SUMMANDS = np.where(_OCTETS == 1, 0, -np.inf).astype(np.float32)
"""For each byte of a mask the summands of the logits of its eight tokens: [256, 8]."""


class ArrayOperations:
    """See `operations.Operations`. Computes with the threads that the caller may use."""

    device = CPU

    def float32_copy(self, logits: Rows) -> npt.NDArray[np.float32]:
        """A contiguous copy."""
        wide = widened(logits)
        return wide.copy(order="C") if wide is logits else np.ascontiguousarray(wide)

    def fill(self, values: Rows, index: Any, value: float) -> None:
        """Set the elements, or rows, at `index` to `value`."""
        values[index] = value

    def where(self, condition: Any, chosen: Any, other: Any) -> Any:
        """`chosen` where the condition is true, else `other`."""
        return np.where(condition, chosen, other)

    def clamp_max(self, values: Any, limit: float) -> Any:
        """The values, or `limit` where they are larger."""
        return np.minimum(values, limit)

    def largest(self, logits: Rows) -> npt.NDArray[np.int64]:
        """The id of each row's largest logit, of equal ones the lowest: int64 [B].

        NaN counts as the largest.
        """
        token_ids = np.empty(len(logits), dtype=np.int64)
        if len(logits):
            largest_logits(step_threads(), _readable(logits), token_ids)
        return token_ids

    def logits_of(self, logits: Rows, token_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """The logit of one token per row: float32 [B]."""
        return widened(logits[np.arange(len(logits)), token_ids])

    def draw(
        self, logits: Rows, draws: DrawBatch, numbers: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.int64]:
        """One token for each of the rows of `draws`, see `sampler.draw`: int64 [R]."""
        drawn = np.empty(len(draws), dtype=np.int64)
        draw_tokens(step_threads(), _readable(logits), draws.rows, draws.settings, numbers, drawn)
        return drawn

    def forbid(
        self,
        logits: Rows,
        rows: npt.NDArray[np.int64],
        bits: npt.NDArray[np.int32],
        *,
        to_copy: bool,
    ) -> npt.NDArray[np.float32]:
        """Logits that are -inf where the bits of `rows` are 0: themselves, or a float32 copy.

        A table turns eight bits into eight summands. A selection by booleans takes ten times as
        long, as branch prediction fails.
        """
        values = masked = widened(logits)
        if to_copy and values is logits:
            masked = np.empty_like(values) if len(rows) == len(values) else values.copy()
        octets = bits.view(np.uint8)
        summands = np.full((max(octets.shape[1], -(-values.shape[1] // 8)), 8), -np.inf, np.float32)
        for row, eights in zip(rows.tolist(), octets, strict=True):
            _SUMMANDS.take(eights, axis=0, out=summands[: len(eights)], mode="clip")
            np.add(values[row], summands.reshape(-1)[: values.shape[1]], out=masked[row])
        return masked

    def logprobs(
        self,
        logits: Rows,
        token_ids: npt.NDArray[np.int64],
        top: Sequence[int],
        rows: npt.NDArray[np.int64] | None,
    ) -> Callable[[], Iterator[tuple[int, float, int, list[int], list[float]]]]:
        """Compute what `PendingLogprobs` reports; the function returns it."""
        if rows is None:
            rows = np.arange(len(token_ids))
        counts = np.array(top, dtype=np.int64)
        logprobs, ranks = np.empty(len(rows), dtype=np.float32), np.empty(len(rows), dtype=np.int64)
        ids = np.empty(counts.sum(), dtype=np.int64)
        top_logprobs = np.empty(len(ids), dtype=np.float32)
        if len(rows):
            reported, out = (rows, token_ids, counts), (logprobs, ranks, ids, top_logprobs)
            token_logprobs(step_threads(), _readable(logits), reported, out)
        token_ids = token_ids.copy()  # the caller may reuse its own

        def result() -> Iterator[tuple[int, float, int, list[int], list[float]]]:
            ends = counts.cumsum()[:-1]
            yield from zip(
                token_ids.tolist(),
                logprobs.tolist(),
                ranks.tolist(),
                [part.tolist() for part in np.split(ids, ends)],
                [part.tolist() for part in np.split(top_logprobs, ends)],
                strict=True,
            )

        return result if len(rows) else lambda: iter(())


ARRAYS = ArrayOperations()


def _readable(logits: Rows) -> Rows:
    """The logits as kernels read them: contiguous, float32 or bfloat16."""
    if logits.dtype != np.uint16:
        logits = widened(logits)
    return np.ascontiguousarray(logits)
