"""How a request's tokens are chosen and when it ends: validated once, frozen afterwards."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeAlias, TypeVar, cast

from pyengine.errors import InvalidRequestError
from pyengine.utils.callables import takes
from pyengine.utils.validation import (
    FLOAT32_MAX,
    FLOAT32_TINY,
    INT64_MAX,
    Rule,
    is_integer,
    is_real,
    items_of,
    refuse,
    refuses_unknown,
    text_item,
    token_item,
)

FormatKind: TypeAlias = Literal["json", "regex", "choice", "grammar"]
LogitsProcessor: TypeAlias = Callable[..., Any]
"""Called with the output tokens, a list, and the logits, float32 `[V]`; with those of the prompt
before them if it takes three arguments. It returns the logits, or changes them in place."""
StopCondition: TypeAlias = Callable[[list[int], str], bool | str | None]
"""Called with the output tokens and the text so far; true, or a stop reason, ends the sequence."""

MAX_FORMAT_BYTES = 1 << 16
"""The longest schema, expression or grammar, and all texts of a choice together, in UTF-8."""
MAX_FORMAT_DEPTH = 64
"""The deepest nesting of objects and lists in a schema."""
MAX_CHOICES = 1_024


@refuses_unknown("form of structured outputs")
@dataclass(frozen=True, kw_only=True)
class StructuredOutputs:
    """A constraint on the form of an answer, with vLLM's field names. Give exactly one field.

    Raises :class:`InvalidRequestError` for no field or several, for a value of the wrong type, for
    more than 64 KiB, and for a schema with nesting above 64. Whether a constraint can be served is
    checked when a request is submitted.
    """

    json: str | Mapping[str, Any] | None = None
    """A JSON schema, as text or as parsed by `json.loads`; stored as text."""
    regex: str | None = None
    """A regular expression (Rust syntax) that matches the whole answer."""
    choice: Iterable[str] | None = None
    """The answer is one of these texts; stored as a tuple."""
    grammar: str | None = None
    """A context-free grammar: Lark with a rule `start`, or GBNF with a rule `root`."""
    json_object: bool | None = None
    """Any JSON object."""

    def __post_init__(self) -> None:
        if self.json_object is not None and self.json_object is not True:
            raise refuse("structured_outputs.json_object", self.json_object, "True, or left out")
        set_fields = [field.name for field in fields(self) if getattr(self, field.name) is not None]
        if len(set_fields) != 1:
            names = ", ".join(field.name for field in fields(self))
            raise InvalidRequestError(
                f"structured_outputs has {' and '.join(set_fields) or 'nothing'}: give exactly "
                f"one of {names}"
            )
        (name,) = set_fields
        if name == "json":
            object.__setattr__(self, name, _schema_text(self.json))
        elif name == "choice":
            object.__setattr__(self, name, _checked_choice(self.choice))
        elif name in ("regex", "grammar"):
            label = f"structured_outputs.{name}"
            object.__setattr__(self, name, _checked_text(label, getattr(self, name)))

    @property
    def field(self) -> str:
        """The name of the field that is given."""
        return next(field.name for field in fields(self) if getattr(self, field.name) is not None)

    @property
    def kind(self) -> FormatKind:
        """The kind it is compiled as; any object is a schema like others."""
        if self.regex is not None:
            return "regex"
        if self.choice is not None:
            return "choice"
        return "grammar" if self.grammar is not None else "json"

    @property
    def text(self) -> str:
        """The schema, the expression, the grammar, or the choice as a JSON list."""
        if self.choice is not None:
            return json.dumps(self.choice)
        if self.json_object:
            return '{"type": "object"}'
        return str(self.json if self.json is not None else self.regex or self.grammar)


def _checked_text(name: str, text: Any) -> str:
    checked = text_item(name, text)
    size = len(checked.encode())
    if size > MAX_FORMAT_BYTES:
        raise InvalidRequestError(
            f"{name} has {size} bytes: at most {MAX_FORMAT_BYTES} are allowed; make it shorter"
        )
    return checked


def _schema_text(schema: Any) -> str:
    name = "structured_outputs.json"
    allowed = "a JSON schema: an object, or its text"
    if not isinstance(schema, str | Mapping):
        raise refuse(name, schema, allowed)
    try:
        text = schema if isinstance(schema, str) else json.dumps(dict(schema), allow_nan=False)
        checked = _checked_text(name, text)
        parsed = json.loads(checked)
    except InvalidRequestError:
        raise
    except RecursionError:
        raise _too_deep(name) from None
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(f"{name} is not JSON: {error}; it must be {allowed}") from error
    if not isinstance(parsed, dict):
        raise refuse(name, parsed, allowed)
    if _depth(parsed) > MAX_FORMAT_DEPTH:
        raise _too_deep(name)
    return checked


def _depth(value: Any) -> int:
    """How deeply objects and lists are nested; 0 for what is neither."""
    depth, level = 0, [value]
    while True:
        inner: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                inner += item.values()
            elif isinstance(item, list):
                inner += item
        if not any(isinstance(item, dict | list) for item in level):
            return depth
        depth, level = depth + 1, inner


def _too_deep(name: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name} is nested more deeply than {MAX_FORMAT_DEPTH} levels: make it flatter"
    )


def _checked_choice(choice: Any) -> tuple[str, ...]:
    name = "structured_outputs.choice"
    if isinstance(choice, str):
        raise refuse(name, choice, "a list of texts")
    texts = items_of(name, choice, text_item)
    if not 1 <= len(texts) <= MAX_CHOICES:
        raise InvalidRequestError(f"{name} has {len(texts)} texts: give 1 to {MAX_CHOICES}")
    _checked_text(name, "".join(texts))
    return texts


_Item = TypeVar("_Item")
_Ids = TypeVar("_Ids", bound=Sequence[int])

MAX_SAMPLES = 16_384
"""The largest ``n``. How many can run at once is the engine's limit, and smaller."""
MAX_LOGPROB_ENTRIES = 1 << 23
"""How many log-probabilities a request may report that asks for more than 20 per token: each
takes some 250 bytes in its result."""
_LOGPROBS_OF_ANY_LENGTH = 20


