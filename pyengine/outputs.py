"""Outputs for callers. Names and meanings are vLLM's."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

FinishReason: TypeAlias = Literal["stop", "length", "abort", "error"]
"""Why a completion ended: a stop condition, a length limit, an abort or a deadline, or a failure
of the forward pass (`RequestOutput.error` has the message)."""

CONTEXT_FULL = "max_model_len"
"""The stop reason of a completion that ends because prompt and answer fill the context."""


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token's log-probability and rank, before penalties and temperature."""

    logprob: float
    """Natural logarithm of the probability."""
    rank: int
    """1 for the most probable token; equal probabilities rank by token id, lowest first."""
    decoded_token: str | None = None
    """The token's text, ``None`` without a tokenizer. A part of a character is U+FFFD."""
    token_bytes: bytes | None = None
    """The token's bytes in the text: none for special tokens that the text omits.

    ``None`` without a tokenizer.
    """


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One generated continuation of a prompt."""

    index: int
    """Position among the completions of the same prompt."""
    text: str
    """The generated text so far; empty when the request did not ask for text."""
    token_ids: list[int]
    """All generated tokens, including a final stop token."""
    cumulative_logprob: float | None = None
    """Sum of the generated tokens' log-probabilities, if ``logprobs`` was requested."""
    logprobs: list[dict[int, Logprob]] | None = None
    """For each generated token: the token itself and the most probable ones, by token id."""
    finish_reason: FinishReason | None = None
    """``None`` while the completion is still growing."""
    stop_reason: int | str | None = None
    """The stop token id or stop string that ended it; ``None`` for end of sequence.

    "deadline" if the deadline aborted it; "max_model_len" if it ended before ``max_tokens``, or
    without a ``max_tokens``, because prompt and answer fill the context; "weights_changed" if an
    update of the weights aborted it.
    """
    weights_versions: tuple[tuple[int, int], ...] = ((0, 0),)
    """The versions of the weights that generated it: the number of tokens before each, and the
    version. An answer of one version is a fresh engine's; more than one are of an update that kept
    or recomputed running requests."""
    hidden_states: "npt.NDArray[np.float32] | None" = field(default=None, repr=False, compare=False)
    """With ``return_hidden_states``: float32 [generated tokens, hidden]. Row i is the model's
    hidden state after its last norm at the position before generated token i, which that token was
    chosen from; row 0 is that of the prompt's last token."""

    @property
    def is_finished(self) -> bool:
        """True if no further token will come."""
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Times of a request, in seconds of :func:`time.monotonic`."""

    arrival_time: float
    scheduled_time: float | None = None
    """When its first tokens were computed; before that it waited in the queue."""
    first_token_time: float | None = None
    finished_time: float | None = None
    num_preemptions: int = 0
    """Preemptions of the request, each followed by recomputation."""


MissReason: TypeAlias = Literal[
    "new",
    "diverged",
    "evicted",
    "not_yet_computed",
    "loading",
    "reads_disabled",
    "below_one_block",
    "no_snapshot",
    "weights_changed",
]
"""Why the tokens of a prompt from some block on are not reused.

