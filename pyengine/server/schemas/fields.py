"""Every field of OpenAI's API for chats and completions, and of vLLM's: what happens to it here.

The server reads this table, and `tools/field_table.py` generates docs/reference/request-fields.md.
The types of the fields are in `requests`.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeAlias

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_BOTH = (COMPLETIONS, CHAT)

Judge: TypeAlias = Callable[[Any, Any], bool]
"""Of the value of a field and the whole body."""


class Effect(StrEnum):
    """What becomes of a field."""

    HONOURED = "honoured"
    IGNORED = "without effect"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldRule:
    """The effect of a field; values for which `is_special` holds have another effect.

    `note` says what the field does, why it has no effect, or why it is refused and what to use
    instead. `special` describes the special values.
    """

    name: str
    effect: Effect
    note: str
    routes: tuple[str, ...] = _BOTH
    special: str = ""
    special_effect: Effect = Effect.IGNORED
    is_special: Judge | None = None

    def effect_of(self, value: Any, body: Any) -> Effect:
        """The effect of this value in a request."""
        if self.is_special is not None and self.is_special(value, body):
            return self.special_effect
        return self.effect

    @property
    def effect_in_words(self) -> str:
        """Its effect, and that of special values."""
        if not self.special:
            return self.effect
        return f"{self.effect}; {self.special}: {self.special_effect}"


def _honoured(name: str, note: str = "", **more: Any) -> FieldRule:
    return FieldRule(name=name, effect=Effect.HONOURED, note=note, **more)


def _ignored(name: str, note: str, **more: Any) -> FieldRule:
    return FieldRule(name=name, effect=Effect.IGNORED, note=note, **more)


def _refused(name: str, note: str, **more: Any) -> FieldRule:
    return FieldRule(name=name, effect=Effect.REFUSED, note=note, **more)


def _refused_unless_empty(name: str, note: str, empty: str, **more: Any) -> FieldRule:
    """Refused, but for the value that asks for nothing."""
    return _refused(name, note, special=empty, is_special=lambda value, _: not value, **more)


def _is_best_of_all(value: Any, body: Any) -> bool:
    return bool(value == (body.n or 1))


def _stops_nothing(value: Any, _: Any) -> bool:
    return not any([value] if isinstance(value, str) else value)


def _offers_nothing(value: Any, body: Any) -> bool:
    return value == "auto" and not body.tools


def _shows_special_tokens(value: Any, body: Any) -> bool:
    return value is False and body.skip_special_tokens is False


def _cuts_the_end(value: Any, body: Any) -> bool:
    return value == "right" and body.truncate_prompt_tokens is not None


def _repeats_nothing(value: Any, body: Any) -> bool:
    return not value or body.messages[-1].get("role") != "assistant"


def _calls_nothing(value: Any, _: Any) -> bool:
    return value in ("none", "auto")


_CHAT_ONLY: Any = {"routes": (CHAT,)}
_COMPLETIONS_ONLY: Any = {"routes": (COMPLETIONS,)}

_PROMPT = (
    _honoured("model", "one of the names in `/v1/models`; it may be left out"),
    _honoured("messages", "a conversation, of text", **_CHAT_ONLY),
    _honoured("prompt", "text or token ids, one or a list", **_COMPLETIONS_ONLY),
    _refused("prompt_embeds", "this server takes text and token ids", **_COMPLETIONS_ONLY),
    _refused_unless_empty(
        "suffix", "text cannot be filled in between; ask with prompt alone", '`""`'
    ),
    _honoured("add_special_tokens", "text gets those that the tokenizer adds", **_COMPLETIONS_ONLY),
    _refused_unless_empty(
        "add_special_tokens",
        "the chat template writes the special tokens; leave it out",
        "`false`",
        **_CHAT_ONLY,
    ),
    _honoured("truncate_prompt_tokens", "the last tokens are kept"),
    _ignored(
        "truncation_side",
        "truncate_prompt_tokens keeps the last tokens",
        special="`right` with `truncate_prompt_tokens`",
        special_effect=Effect.REFUSED,
        is_special=_cuts_the_end,
    ),
    _honoured("add_generation_prompt", "begin the assistant's turn", **_CHAT_ONLY),
    _honoured("continue_final_message", "go on with the last message", **_CHAT_ONLY),
    _honoured("chat_template_kwargs", "those that `--template-variable` allows", **_CHAT_ONLY),
    _refused(
        "chat_template",
        "templates are not taken from requests; the model's own is used",
        **_CHAT_ONLY,
    ),
    _refused_unless_empty(
        "documents", "put the text of documents into a message", "`[]`", **_CHAT_ONLY
    ),
    _honoured("tools", "functions that the model may call", **_CHAT_ONLY),
    _honoured(
        "tool_choice",
        "auto, none, required, or a function of `tools`",
        special="`auto` without `tools`",
        is_special=_offers_nothing,
        **_CHAT_ONLY,
    ),
    _honoured("parallel_tool_calls", "false: one call at most", **_CHAT_ONLY),
    _refused_unless_empty("functions", "use tools", "`[]`", **_CHAT_ONLY),
    _refused(
        "function_call",
        "use tool_choice",
        special="`none` and `auto`",
        is_special=_calls_nothing,
        **_CHAT_ONLY,
    ),
    _honoured(
        "reasoning_effort",
        "for chat templates that read it, or `enable_thinking`: off for none, else on; "
        "for others without effect",
        **_CHAT_ONLY,
    ),
    _honoured(
        "verbosity",
        "for chat templates that read it, where `--template-variable` allows it; for others "
        "without effect",
        **_CHAT_ONLY,
    ),
    _ignored("media_io_kwargs", "requests hold text"),
    _ignored("mm_processor_kwargs", "requests hold text"),
    _refused("web_search_options", "this server searches nothing", **_CHAT_ONLY),
)
_ANSWER = (
    _honoured("n", "at most `--max-num-seqs`"),
    _refused(
        "best_of",
        "every answer is returned; ask for n answers and take the best",
        special="as many as `n`",
        is_special=_is_best_of_all,
    ),
    _honoured("max_tokens"),
    _honoured("max_completion_tokens", "another name of `max_tokens`", **_CHAT_ONLY),
    _honoured("min_tokens"),
    _honoured(
        "stop",
        "up to 32",
        special="an empty string",
        is_special=_stops_nothing,
    ),
    _honoured("stop_token_ids"),
    _honoured("include_stop_str_in_output"),
    _honoured("ignore_eos"),
    _honoured("temperature", "0: greedy"),
    _honoured("top_p"),
    _honoured("top_k"),
    _honoured("min_p"),
    _honoured("repetition_penalty"),
    _honoured("presence_penalty"),
    _honoured("frequency_penalty"),
    _honoured("logit_bias"),
    _honoured("bad_words"),
    _honoured("allowed_token_ids"),
    _honoured("seed"),
    _honoured("speculate", "false: no drafts; the tokens are the same"),
    _honoured("response_format", "text, json_object, json_schema"),
    _honoured("structured_outputs", "one of json, regex, choice, grammar"),
    _refused_unless_empty("use_beam_search", "there is no beam search", "`false`"),
    _ignored("length_penalty", "it belongs to beam search"),
    _refused_unless_empty("watermarking", "answers have no watermark", "`false`"),
    _refused("thinking_token_budget", "use max_tokens for the whole answer"),
    _refused(
        "repetition_detection",
        "answers do not end at a repetition; use repetition_penalty or max_tokens",
    ),
    _refused_unless_empty("vllm_xargs", "there are no extensions that read it", "`{}`"),
    _ignored("prediction", "it makes answers faster elsewhere, and the answer is the same"),
    _ignored(
        "include_reasoning",
        "what a model writes before its answer is a part of the content; to have none of it set "
        "`reasoning_effort` to none",
        **_CHAT_ONLY,
    ),
    _refused(
        "modalities",
        "answers are text",
        special='`["text"]`',
        is_special=lambda value, _: value == ["text"],
    ),
    _refused("audio", "answers are text", **_CHAT_ONLY),
    _refused("moderation", "nothing is moderated here", **_CHAT_ONLY),
)
_FORM = (
    _honoured("stream"),
    _honoured(
        "stream_options",
        "`include_usage`, `continuous_usage_stats`; `include_obfuscation` has no effect",
    ),
    _ignored("stream_interval", "an item comes with each step; the text is the same"),
    _honoured("logprobs", "up to 20", **_COMPLETIONS_ONLY),
    _honoured("logprobs", "true or false", **_CHAT_ONLY),
    _honoured("top_logprobs", "up to 20", **_CHAT_ONLY),
    _honoured("prompt_logprobs", "up to 20"),
    _refused_unless_empty(
        "logprob_token_ids", "use logprobs, which has the likeliest tokens", "`[]`"
    ),
    _honoured("echo", "the text begins with the prompt", **_COMPLETIONS_ONLY),
    _refused(
        "echo",
        "the last message is not repeated; put it in front of the answer",
        special="`false`, or a last message that is not the assistant's",
        is_special=_repeats_nothing,
        **_CHAT_ONLY,
    ),
    _honoured("detokenize", "false: no text; `return_token_ids` gives the tokens"),
    _honoured("skip_special_tokens"),
    _ignored(
        "spaces_between_special_tokens",
        "special tokens are left out, or written as the tokenizer decodes them, spaces and all",
        special="`false` with `skip_special_tokens` false",
        special_effect=Effect.REFUSED,
        is_special=_shows_special_tokens,
    ),
    _honoured("return_token_ids", "token ids of prompt and answer, too"),
    _honoured("return_tokens_as_token_ids", "tokens of log-probabilities as `token_id:7`"),
    _refused_unless_empty(
        "return_prompt_text", "use return_token_ids, and /detokenize", "`false`", **_CHAT_ONLY
    ),
    _ignored("return_token_offsets", "it belongs to vLLM's render routes"),
    _ignored("mm_payload", "it belongs to vLLM's render routes"),
    _ignored("return_mm_kwargs", "it belongs to vLLM's render routes"),
    _ignored("routed_experts_prompt_start", "answers do not name experts"),
)
_SERVICE = (
    _honoured("request_id", "comes back as x-request-id, as that header does; need not be unique"),
    _honoured("cache_salt", "only prompts with the same one share cached blocks"),
    _honoured(
        "priority", "smaller ones are served first; as far from 0 as `--max-priority` allows (0)"
    ),
    _ignored("service_tier", "there is one tier; the answer is the same"),
    _ignored("store", "answers are not stored, and none can be fetched later"),
    _ignored("metadata", "answers are not stored"),
    _ignored("user", "keys tell callers apart"),
    _ignored("safety_identifier", "keys tell callers apart"),
    _ignored("session_id", "requests are routed by their prompts"),
    _ignored(
        "prompt_cache_key", "a prompt is found by its tokens; `cache_salt` keeps callers apart"
    ),
    _ignored("prompt_cache_options", "prompts are cached until their space is needed"),
    _ignored("prompt_cache_retention", "prompts are cached until their space is needed"),
    _refused("kv_transfer_params", "one server computes prompt and answer"),
    _refused("ec_transfer_params", "one server computes prompt and answer"),
)
FIELDS = {
    "Prompt": _PROMPT,
    "Answer": _ANSWER,
    "What comes back": _FORM,
    "The request": _SERVICE,
}
"""By what they are about."""


OTHER_NAMES: Mapping[str, str] = {
    "extra_body": "the openai client sends its content as fields of the request; send those",
    "guided_choice": 'use structured_outputs: {"choice": [...]}',
    "guided_decoding_backend": "there is one",
    "guided_grammar": 'use structured_outputs: {"grammar": "..."}',
    "guided_json": 'use structured_outputs: {"json": ...} or response_format',
    "guided_regex": 'use structured_outputs: {"regex": "..."}',
    "image_url": "this server takes text",
    "images": "this server takes text",
    "input": "use prompt, or messages with /v1/chat/completions",
    "inputs": "use prompt, or messages with /v1/chat/completions",
    "max_length": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "max_output_tokens": "use max_tokens",
    "num_beams": "there is no beam search",
    "stop_sequences": "use stop",
}
"""What was meant by names that neither API has, and what to use here."""


def rules_of(route: str) -> dict[str, FieldRule]:
    """The rules of a route, by the name of the field; none for a route that has no table."""
    return _BY_ROUTE.get(route, {})


def _all() -> Iterator[FieldRule]:
    for several in FIELDS.values():
        yield from several


_BY_ROUTE = {route: {rule.name: rule for rule in _all() if route in rule.routes} for route in _BOTH}


def field_tables() -> Iterator[str]:
    """Lines of docs/reference/request-fields.md: a table a group, and other names."""
    for title, rules in FIELDS.items():
        yield f"### {title}\n"
        yield "| field | completions | chats | |"
        yield "|---|---|---|---|"
        for name in dict.fromkeys(rule.name for rule in rules):
            yield _row(name)
        yield ""
    yield "### Names that neither API has\n"
    yield "| name | what to do |"
    yield "|---|---|"
    for name, hint in OTHER_NAMES.items():
        yield f"| `{name}` | {hint} |"


def _row(name: str) -> str:
    rules = [_BY_ROUTE[route].get(name) for route in _BOTH]
    notes = list(dict.fromkeys(rule.note for rule in rules if rule is not None and rule.note))
    note = notes[0] if len(notes) == 1 else "; in chats: ".join(notes)
    return f"| `{name}` | {_cell(rules[0])} | {_cell(rules[1])} | {note} |"


def _cell(rule: FieldRule | None) -> str:
    return "" if rule is None else rule.effect_in_words