class _TupleField(Generic[_Item]):
    """A dataclass field that takes one item, several or ``None``, and is read as a tuple.

    The standard library calls this a descriptor-typed field: the parameter of ``__init__`` has
    the type that ``__set__`` takes, the attribute the type that ``__get__`` returns. ``__set__`` is
    for type checkers; `SamplingParams` makes the tuple, and is then read without a call.
    """

    def __get__(self, instance: object | None, owner: type) -> tuple[_Item, ...]:
        return ()  # the default

    if TYPE_CHECKING:

        def __set__(self, instance: object, value: _Item | Iterable[_Item] | None) -> None: ...


def _processor_item(name: str, item: Any) -> LogitsProcessor:
    if not callable(item) or not (takes(item, 2) or takes(item, 3)):
        raise refuse(
            name,
            item,
            "made of callables that take output tokens and logits, or prompt tokens before them",
        )
    return cast(LogitsProcessor, item)


_TUPLES: Mapping[str, Callable[[str, Any], Any]] = {
    "stop": text_item,
    "stop_token_ids": token_item,
    "bad_words": text_item,
    "logits_processors": _processor_item,
}
"""The fields that are read as tuples, and the checks of their items."""


class RequestOutputKind(Enum):
    """The content of a running request's outputs."""

    CUMULATIVE = 0
    """All output so far, each time."""
    DELTA = 1
    """The output since the previous item."""
    FINAL_ONLY = 2
    """There is one output, at the end."""


TRUNCATION = Rule(
    int,
    lambda x: x == -1 or x >= 1,
    "an integer of at least 1, -1 for as many as the model takes, or None for no cut",
    optional=True,
)
"""The rule of `truncate_prompt_tokens`."""

