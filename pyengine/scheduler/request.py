"""A request on its way through the engine: what was asked, and how far it has come."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """One prompt to continue: one object from the queue to the last token.

    `namespace` separates its blocks from those of other namespaces. Requests are served by
    `priority`, smaller first, and by arrival where that is equal. With `read_cache` off every
    prompt token is computed, also what the cache holds, but for `readable_tokens`. `num_samples`
    completions will run once the prompt is computed: it is admitted when there are seats for all of
    them. It ends when it has `max_tokens` tokens, the prompt's included, if not before. A step
    computes at most `max_chunk` tokens of prompts that have such a bound, all of them together.
    """

    request_id: str
    prompt_token_ids: Sequence[int]
    namespace: bytes = b""
    priority: float = 0
    read_cache: bool = True
    num_samples: int = 1
    max_tokens: float = inf
    max_chunk: float = inf
    num_cached_tokens: int = field(default=0, init=False)
    """Prompt tokens that were not computed for it when it first ran."""
    num_preemptions: int = field(default=0, init=False)
    """How often it lost its blocks and was computed again."""
    scheduled_time: float | None = field(default=None, init=False)
    """When the first step with tokens of it was planned, in seconds of `time.monotonic`."""

    def readable_tokens(self) -> int:
        """How many tokens need not be computed if their KV is cached, although `read_cache` is off.

        Asked when it is considered for admission; it may have changed the next time.
        """
        return 0

    def awaits_prefix(self) -> bool:
        """Whether a running request computes what this one would compute again if it ran now.

        It is admitted when that is over, or the other request does not run any more.
        """
        return False

    def admitted(self) -> None:
        """Take note of the admission: a step with tokens of this request is being planned."""