"new": no cached prefix has them. "diverged": the nearest cached prefix has other tokens there.
"evicted": they were cached. "not_yet_computed": another request has the same tokens and is still
computing them. "loading": they are being restored. "reads_disabled": the request, or the engine,
does not read the cache. "below_one_block": the prompt is shorter than a block. "no_snapshot": the
blocks are cached, the state of the recurrent layers was not kept later. "weights_changed":
``kv_cache_dir`` has them by another model, other weights or settings; only ``explain`` says so.
"""


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LazyText:
    """A text that is made when it is read. Its copies and pickles are the text."""

    make: Callable[[], str]

    def __str__(self) -> str:
        return self.make()

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        return str, (str(self),)


@dataclass(frozen=True, slots=True)
class CacheExplanation:
    """The tokens of a prompt that come from the cache, by source, and why the others do not.

    It depends on the prompts with the same ``cache_salt`` only.
    """

    num_pool_tokens: int
    """Tokens in whole cached blocks."""
    num_in_flight_tokens: int
    """Tokens that another request computed in the same step."""
    num_copied_tokens: int
    """Tokens copied from the beginning of a cached block."""
    num_restored_tokens: int
    """Tokens restored from ``kv_cache_dir``."""
    position: int | None = None
    """Position of the first token that is not reused, at the beginning of a block; ``None`` if
    every whole block of the prompt is."""
    reason: MissReason | None = None
    """Why the block that begins there is not reused."""
    diverged_at: int | None = None
    """Position of the first token that differs in the nearest cached prefix, if "diverged"."""
    diverged_tokens: tuple[int, ...] = ()
    """The cached tokens from there to the end of their block."""
    evicted_by: str | None = None
    """The order of eviction that evicted the block, "evict_all" or "weights_changed", if that is
    remembered."""
    num_evicted_since: int | None = None
    """Tokens evicted since, the block included: a pool larger by about as many would hold it."""
    cached_to: int | None = None
    """Tokens whose blocks are cached, if "no_snapshot": the last state was kept at `position`."""
    _hint: LazyText | str | None = field(default=None, repr=False, compare=False)

    @property
    def hint(self) -> str | None:
        """The reason as a sentence, and what to do about it."""
        return None if self._hint is None else str(self._hint)

    @property
    def num_cached_tokens(self) -> int:
        """Tokens that are not computed: of all sources."""
        whole = self.num_pool_tokens + self.num_in_flight_tokens
        return whole + self.num_copied_tokens + self.num_restored_tokens


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The state of one request: final from ``generate``, a snapshot or a delta from ``stream``.

    Lists that did not change are shared with the previous output: do not modify them.
    """

    request_id: str
    prompt: str | None
    """The prompt as text, ``None`` when it came as token ids."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """One entry per prompt token; ``None`` for the first, which has no context."""
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    """Prompt tokens whose KV came from the cache."""
    metrics: RequestMetrics
    index: int = 0
    """Position of the prompt among those of the same call."""
    error: str | None = None
    """The error message if ``finish_reason`` is "error"."""
    num_restored_tokens: int = 0
    """The cached tokens that were restored from ``kv_cache_dir`` for this request."""
    cache: CacheExplanation | None = None
    """Where its cached tokens came from, and why others were computed, once it has output; ``None``
    without ``explain_misses``."""
    pin_error: str | None = None
    """Why a prefix of the prompt is not pinned, if the request asked for a pin that was refused."""
    prompt_hidden_states: "npt.NDArray[np.float32] | None" = field(
        default=None, repr=False, compare=False
    )
    """With ``return_hidden_states="all"``: float32 [prompt tokens, hidden], once all are
    computed."""


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a text."""

    embedding: list[float] = field(repr=False)

    @property
    def hidden_size(self) -> int:
        """The number of its dimensions."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The classes of a text."""

    probs: list[float]
    """The probability of each label; the logits with ``use_activation=False``."""

    @property
    def num_classes(self) -> int:
        """The number of labels."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The similarity of two texts."""

    score: float
    """The cosine of two embeddings, or the probability that the second text fits the first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _PooledOutput:
    request_id: str
    prompt_token_ids: list[int] = field(repr=False)
    num_cached_tokens: int
    """Prompt tokens whose KV came from the cache."""
    finished: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput(_PooledOutput):
    """The result of one text from ``embed``."""

    outputs: EmbeddingOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationRequestOutput(_PooledOutput):
    """The result of one text from ``classify``."""

    outputs: ClassificationOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoringRequestOutput(_PooledOutput):
    """The result of one pair from ``score``: the tokens are those of both texts."""

    outputs: ScoringOutput


@dataclass(frozen=True, slots=True)
class BeamSearchSequence:
    """A sequence that beam search has found."""

    tokens: list[int]
    """Prompt and answer; without the end of sequence, unless it was asked for."""
    logprobs: list[dict[int, Logprob]]
    """For each token of the answer: the candidates, by token id."""
    cum_logprob: float = 0.0
    """Sum of the log-probabilities of the answer, its end included."""
    text: str | None = None
    """The text of ``tokens``; ``None`` without a tokenizer."""
    finish_reason: FinishReason | None = None
    """The end of sequence: "stop"; ``max_tokens``: "length"."""
    stop_reason: int | str | None = None
    """The token that ended it."""


@dataclass(frozen=True, slots=True)
class BeamSearchOutput:
    """The result of a beam search."""

    sequences: list[BeamSearchSequence]
    """At most ``beam_width``, the best first."""
