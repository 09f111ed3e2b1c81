"""Why the tokens of a prompt are not cached, for its caller: figures, and a hint in words."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from pyengine.engine.offloading import KVOffloader
from pyengine.engine.parts import EnginePart
from pyengine.kv_cache import BlockManager, Explanation
from pyengine.outputs import CacheExplanation, LazyText
from pyengine.request.prompts import Prompt
from pyengine.request.request import Request
from pyengine.request.untrusted_calls import is_failure

_SHOWN = 6  # tokens before a difference, and from it on


class Explainer(EnginePart):
    """Records what each request has reused, and why no more."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size

    def prompt_done(self, request: Request) -> Iterable[Request]:
        """Explain a prompt while its first sequence has blocks."""
        kv, result, token_ids = request.sequences[0].kv, request.result, request.prompt_token_ids
        explanation = kv.explain()
        restored = min(request.progress.num_restored_tokens, explanation.num_pool_tokens)
        result.cache = _explained(explanation, restored, token_ids, request.rules.tokenizer)
        if explanation.position:
            result.last_reused_block = kv.block_table[explanation.position // self._block_size - 1]
        return ()


def explain_prompt(
    manager: BlockManager, prompt: Prompt, tokenizer: Any, offloader: KVOffloader | None
) -> CacheExplanation:
    """The tokens that a request with this prompt would reuse now, and why no more."""
    token_ids = prompt.token_ids
    explanation = manager.explain(token_ids, **prompt.space)
    explained = _explained(explanation, 0, token_ids, tokenizer)
    if (
        explained.reason == "new"
        and explained.position == 0
        and offloader is not None
        and offloader.is_stored_by_another_model(token_ids, prompt.space)
    ):
        hint = _SENTENCES["weights_changed"]
        return replace(explained, reason="weights_changed", _hint=hint)
    return explained


def _explained(
    explanation: Explanation, restored: int, token_ids: Sequence[int], tokenizer: Any
) -> CacheExplanation:
    explained = CacheExplanation(
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
        cached_to=explanation.cached_to,
    )
    return with_hint(explained, token_ids, tokenizer)


def with_hint(
    explanation: CacheExplanation, token_ids: Sequence[int], tokenizer: Any
) -> CacheExplanation:
    """The explanation of a prompt with its hint."""
    diverged_at, hint = explanation.diverged_at, None
    if diverged_at is not None:
        hint = difference(token_ids, diverged_at, explanation.diverged_tokens, tokenizer)
    elif explanation.reason is not None:
        hint = LazyText(partial(hint_of, explanation))
    return replace(explanation, _hint=hint)


def hint_of(explanation: CacheExplanation) -> str:
    """The reason of a miss in words, if it is not a difference."""
    position, since = explanation.position, explanation.num_evicted_since
    if explanation.evicted_by == "evict_all":
        return f"the tokens from {position} on were evicted by a call that evicts all"
    if explanation.evicted_by == "weights_changed":
        return f"other weights computed the tokens from {position} on"
    if since is not None:
        return (
            f"the tokens from {position} on were evicted ({explanation.evicted_by}); "
            f"{since} tokens were evicted since: a pool larger by about that many would keep them"
        )
    assert explanation.reason is not None
    return _SENTENCES[explanation.reason].format(position=position, cached=explanation.cached_to)


_SENTENCES = {
    "new": "no cached prompt goes on like this one from token {position} on",
    "evicted": "the tokens from {position} on were cached and are not any more",
    "not_yet_computed": "another request is computing the tokens from {position} on: send this one "
    "after its first token",
    "loading": "the tokens from {position} on are being restored",
    "reads_disabled": "the cache is not read: prompt_logprobs need every token computed, or "
    "enable_prefix_caching is off",
    "weights_changed": "the store has this prompt by another model, other weights or settings",
    "below_one_block": "the prompt is shorter than a block, and only whole blocks are cached",
    "no_snapshot": "the prefix is cached to token {cached}, and the last state of the recurrent "
    "layers was kept at {position}",
}


def difference(
    token_ids: Sequence[int], position: int, others: Sequence[int], tokenizer: Any
) -> LazyText:
    """The first difference of a prompt and a cached one, which goes on with `others` there.

    Decoded when it is read; it keeps the tokens around the difference alone.
    """
    before = [int(token) for token in token_ids[max(0, position - _SHOWN) : position]]
    own = [int(token) for token in token_ids[position : position + _SHOWN]]
    both = [before + tokens for tokens in (own, list(others[:_SHOWN]))]
    return LazyText(partial(_difference, position, both, tokenizer))


def _difference(position: int, both: Sequence[list[int]], tokenizer: Any) -> str:
    texts = [_text(tokens, tokenizer) for tokens in both]
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
