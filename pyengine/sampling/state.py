"""The sampler's state of one request, from submission to its end, and its random numbers.

Random numbers are a hash of (seed, position). A request's n-th draw depends on its seed and on n
alone, not on other requests of the batch, their order, or preemptions.
"""

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.errors import InvalidRequestError
from pyengine.sampling.logits_processors import LogitsProcessors
from pyengine.sampling.thinking_budget import ThinkingBudget
from pyengine.sampling.token_masks import TokenMatcher
from pyengine.sampling_params import SamplingParams

Positions: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
"""Positions of tokens in their outputs, one per row."""

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_MASK64 = (1 << 64) - 1
_SAMPLES = 0x5851F42D4C957F2D
"""Separates the stream of samples' seeds from those of draws: the multiplier of Knuth's MMIX."""


def mix64(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit integers, one to one: the finaliser of SplitMix64.

    Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), with
    the constants of David Stafford's variant 13. Any shape.
    """
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def sample_seed(seed: int, index: int) -> int:
    """Return the seed of the sample at `index` of a request with this seed.

    The first sample has the seed of its request. The others have elements of a SplitMix64 stream
    that depends on it, so that requests with neighbouring seeds have no sample in common.
    """
    if index == 0:
        return seed & _MASK64
    stream = mix64(seeds_of([seed ^ _SAMPLES])) + seeds_of([index]) * _GOLDEN_GAMMA
    return int(mix64(stream)[0])


def seeds_of(seeds: Sequence[int]) -> npt.NDArray[np.uint64]:
    """Return seeds as :func:`uniforms` takes them, modulo 2^64."""
    return np.array([seed & _MASK64 for seed in seeds], dtype=np.uint64)


def uniforms(
    seeds: Sequence[int] | npt.NDArray[np.uint64], positions: Positions
) -> npt.NDArray[np.float64]:
    """Return one number in [0, 1) per (seed, position), with 53 random bits.

    It is element ``position`` of the SplitMix64 stream that starts at ``mix64(seed)``. Seeds are
    scrambled first, as streams a multiple of the increment apart would be shifted copies of each
    other. Seeds are modulo 2^64.
    """
    seed_array = seeds if isinstance(seeds, np.ndarray) else seeds_of(seeds)
    position_array = np.array(positions, dtype=np.uint64)
    stream = mix64(seed_array) + (position_array + np.uint64(1)) * _GOLDEN_GAMMA
    return (mix64(stream) >> np.uint64(11)).astype(np.float64) * 2.0**-53


Tokens: TypeAlias = Sequence[int] | npt.NDArray[np.int64]
_EMPTY_IDS: npt.NDArray[np.int64] = np.empty(0, dtype=np.int64)
_EMPTY_VALUES: npt.NDArray[np.float32] = np.empty(0, dtype=np.float32)


class TokenCounts:
    """The distinct tokens a request has seen, and how often it generated each.

    Grows by doubling, so adding a token costs O(1) and reading costs no copy. A token of the
    prompt that was not generated has the count 0.
    """

    __slots__ = ("_counts", "_ids", "_index", "added")

    def __init__(self, prompt_token_ids: Tokens = ()) -> None:
        distinct = np.unique(np.asarray(prompt_token_ids, dtype=np.int64))
        capacity = max(64, 2 * len(distinct))
        self._ids: npt.NDArray[np.int64] = np.zeros(capacity, dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts: npt.NDArray[np.float32] = np.zeros(capacity, dtype=np.float32)
        self._index = {token: index for index, token in enumerate(distinct.tolist())}
        self.added: list[int] = []
        """The index in `ids` of each generated token, in order."""

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct token ids, in order of first appearance; a view, int64 [n]."""
        return self._ids[: len(self._index)]

    @property
    def counts(self) -> npt.NDArray[np.float32]:
        """How often each of ``ids`` was generated; a view, float32 [n]."""
        return self._counts[: len(self._index)]

    def __len__(self) -> int:
        return len(self._index)

    def copy(self) -> "TokenCounts":
        """Return an independent copy."""
        result = TokenCounts.__new__(TokenCounts)
        result._ids, result._counts = self._ids.copy(), self._counts.copy()
        result._index, result.added = self._index.copy(), self.added.copy()
        return result

    def add(self, token: int) -> None:
        """Count one generated token."""
        index = self._index.setdefault(token, len(self._index))
        if index == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[index] = token
        self._counts[index] += 1
        self.added.append(index)


