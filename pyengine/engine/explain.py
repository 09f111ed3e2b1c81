"""Why the tokens of a prompt are not cached, for its caller: figures, and a hint in words."""

from collections.abc import Sequence
from typing import Any

from pyengine.engine.prompts import Prompt
from pyengine.engine.request import Request
from pyengine.engine.untrusted_calls import is_failure
from pyengine.kv_cache import BlockManager, Explanation
from pyengine.outputs import CacheExplanation

_SHOWN = 6  # tokens before a difference, and from it on


def explain_request(request: Request) -> CacheExplanation:
    """What a request has reused, and why no more. Its first sequence still has its blocks."""
    explanation = request.sequences[0].kv.explain()
    restored = min(request.num_restored_tokens, explanation.num_pool_tokens)
    return _explained(explanation, restored, request.prompt_token_ids, request.tokenizer)


def explain_prompt(manager: BlockManager, prompt: Prompt, tokenizer: Any) -> CacheExplanation:
    """What a request with this prompt would reuse now, and why no more."""
    explanation = manager.explain(prompt.token_ids, namespace=prompt.namespace)
    return _explained(explanation, 0, prompt.token_ids, tokenizer)


def _explained(
    explanation: Explanation, restored: int, token_ids: Sequence[int], tokenizer: Any
) -> CacheExplanation:
    return CacheExplanation(
        num_pool_tokens=explanation.num_pool_tokens - restored,
        num_in_flight_tokens=explanation.num_in_flight_tokens,
        num_copied_tokens=explanation.num_copied_tokens,
        num_restored_tokens=restored,
        position=explanation.position,
        reason=explanation.reason,
        diverged_at=explanation.diverged_at,
        diverged_tokens=tuple(explanation.diverged_tokens),
        evicted_by=explanation.evicted_by,
        num_evicted_since=explanation.num_evicted_since,
        hint=_hint(explanation, token_ids, tokenizer),
    )


def _hint(explanation: Explanation, token_ids: Sequence[int], tokenizer: Any) -> str | None:
    position, reason = explanation.position, explanation.reason
    match reason:
        case None:
            return None
        case "diverged":
            assert explanation.diverged_at is not None
            return difference(
                token_ids, explanation.diverged_at, explanation.diverged_tokens, tokenizer
            )
        case "evicted":
            by, since = explanation.evicted_by, explanation.num_evicted_since
            if by is None or since is None:
                return f"the tokens from {position} on were cached and are not any more"
            if by == "evict_all":
                return f"the tokens from {position} on were evicted, with all others, by a call"
            return (
                f"the tokens from {position} on were evicted ({by}); {since} tokens were evicted "
                "since: a pool larger by about that many tokens would still have them"
            )
    return _SENTENCES[reason].format(position=position)


_SENTENCES = {
    "new": "no cached prompt goes on like this one from token {position} on",
    "not_yet_computed": "another request is computing the tokens from {position} on: send this one "
    "after its first token",
    "loading": "the tokens from {position} on are being restored",
    "reads_disabled": "the cache is not read: prompt_logprobs need every token computed, and "
    "enable_prefix_caching may be off",
    "below_one_block": "the prompt is shorter than a block, and whole blocks are cached",
}


def difference(
    token_ids: Sequence[int], position: int, others: Sequence[int], tokenizer: Any
) -> str:
    """The first difference of a prompt and a cached one, which goes on with `others` there."""
    before = [int(token) for token in token_ids[max(0, position - _SHOWN) : position]]
    own = [int(token) for token in token_ids[position : position + _SHOWN]]
    texts = [_text(before + tokens, tokenizer) for tokens in (own, list(others[:_SHOWN]))]
    return (
        f"the first difference is at token {position}, {texts[0]} against {texts[1]}: move what "
        "changes behind what does not"
    )


def _text(token_ids: list[int], tokenizer: Any) -> str:
    """Tokens as quoted text; as ids without a tokenizer, or if it fails."""
    if tokenizer is not None:
        try:
            return repr(str(tokenizer.decode(token_ids)))
        except BaseException as error:
            if not is_failure(error):
                raise
    return str(token_ids)