_RULES: Mapping[str, Rule] = {
    "n": Rule(int, lambda x: 1 <= x <= MAX_SAMPLES, f"an integer from 1 to {MAX_SAMPLES}"),
    "temperature": Rule(
        float, lambda x: 0 <= x < math.inf, "a finite number, 0 (greedy) or greater"
    ),
    "top_p": Rule(float, lambda x: 0 < x <= 1, "greater than 0 and at most 1 (1 turns it off)"),
    "top_k": Rule(int, lambda x: x >= -1, "an integer of at least 1, or 0 or -1 to turn it off"),
    "min_p": Rule(float, lambda x: 0 <= x <= 1, "between 0 (off) and 1"),
    "repetition_penalty": Rule(
        float,
        lambda x: FLOAT32_TINY <= x <= FLOAT32_MAX,
        "greater than 0 and within float32, 1.2e-38 to 3.4e38 (1 turns it off)",
    ),
    "presence_penalty": Rule(float, lambda x: -2 <= x <= 2, "between -2 and 2 (0 turns it off)"),
    "frequency_penalty": Rule(float, lambda x: -2 <= x <= 2, "between -2 and 2 (0 turns it off)"),
    "seed": Rule(
        int,
        lambda x: -(2**63) <= x < 2**64,
        "an integer of 64 bits, or None for one that the engine chooses",
        optional=True,
    ),
    "max_tokens": Rule(
        int,
        lambda x: 0 <= x <= INT64_MAX,
        "an integer from 0 to 2**63 - 1, or None for as many as the model has positions",
        optional=True,
    ),
    "min_tokens": Rule(int, lambda x: 0 <= x <= INT64_MAX, "an integer from 0 to 2**63 - 1"),
    "cache_priority": Rule(int, lambda x: 0 <= x <= 100, "an integer from 0 to 100"),
    "logprobs": Rule(
        int,
        lambda x: -1 <= x < 2**31,
        "an integer of at least 0 (0: only the chosen token), -1 for the whole vocabulary, "
        "or None for none",
        optional=True,
    ),
    "prompt_logprobs": Rule(
        int,
        lambda x: -1 <= x < 2**31,
        "an integer of at least 0 (0: only the prompt's own tokens), -1 for the whole "
        "vocabulary, or None for none",
        optional=True,
    ),
    "thinking_token_budget": Rule(
        int,
        lambda x: -1 <= x <= INT64_MAX,
        "an integer of at least 0, or -1 or None for no limit",
        optional=True,
    ),
    "truncate_prompt_tokens": TRUNCATION,
}


