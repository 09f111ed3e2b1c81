"""Recomputes a sample of cache hits without the cache, and compares the KV block by block.

request with a hit, its prompt computed -> verification request -> its prompt computed -> compare

A verification is a request of the lowest priority that wants no output. It reads and shares no
cached block: its namespace is its own. Nothing is pinned meanwhile: blocks of the prompt that were
evicted before the comparison are left out.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from secrets import token_bytes
from typing import Any

from pyengine.engine.prompts import Prompt
from pyengine.engine.request import Request
from pyengine.kv_cache import BlockManager
from pyengine.sampling_params import SamplingParams

_log = logging.getLogger(__name__)

_LAST = 1e300
"""The priority of verifications."""


@dataclass(frozen=True, slots=True)
class Verification:
    """The cached prefix that a request recomputes."""

    request_id: str
    namespace: bytes
    num_tokens: int


class HitVerifier:
    """Makes verifications of a share of all requests with cache hits, and judges them.

    `differences(blocks, others, group)` returns the relative difference of the KV of each two
    blocks. One above `tolerance` is an error in the log.
    """

    def __init__(
        self,
        manager: BlockManager,
        make_request: Callable[..., Request],
        differences: Callable[[Sequence[int], Sequence[int], int], Sequence[float]],
        *,
        share: float,
        tolerance: float,
    ) -> None:
        self._manager = manager
        self._make_request = make_request
        self._differences = differences
        self._share, self.tolerance = share, tolerance
        self._due = 0.0
        """Verifications that the hits so far ask for, less those that were made."""
        self.recording: Any = None
        """The file that the block manager's operations are recorded in, if any."""
        self.counters = dict.fromkeys(COUNTERS, 0)

    def request_for(self, request: Request) -> Request | None:
        """A verification of a request whose prompt is computed; None if it is not in the sample."""
        size = self._manager.block_size
        num_tokens = min(request.num_cached_tokens, len(request.prompt_token_ids)) // size * size
        if not num_tokens or not request.read_cache or request.verifies is not None:
            return None
        self._due += self._share
        if self._due < 1:
            return None
        self._due -= 1
        prompt = Prompt(
            token_ids=request.prompt_token_ids[:num_tokens],
            namespace=b"verification " + token_bytes(16),
        )
        made = self._make_request(
            None, prompt, SamplingParams(max_tokens=0, seed=0), priority=_LAST
        )
        made.verifies = Verification(request.request_id, request.namespace, num_tokens)
        return made

    def judge(self, request: Request) -> None:
        """Compare what a verification has computed with what is cached."""
        verifies, manager = request.verifies, self._manager
        assert verifies is not None
        tokens = request.prompt_token_ids
        with manager.match_prefix(tokens, namespace=verifies.namespace) as pin:
            if pin.num_tokens:
                cached = manager.sequence(tokens[: pin.num_tokens], namespace=verifies.namespace)
                cached.attach(pin)
                both = zip(cached.block_tables, request.sequences[0].kv.block_tables, strict=True)
                for group, (blocks, computed) in enumerate(both):
                    self._judge_group(verifies, group, blocks, computed)
                cached.free()
        self.counters["verified_hits"] += 1

    def _judge_group(
        self, verifies: Verification, group: int, cached: list[int], computed: list[int]
    ) -> None:
        null, size = self._manager.null_block, self._manager.block_size
        rows = [
            row for row, both in enumerate(zip(cached, computed, strict=False)) if null not in both
        ]
        blocks = [cached[row] for row in rows]
        found = self._differences(blocks, [computed[row] for row in rows], group) if rows else []
        self.counters["verified_blocks"] += len(rows)
        for row, block, difference in zip(rows, blocks, found, strict=True):
            if difference <= self.tolerance:  # false for NaN
                continue
            self.counters["different_blocks"] += 1
            how = "start the engine within llm.recording(FILE) to see the life of the block"
            if self.recording is not None:
                how = f"the life of the block is in {self.recording}"
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