class SamplingState:
    """One request's settings and history for the choice of its next token.

    It lives from submission to the end of the request. It depends on generated tokens only, not
    on steps or blocks, so a preempted request resumes where it stopped. The prompt is read only for
    a repetition penalty, and not kept.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Tokens,
        *,
        seed: int,
        vocab_size: int,
        stop_ids: Iterable[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        """Resolve ``params`` for a vocabulary of ``vocab_size`` tokens.

        ``seed`` is that of every draw (the caller picks one if ``params.seed`` is ``None``).
        ``stop_ids`` and ``params.stop_token_ids`` cannot be drawn before ``params.min_tokens``
        tokens; ids outside the vocabulary can never be drawn.
        ``bad_words`` are those of ``params`` as tokens (:func:`tokens_of_words`).
        Raises :class:`InvalidRequestError` for token ids of ``params`` outside the vocabulary,
        and if no token is left to draw.
        """
        params.check_vocabulary(vocab_size)
        self.params = params
        self.seed = seed % 2**64
        self.vocab_size = vocab_size
        self.is_drawn = params.temperature > 0
        """True if its tokens are drawn; otherwise the most probable is taken."""
        top_k = max(0, min(params.top_k, vocab_size))
        self.draw_settings = (params.temperature, params.min_p, top_k, params.top_p)
        """Temperature, min-p, top-k (0: off) and top-p."""
        wants_logprobs = params.logprobs is not None
        self.num_logprobs = params.num_logprobs(vocab_size) if wants_logprobs else None
        """The number of log-probabilities of each token; ``None``: not even its own."""
        self.token_ids: list[int] = []
        """The generated tokens."""
        self.counts: TokenCounts | None = None
        """Kept only for penalties."""
        self.stop_ids = self.allowed_ids = self.barred_ids = self.bias_ids = _EMPTY_IDS
        self.bias_values = _EMPTY_VALUES
        self.bad_words: dict[int, list[tuple[int, ...]]] = {}
        """Sequences of several tokens whose last may not follow the others, by the one before."""
        self.matcher: TokenMatcher | None = None
        """The allowed next tokens, if the answer has a grammar."""
        self.depends_on_output = False
        """True if the next token cannot be chosen before the last one is known."""
        self.may_change_logits = False
        """True if any token, now or later, is chosen from changed logits."""
        self.processors: LogitsProcessors | None = None
        """The callables that change its logits first."""
        self.thinking: ThinkingBudget | None = None
        """The limit of its thinking."""
        if bad_words or params.changes_logits:
            self._resolve_changes(prompt_token_ids, stop_ids, bad_words)

    def _resolve_changes(
        self, prompt_token_ids: Tokens, stop_ids: Iterable[int], bad_words: Sequence[Sequence[int]]
    ) -> None:
        params, vocab_size = self.params, self.vocab_size
        if params.has_penalties:
            repeats = params.repetition_penalty != 1
            self.counts = TokenCounts(prompt_token_ids if repeats else ())
        if params.min_tokens > 0:  # barred tokens, for now
            self.stop_ids = _within({*stop_ids, *params.stop_token_ids}, vocab_size)
        if params.allowed_token_ids is not None:  # the only allowed tokens, if not empty
            self.allowed_ids = _within({*params.allowed_token_ids}, vocab_size)
        words = [tuple(word) for word in bad_words if all(0 <= item < vocab_size for item in word)]
        for word in words:
            if len(word) > 1:
                self.bad_words.setdefault(word[-2], []).append(word)
        # Words of one token: always barred.
        self.barred_ids = _within({word[0] for word in words if len(word) == 1}, vocab_size)
        if params.logit_bias:
            self.bias_ids = np.array(list(params.logit_bias), dtype=np.int64)
            self.bias_values = np.array(list(params.logit_bias.values()), dtype=np.float32)
        self.depends_on_output = self.counts is not None or bool(self.bad_words)
        self.may_change_logits = self.depends_on_output or any(
            map(len, (self.stop_ids, self.allowed_ids, self.barred_ids, self.bias_ids))
        )
        if self.may_change_logits:
            self._check_choice()

    def _check_choice(self) -> None:
        """Raise :class:`InvalidRequestError` if no token can be drawn, now or at all."""
        barred = np.union1d(self.stop_ids, self.barred_ids)
        if len(self.allowed_ids):
            left, of = len(np.setdiff1d(self.allowed_ids, barred)), "allowed_token_ids"
        else:
            left, of = self.vocab_size - len(barred), f"all {self.vocab_size} tokens"
        if left == 0:
            raise InvalidRequestError(
                f"min_tokens={self.params.min_tokens} and bad_words leave nothing to draw: "
                f"{of} are stop tokens or bad words"
            )

    def keep_to(self, matcher: TokenMatcher) -> None:
        """Constrain the tokens by this matcher, which no other state uses."""
        self.matcher, self.depends_on_output = matcher, True

    def process_with(self, processors: LogitsProcessors) -> None:
        """Change the logits by these processors, which no other state uses."""
        self.processors, self.depends_on_output = processors, True

    def limit_thinking(self, budget: ThinkingBudget) -> None:
        """End the thinking by this budget, which no other state uses."""
        self.thinking, self.depends_on_output, self.may_change_logits = budget, True, True

    def sibling(self, seed: int) -> "SamplingState":
        """Return the state of another sample of the same prompt, with its own seed.

        It starts without output. Cheaper than a new state: constant parts are shared.
        """
        if self.token_ids:
            raise ValueError(f"{len(self.token_ids)} tokens were generated: it has begun")
        state = copy(self)
        state.seed, state.token_ids = seed % 2**64, []
        state.counts = None if self.counts is None else self.counts.copy()
        state.matcher = None if self.matcher is None else self.matcher.sibling()
        state.processors = None if self.processors is None else self.processors.sibling()
        state.thinking = None if self.thinking is None else self.thinking.sibling()
        return state

    def ahead(self, drafts: Sequence[int]) -> "list[SamplingState]":
        """Return the states of the tokens before, between and after `drafts`, this state first.

        Each further one is this state after the drafts before it.
        """
        states = [self]
        for token in drafts:
            states.append(states[-1]._after(token) if self.depends_on_output else self)
        return states

    def _after(self, token: int) -> "SamplingState":
        state = copy(self)
        state.token_ids = self.token_ids.copy()
        state.counts = None if self.counts is None else self.counts.copy()
        state.matcher = None if self.matcher is None else self.matcher.ahead()
        state.thinking = None if self.thinking is None else self.thinking.sibling()
        state.append(token)
        return state

    @property
    def num_output(self) -> int:
        """The number of generated tokens; the position of the next draw."""
        return len(self.token_ids)

    def barred_by_output(self) -> npt.NDArray[np.int64]:
        """The tokens that would complete a bad word now: int64 [n]."""
        if not self.token_ids:
            return _EMPTY_IDS
        barred = {
            word[-1]
            for word in self.bad_words.get(self.token_ids[-1], ())
            if tuple(self.token_ids[1 - len(word) :]) == word[:-1]
        }
        return _within(barred, self.vocab_size)

    def append(self, token: int) -> int:
        """Record a generated token; returns their number. Once for each, in order."""
        self.token_ids.append(token)
        if self.counts is not None:
            self.counts.add(token)
        if self.matcher is not None:
            self.matcher.append(token)
        if self.thinking is not None:
            self.thinking.append(token)
        return len(self.token_ids)


def _within(ids: Collection[int], vocab_size: int) -> npt.NDArray[np.int64]:
    """Return the `ids` inside the vocabulary, sorted: int64 [n]."""
    if not ids:
        return _EMPTY_IDS
    return np.array(sorted(token for token in ids if 0 <= token < vocab_size), dtype=np.int64)


def tokens_of_words(words: Sequence[str], tokenizer: Any) -> list[tuple[int, ...]]:
    """Return the token sequences that spell words, at the beginning of a text and after a space.

    Raises :class:`InvalidRequestError` for words without a tokenizer.
    """
    if words and tokenizer is None:
        raise InvalidRequestError(
            f"bad_words={list(words[:3])} needs a tokenizer, this model has none: use logit_bias"
        )
    spelled: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word.lstrip(), " " + word.lstrip()):
            tokens = tuple(tokenizer.encode(text, add_special_tokens=False))
            if tokens:
                spelled[tokens] = None
    return list(spelled)