@refuses_unknown("sampling parameter")
@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Settings of one request, with vLLM's names and defaults.

    Raises :class:`InvalidRequestError` for a value that is out of range or has a wrong type, and
    for an unknown name, for which it suggests the most similar known one.
    ``stop`` and ``bad_words`` accept a string or several, ``stop_token_ids`` and
    ``allowed_token_ids`` a token id or several; they are stored as tuples.
    """

    n: int = 1
    """How many completions of the prompt to generate; the prompt is computed once."""
    temperature: float = 1.0
    """Divides the logits; 0 is greedy and always chooses the most probable token."""
    top_p: float = 1.0
    """Keep the smallest set of most probable tokens whose total probability reaches this."""
    top_k: int = 0
    """Keep this many of the most probable tokens, and any as probable as the last of them; 0, -1,
    or more than the vocabulary size: keep all."""
    min_p: float = 0.0
    """Keep tokens at least this many times as probable as the most probable one."""
    repetition_penalty: float = 1.0
    """For tokens of the prompt and the output: divides logits above 0, multiplies the others."""
    presence_penalty: float = 0.0
    """Subtracted from the logit of each token that was generated before."""
    frequency_penalty: float = 0.0
    """Subtracted once per time the token was generated before."""
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Makes sampling reproducible in any batch; ``None``: the engine chooses a seed."""
    stop: _TupleField[str] = _TupleField()
    """End the text at the first of these strings."""
    stop_token_ids: _TupleField[int] = _TupleField()
    """End at the first of these tokens."""
    include_stop_str_in_output: bool = False
    """True: the text includes the stop string that ended it."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""
    max_tokens: int | None = 16
    """Maximum number of generated tokens. 0: only the prompt is computed, for its
    log-probabilities; ``None``: up to the model's positions. If the context holds fewer, the
    answer ends there, with the ``stop_reason`` "max_model_len"."""
    min_tokens: int = 0
    """Number of tokens to generate before any stop condition applies."""
    logprobs: int | None = None
    """Return the log-probabilities of the chosen token and of this many most probable ones; -1: of
    all. Above 20, the total per request is limited, see :meth:`check_sizes`."""
    prompt_logprobs: int | None = None
    """The same for the tokens of the prompt."""
    detokenize: bool = True
    """False: produce token ids only, no text."""
    skip_special_tokens: bool = True
    """Omit special tokens from the text."""
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    """The content of each output while the request runs."""
    bad_words: _TupleField[str] = _TupleField()
    """Words that the answer must not contain, at the beginning of the text or after a space: a
    token that would complete one is never chosen."""
    allowed_token_ids: Sequence[int] | None = None
    """Choose only among these tokens; ``None``: among all."""
    truncate_prompt_tokens: int | None = None
    """Keep only this many tokens at the end of the prompt; -1: as many as the model accepts."""
    structured_outputs: StructuredOutputs | None = None
    """A constraint on the form of the answer, which ends when the form is complete."""
    logits_processors: _TupleField[LogitsProcessor] = _TupleField()
    """Callables that change the logits of each token, in order, before everything else does."""
    stop_when: StopCondition | None = field(default=None, hash=False)
    """Called after each token, beyond `min_tokens`: see `StopCondition`."""
    thinking_token_budget: int | None = None
    """Most tokens of thinking; then the end of the thinking is forced. 0: at once; -1: no limit.
    For models with a known marker, like `</think>`."""
    speculate: bool = True
    """False: use no drafts for this request, if the engine has them. The tokens are the same."""
    cache_priority: int = 0
    """Above 0, cached blocks of prompt and answer are evicted after those of lower priorities, as
    far as the engine's ``max_pinned_share`` goes."""
    return_hidden_states: Literal["last", "all"] | None = None
    """Return the model's hidden states after its last norm: "last", those that the generated tokens
    are chosen from; "all", those of the prompt's tokens, too, which are then computed even if they
    are cached. The name is SGLang's."""

    _SWITCHES: ClassVar[tuple[str, ...]] = (
        "include_stop_str_in_output",
        "ignore_eos",
        "detokenize",
        "skip_special_tokens",
        "speculate",
    )

    def __post_init__(self) -> None:
        for name, rule in _RULES.items():
            object.__setattr__(self, name, rule.checked(name, getattr(self, name)))
        for name, checked in _TUPLES.items():
            object.__setattr__(self, name, items_of(name, getattr(self, name), checked))
        for name in self._SWITCHES:
            if not isinstance(getattr(self, name), bool):
                raise refuse(name, getattr(self, name), "True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise refuse("output_kind", self.output_kind, "a RequestOutputKind")
        wanted: Any = self.return_hidden_states
        if wanted is not None and not (isinstance(wanted, str) and wanted in ("last", "all")):
            raise refuse("return_hidden_states", self.return_hidden_states, "'last', 'all' or None")
        if not isinstance(self.structured_outputs, StructuredOutputs | None):
            raise refuse("structured_outputs", self.structured_outputs, "a StructuredOutputs")
        stop_when: Any = self.stop_when
        if stop_when is not None and not (callable(stop_when) and takes(stop_when, 2)):
            raise refuse(
                "stop_when", self.stop_when, "a callable that takes output tokens and text"
            )
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.allowed_token_ids is not None:
            allowed = items_of("allowed_token_ids", self.allowed_token_ids, token_item)
            if not allowed:
                raise refuse("allowed_token_ids", [], "at least one token id, or None for all")
            object.__setattr__(self, "allowed_token_ids", allowed)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise refuse("min_tokens", self.min_tokens, f"at most max_tokens={self.max_tokens}")
        if self.stop and not self.detokenize:
            raise refuse(
                "stop",
                self.stop,
                "empty with detokenize=False, as it needs text to search: "
                "set detokenize=True, or use stop_token_ids",
            )
        if self.limits_thinking and self.structured_outputs is not None:
            raise refuse(
                "thinking_token_budget",
                self.thinking_token_budget,
                "None or -1 with structured_outputs, whose form begins with the answer",
            )
        for word in self.bad_words:
            if word.isspace():
                raise refuse("bad_words", word, "made of words, not of white space alone")

    @property
    def is_greedy(self) -> bool:
        """Whether the most probable token is always taken (``temperature == 0``)."""
        return self.temperature == 0

    @cached_property
    def has_penalties(self) -> bool:
        """Whether choosing a token needs to know which ones came before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @cached_property
    def changes_logits(self) -> bool:
        """Whether tokens are chosen from other logits than the model's own, bad words aside."""
        return (
            self.min_tokens > 0
            or self.logit_bias is not None
            or self.allowed_token_ids is not None
            or self.has_penalties
        )

    @property
    def may_speculate(self) -> bool:
        """Whether drafts may be used: logits processors are called once for each token."""
        return self.speculate and not self.logits_processors

    @property
    def limits_thinking(self) -> bool:
        """Whether the tokens of thinking are counted."""
        return self.thinking_token_budget is not None and self.thinking_token_budget >= 0

    def num_logprobs(self, vocab_size: int) -> int | None:
        """How many log-probabilities each generated token reports; ``None``: none at all."""
        return vocab_size if self.logprobs == -1 else self.logprobs

    def num_prompt_logprobs(self, vocab_size: int) -> int | None:
        """How many log-probabilities each token of the prompt reports; ``None``: none at all."""
        return vocab_size if self.prompt_logprobs == -1 else self.prompt_logprobs

    def truncated(self, prompt_token_ids: _Ids, longest: int) -> _Ids | Sequence[int]:
        """Return the tokens of a prompt that ``truncate_prompt_tokens`` keeps.

        ``longest`` is how many the model takes. A prompt that is not cut is returned as it is.
        """
        limit = longest if self.truncate_prompt_tokens == -1 else self.truncate_prompt_tokens
        if limit is None or len(prompt_token_ids) <= limit:
            return prompt_token_ids
        return prompt_token_ids[len(prompt_token_ids) - limit :]

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise :class:`InvalidRequestError` for ids or counts that ``vocab_size`` cannot hold."""
        for name in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids and max(ids) >= vocab_size:
                raise refuse(name, max(ids), f"a token id of this model: 0 to {vocab_size - 1}")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            if count is not None and count > vocab_size:
                raise refuse(
                    name, count, f"at most the vocabulary's size, {vocab_size}, or -1 for all of it"
                )

    def check_sizes(self, num_prompt_tokens: int, max_output: int, vocab_size: int) -> None:
        """Raise :class:`InvalidRequestError` where log-probabilities would fill the memory.

        Up to 20 per token are allowed for any length. More are allowed as long as the request's
        are at most ``MAX_LOGPROB_ENTRIES`` together; ``max_output`` is how many tokens each of
        its completions may have.
        """
        requests = (
            ("prompt_logprobs", self.num_prompt_logprobs(vocab_size), 1, num_prompt_tokens),
            ("logprobs", self.num_logprobs(vocab_size), self.n, max_output),
        )
        for name, count, times, length in requests:
            max_count = MAX_LOGPROB_ENTRIES // max(times * length, 1)
            if count is not None and count > max(max_count, _LOGPROBS_OF_ANY_LENGTH):
                tokens = f"{times} x {length} tokens" if times > 1 else f"{length} tokens"
                raise refuse(
                    name,
                    getattr(self, name),
                    f"at most {max(max_count, _LOGPROBS_OF_ANY_LENGTH)} for {tokens}: of more than "
                    f"{_LOGPROBS_OF_ANY_LENGTH} per token, a request reports at most "
                    f"{MAX_LOGPROB_ENTRIES}",
                )


def _checked_bias(bias: Any) -> dict[int, float]:
    """Return a private copy of ``bias``, so that the caller's later changes don't reach it."""
    allowed = "a finite number within float32, at most 3.4e38"
    if not isinstance(bias, Mapping):
        raise refuse("logit_bias", bias, "a mapping from token id to a finite number")
    checked: dict[int, float] = {}
    for token, value in bias.items():
        if not is_integer(token) or not 0 <= token <= INT64_MAX:
            raise refuse("logit_bias", token, "keyed by token ids, integers of at least 0")
        if not is_real(value) or not abs(value) <= FLOAT32_MAX:
            raise refuse(f"logit_bias[{token}]", value, allowed)
        checked[int(token)] = float(value)
    return checked


@refuses_unknown("beam search parameter")
@dataclass(frozen=True)
class BeamSearchParams:
    """Settings of a beam search, with vLLM's names and defaults.

    Raises :class:`InvalidRequestError` for a value that is out of range or has a wrong type.
    """

    beam_width: int
    """How many beams, and results, there are."""
    max_tokens: int
    """Most tokens of the answer."""
    ignore_eos: bool = False
    """Continue after the model's end-of-sequence tokens."""
    temperature: float = 0.0
    """0: beams are ranked by the model's own log-probabilities, as in vLLM."""
    length_penalty: float = 1.0
    """A score is the total log-probability, divided by the length of prompt and answer to this
    power."""
    include_stop_str_in_output: bool = False
    """True: the tokens include the end of sequence."""

    def __post_init__(self) -> None:
        for name, rule in _BEAM_RULES.items():
            object.__setattr__(self, name, rule.checked(name, getattr(self, name)))
        for name in ("ignore_eos", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise refuse(name, getattr(self, name), "True or False")


MAX_BEAM_WIDTH = 1024

_BEAM_RULES: Mapping[str, Rule] = {
    "beam_width": Rule(
        int, lambda x: 1 <= x <= MAX_BEAM_WIDTH, f"an integer from 1 to {MAX_BEAM_WIDTH}"
    ),
    "max_tokens": Rule(int, lambda x: 1 <= x <= INT64_MAX, "an integer of at least 1"),
    "temperature": Rule(float, lambda x: x == 0, "0: beam search does not draw"),
    "length_penalty": Rule(float, lambda x: -10 <= x <= 10, "a number from -10 to 10"),
}
