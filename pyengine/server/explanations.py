"""Why prompts of recent requests were not cached, as far as their senders may know it."""

from collections import OrderedDict, defaultdict
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from pyengine.engine.explain import hint_of
from pyengine.outputs import CacheExplanation
from pyengine.server.schemas.responses import PromptCache, RequestCache

_KEPT = 256  # requests of each key

_Explained: TypeAlias = tuple[str | None, dict[int, CacheExplanation]]
"""The client's id of a request, and the explanation of each of its prompts."""


@dataclass(frozen=True, slots=True)
class Disclosure:
    """Rules for the content of explanations.

    Exact figures and texts reveal what others have sent with the same key, token by token. Without
    `is_exact` everything is in whole blocks, as `cached_tokens` is, and a prompt that differs
    within a block is "new". With `has_neighbours` other keys fill the same pool: the number of
    evicted tokens, which their requests change, is left out.
    """

    block_size: int
    is_exact: bool
    has_neighbours: bool

    def of(self, explanation: CacheExplanation) -> PromptCache:
        """The explanation for the sender of the prompt."""
        shown, says_more = explanation, True
        if self.has_neighbours and shown.num_evicted_since is not None:
            says_more = False
            shown = replace(shown, evicted_by=None, num_evicted_since=None)
        if not self.is_exact:
            says_more = False
            shown = replace(
                shown,
                num_pool_tokens=self._whole(shown.num_pool_tokens),
                num_in_flight_tokens=self._whole(shown.num_in_flight_tokens),
                num_copied_tokens=0,
                num_restored_tokens=self._whole(shown.num_restored_tokens),
                reason="new" if shown.reason == "diverged" else shown.reason,
                diverged_at=None,
            )
        hint = explanation.hint if says_more else None
        if shown.reason is not None and not says_more:
            hint = hint_of(shown)
        return PromptCache(
            pool_tokens=shown.num_pool_tokens,
            in_flight_tokens=shown.num_in_flight_tokens,
            copied_tokens=shown.num_copied_tokens,
            restored_tokens=shown.num_restored_tokens,
            position=shown.position,
            reason=shown.reason,
            diverged_at=shown.diverged_at,
            evicted_by=shown.evicted_by,
            evicted_since=shown.num_evicted_since,
            cached_to=shown.cached_to,
            hint=hint,
        )

    def _whole(self, num_tokens: int) -> int:
        return num_tokens - num_tokens % self.block_size


@dataclass(slots=True)
class RecentExplanations:
    """The explanations of the last requests of each key, by the server's id for them."""

    _calls: defaultdict[bytes, OrderedDict[str, _Explained]] = field(
        default_factory=lambda: defaultdict(OrderedDict)
    )

    def put(
        self, key: bytes, name: str, client_id: str | None, index: int, cache: CacheExplanation
    ) -> None:
        """Keep the explanation of a prompt. The oldest request of the key is forgotten for it."""
        calls = self._calls[key]
        _, prompts = calls.setdefault(name, (client_id, {}))
        prompts[index] = cache
        if len(calls) > _KEPT:
            calls.popitem(last=False)

    def find(self, key: bytes, request_id: str, disclosure: Disclosure) -> RequestCache | None:
        """The explanations of the key's newest request with an id, by the rules; None without one.

        The id is that of the response, or the client's own.
        """
        name = request_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        for known, (client_id, prompts) in reversed(self._calls.get(key, {}).items()):
            if name == known or request_id == client_id:
                indices = range(max(prompts) + 1)
                caches = [prompts.get(index) for index in indices]
                shown = [None if cache is None else disclosure.of(cache) for cache in caches]
                return RequestCache(id=request_id, prompts=shown)
        return None
