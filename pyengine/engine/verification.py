"""Recomputes a sample of cache hits without the cache, and compares the KV block by block.

request with a hit, its prompt computed -> verification request -> its prompt computed -> compare

A verification is a request of the lowest priority that wants no output. It reads and shares no
cached block: its namespace is its own. Nothing is pinned meanwhile: blocks of the prompt that were
evicted before the comparison are left out.
"""

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_bytes
from shutil import rmtree
from tempfile import mkdtemp
from typing import Any
from weakref import finalize

from pyengine.engine.parts import EnginePart
from pyengine.kv_cache import BlockManager
from pyengine.request.prompts import BlockSpace, Prompt
from pyengine.request.request import Request, RequestOptions, SequenceState
from pyengine.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_LAST = 1e300
"""The priority of verifications."""
_MAX_RECORDED_BYTES = 1 << 30
"""Bytes of a recording that is removed if no difference was found."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The cached prefix that a request recomputes."""

    request_id: str
    space: BlockSpace
    num_tokens: int


class KeptRecording:
    """A recording of the block manager from its start, in a folder that only its user can read.

    It is removed with its engine, unless a difference was found. It ends there, or at
    `_MAX_RECORDED_BYTES` bytes. Raises `OSError` if the folder cannot be made.
    """

    def __init__(self, manager: BlockManager) -> None:
        self._manager = manager
        folder = mkdtemp(prefix="pyengine-verify-")
        self.path = Path(folder) / "blocks.kvtrace"
        self._remove = finalize(self, rmtree, folder, ignore_errors=True)
        self._manager.record(self.path)

    def keep(self) -> Path | None:
        """End the recording and keep its file; None if it has ended before."""
        if not self._remove.alive or not self.path.exists():
            return None
        try:
            self._manager.stop_recording()
        except OSError as error:
            _log.warning("the recording of verify_cache_hits has failed: %s", error)
            self._remove()
            return None
        self._remove.detach()
        return self.path

    def limit(self) -> None:
        """End and remove a recording that has become too long."""
        size = 0
        with suppress(OSError):  # another program may clear the folder for temporary files
            size = self.path.stat().st_size
        if self._remove.alive and size > _MAX_RECORDED_BYTES:
            self.remove()
            _log.warning(
                "verify_cache_hits records no longer: the recording has more than %d MiB",
                _MAX_RECORDED_BYTES >> 20,
            )

    def remove(self) -> None:
        """End the recording and remove its file, if it is still recorded."""
        if self._remove.alive:
            with suppress(OSError):
                self._manager.stop_recording()
            self._remove()


class HitVerifier(EnginePart):
    """Makes verifications of a share of all requests with cache hits, and judges them.

    `differences(blocks, others, group)` returns the relative difference of the KV of each two
    blocks. One above `tolerance` is an error in the log, which names a recording of the blocks.
    """

    def __init__(
        self,
        manager: BlockManager,
        make_request: Callable[..., Request],
        differences: Callable[[Sequence[int], Sequence[int], int], Sequence[float]],
        *,
        share: float,
        tolerance: float,
        kept: KeptRecording | None = None,
    ) -> None:
        """`kept` is the verifier's own recording of the block manager, if the caller makes none."""
        self._manager = manager
        self._make_request = make_request
        self._differences = differences
        self._share, self.tolerance = share, tolerance
        self._due = 0.0
        """Verifications that the hits so far ask for, less those that were made."""
        self.recording: Any = None
        """The file of the caller's recording of the block manager, if any."""
        self.kept = kept
        self._running: dict[Request, Verification] = {}
        """Unfinished verifications."""
        self.counters = dict.fromkeys(COUNTERS, 0)

    def prompt_done(self, request: Request) -> Iterable[Request]:
        """Judge a verification, or make one for a request with a cache hit."""
        verification = self._running.get(request)
        if verification is not None:
            self._judge(request, verification)
            return ()
        further = self._verification_of(request)
        return () if further is None else (further,)

    def kv_dropped(self) -> None:
        """Judge no verification that has begun."""
        self._running.clear()

    def finished(self, sequences: Sequence[SequenceState]) -> None:
        """Forget verifications that have ended."""
        for sequence in sequences:
            self._running.pop(sequence.request, None)

    def engine_stats(self) -> Mapping[str, Any]:
        """See `EnginePart.engine_stats`."""
        return {"verification": dict(self.counters)}

    def stop_recording(self) -> None:
        """End and remove the verifier's own recording."""
        if self.kept is not None:
            self.kept.remove()

    def _verification_of(self, request: Request) -> Request | None:
        """A verification of a request whose prompt is computed; None if it is not in the sample."""
        size, num_cached = self._manager.block_size, request.progress.num_cached_tokens
        num_tokens = min(num_cached, len(request.prompt_token_ids)) // size * size
        if not num_tokens or not request.read_cache:
            return None
        self._due += self._share
        if self._due < 1:
            return None
        self._due -= 1
        prompt = Prompt(
            token_ids=request.prompt_token_ids[:num_tokens],
            namespace=b"verification " + token_bytes(16),
            adapter=request.adapter,
        )
        options = RequestOptions(priority=_LAST, tenant=request.tenant, is_internal=True)
        params = SamplingParams(max_tokens=0, seed=0)
        verification = self._make_request(None, prompt, params, options)
        self._running[verification] = Verification(request.request_id, request.space, num_tokens)
        return verification

    def _judge(self, request: Request, verifies: Verification) -> None:
        """Compare the KV that a verification has computed with the cached KV."""
        tokens = request.prompt_token_ids
        with self._manager.match_prefix(tokens, **verifies.space) as pin:
            cached = pin.indexed_blocks
            for group, computed in enumerate(request.sequences[0].kv.block_tables):
                blocks = {row: block for row, of, block in cached if of == group}
                self._judge_group(verifies, group, blocks, computed)
        self.counters["verified_hits"] += 1
        if self.kept is not None:
            self.kept.limit()

    def _judge_group(
        self, verifies: Verification, group: int, cached: dict[int, int], computed: list[int]
    ) -> None:
        null, size = self._manager.null_block, self._manager.block_size
        rows = [row for row in cached if row < len(computed) and computed[row] != null]
        blocks = [cached[row] for row in rows]
        differences = (
            self._differences(blocks, [computed[row] for row in rows], group) if rows else []
        )
        self.counters["verified_blocks"] += len(rows)
        for row, block, difference in zip(rows, blocks, differences, strict=True):
            if difference <= self.tolerance:  # false for NaN
                continue
            self.counters["different_blocks"] += 1
            if self.recording is None and self.kept is not None:
                self.recording = self.kept.keep()
            how = "start the engine within llm.recording(FILE) to see the life of the block"
            if self.recording is not None:
                how = f"the life of the block: pyengine trace view {self.recording}"
            _log.error(
                "the cached KV of tokens %d to %d of request %r, block %d of layer group %d, is "
                "not what the model computes: relative difference %.3g, allowed %.3g; %s",
                *(row * size, (row + 1) * size, verifies.request_id, block, group, difference),
                *(self.tolerance, how),
            )


COUNTERS = {
    "verified_hits": "Requests whose cached prefix was computed again.",
    "verified_blocks": "Cached blocks that were compared.",
    "different_blocks": "Of these, those with other KV than computed: errors in the log.",
}
"""Descriptions of the counters of a verifier."""
