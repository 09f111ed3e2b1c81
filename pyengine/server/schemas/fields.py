"""The effect of every field of OpenAI's and vLLM's APIs for chats and completions.

The server reads this table; `tools/field_table.py` makes docs/reference/request-fields.md of it.
`requests` has the types of the fields.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain
from typing import Any, TypeAlias

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_ROUTES = (COMPLETIONS, CHAT)

Predicate: TypeAlias = Callable[[Any, Any], bool]
"""A condition on the value of a field and the whole body."""


class Effect(StrEnum):
    """The effect of a field."""

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
    routes: tuple[str, ...] = _ROUTES
    special: str = ""
    special_effect: Effect = Effect.IGNORED
    is_special: Predicate | None = None

    def effect_of(self, value: Any, body: Any) -> Effect:
        """The effect of this value in a request."""
        if self.is_special is not None and self.is_special(value, body):
            return self.special_effect
        return self.effect

    @property
    def effect_in_words(self) -> str:
        """The effect, and that of special values, for documentation."""
        if not self.special:
            return self.effect
        return f"{self.effect}; {self.special}: {self.special_effect}"


def _honoured(name: str, note: str = "", **options: Any) -> FieldRule:
    return FieldRule(name=name, effect=Effect.HONOURED, note=note, **options)


def _ignored(name: str, note: str, **options: Any) -> FieldRule:
    return FieldRule(name=name, effect=Effect.IGNORED, note=note, **options)


def _refused(name: str, note: str, **options: Any) -> FieldRule:
    return FieldRule(name=name, effect=Effect.REFUSED, note=note, **options)


def _refused_unless_empty(name: str, note: str, empty: str, **options: Any) -> FieldRule:
    """Refused, except for its empty value."""
    return _refused(name, note, special=empty, is_special=lambda value, _: not value, **options)


_CHAT_ONLY: Any = {"routes": (CHAT,)}
_COMPLETIONS_ONLY: Any = {"routes": (COMPLETIONS,)}

_PROMPT = (
    _honoured("model", "one of the names in `/v1/models`; optional"),
    _honoured("messages", "a conversation of text", **_CHAT_ONLY),
    _honoured("prompt", "text or token ids, one prompt or a list", **_COMPLETIONS_ONLY),
    _refused("prompt_embeds", "this server accepts text and token ids", **_COMPLETIONS_ONLY),
    _refused_unless_empty("suffix", "infilling is not supported; send a prompt only", '`""`'),
    _honoured(
        "add_special_tokens", "add the tokenizer's special tokens to text", **_COMPLETIONS_ONLY
    ),
    _refused_unless_empty(
        "add_special_tokens",
        "the chat template adds the special tokens; leave it out",
        "`false`",
        **_CHAT_ONLY,
    ),
    _honoured("truncate_prompt_tokens", "the last tokens are kept"),
    _ignored(
        "truncation_side",
        "truncate_prompt_tokens keeps the last tokens",
        special="`right` with `truncate_prompt_tokens`",
        special_effect=Effect.REFUSED,
        is_special=lambda side, body: side == "right" and body.truncate_prompt_tokens is not None,
    ),
    _honoured("add_generation_prompt", "begin a message of the assistant", **_CHAT_ONLY),
    _honoured("continue_final_message", "continue the last message", **_CHAT_ONLY),
    _honoured("chat_template_kwargs", "variables that `--template-variable` allows", **_CHAT_ONLY),
    _refused("chat_template", "requests use the model's template", **_CHAT_ONLY),
    _refused_unless_empty(
        "documents", "put the text of documents into a message", "`[]`", **_CHAT_ONLY
    ),
    _honoured("tools", "functions that the model may call", **_CHAT_ONLY),
    _honoured(
        "tool_choice",
        "auto, none, required, a function of `tools`, or `allowed_tools`",
        special="`auto` without `tools`",
        is_special=lambda choice, body: choice == "auto" and not body.tools,
        **_CHAT_ONLY,
    ),
    _honoured("parallel_tool_calls", "false: at most one call", **_CHAT_ONLY),
    _honoured(
        "functions",
        "the older form of `tools`; the answer has `function_call`",
        special="`[]`",
        is_special=lambda value, _: not value,
        **_CHAT_ONLY,
    ),
    _honoured(
        "function_call",
        "the older form of `tool_choice`",
        special="`none` and `auto` without `functions`",
        is_special=lambda choice, body: choice in ("none", "auto") and not body.functions,
        **_CHAT_ONLY,
    ),
    _honoured(
        "reasoning_effort",
        "for chat templates that read it or `enable_thinking` (off for none, else on); "
        "without effect for others",
        **_CHAT_ONLY,
    ),
    _honoured(
        "verbosity",
        "for chat templates that read it, if `--template-variable` allows it; without effect for "
        "others",
        **_CHAT_ONLY,
    ),
    _ignored("media_io_kwargs", "requests contain text only"),
    _ignored("mm_processor_kwargs", "requests contain text only"),
    _refused("web_search_options", "this server does not search the web", **_CHAT_ONLY),
)
_ANSWER = (
    _honoured("n", "at most `--max-num-seqs`"),
    _refused(
        "best_of",
        "every answer is returned; request n answers and choose the best",
        special="equal to `n`",
        is_special=lambda count, body: count == (body.n or 1),
    ),
    _honoured("max_tokens"),
    _honoured("max_completion_tokens", "another name of `max_tokens`", **_CHAT_ONLY),
    _honoured("min_tokens"),
    _honoured(
        "stop",
        "up to 32",
        special="an empty string",
        is_special=lambda stop, _: not any([stop] if isinstance(stop, str) else stop),
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
    _honoured("speculate", "false: no speculative decoding; the tokens are the same"),
    _honoured("response_format", "text, json_object, json_schema"),
    _honoured("structured_outputs", "one of json, regex, choice, grammar"),
    _refused_unless_empty(
        "use_beam_search", "beam search is not served; use LLM.beam_search", "`false`"
    ),
    _ignored("length_penalty", "it is a parameter of beam search"),
    _refused_unless_empty("watermarking", "answers have no watermark", "`false`"),
    _honoured(
        "thinking_token_budget",
        "then the end of the thinking is forced; for models that mark it; -1: no limit",
    ),
    _refused(
        "repetition_detection",
        "answers do not end at a repetition; use repetition_penalty or max_tokens",
    ),
    _refused_unless_empty("vllm_xargs", "there are no extensions that read it", "`{}`"),
    _ignored("prediction", "a hint for speed; the answer is the same"),
    _ignored(
        "include_reasoning",
        "reasoning is part of the content; set `reasoning_effort` to none for no reasoning",
        **_CHAT_ONLY,
    ),
    _refused(
        "modalities",
        "answers are text",
        special='`["text"]`',
        is_special=lambda value, _: value == ["text"],
    ),
    _refused("audio", "answers are text", **_CHAT_ONLY),
    _refused("moderation", "this server does not moderate", **_CHAT_ONLY),
)
_FORM = (
    _honoured("stream"),
    _honoured(
        "stream_options",
        "`include_usage`, `continuous_usage_stats`; `include_obfuscation` has no effect",
    ),
    _ignored("stream_interval", "each step sends a chunk; the text is the same"),
    _honoured("logprobs", "up to 20", **_COMPLETIONS_ONLY),
    _honoured("logprobs", "true or false", **_CHAT_ONLY),
    _honoured("top_logprobs", "up to 20", **_CHAT_ONLY),
    _honoured("prompt_logprobs", "up to 20"),
    _refused_unless_empty(
        "logprob_token_ids", "use logprobs, which has the most likely tokens", "`[]`"
    ),
    _honoured("echo", "prepend the prompt to the text", **_COMPLETIONS_ONLY),
    _refused(
        "echo",
        "the last message is not repeated; prepend it to the answer",
        special="`false`, or a last message that is not the assistant's",
        is_special=lambda echo, body: not echo or body.messages[-1].get("role") != "assistant",
        **_CHAT_ONLY,
    ),
    _honoured("detokenize", "false: no text; `return_token_ids` gives the tokens"),
    _honoured("skip_special_tokens"),
    _ignored(
        "spaces_between_special_tokens",
        "special tokens are omitted, or decoded by the tokenizer with its spaces",
        special="`false` with `skip_special_tokens` false",
        special_effect=Effect.REFUSED,
        is_special=lambda spaces, body: spaces is False and body.skip_special_tokens is False,
    ),
    _honoured("return_token_ids", "add token ids of prompt and answer"),
    _honoured("return_tokens_as_token_ids", "tokens of log-probabilities as `token_id:7`"),
    _refused_unless_empty(
        "return_prompt_text", "use return_token_ids and /detokenize", "`false`", **_CHAT_ONLY
    ),
    _ignored("return_token_offsets", "it is a field of vLLM's render routes"),
    _ignored("mm_payload", "it is a field of vLLM's render routes"),
    _ignored("return_mm_kwargs", "it is a field of vLLM's render routes"),
    _ignored("routed_experts_prompt_start", "answers do not contain experts"),
)
_SERVICE = (
    _honoured("request_id", "returned as x-request-id, like that header; need not be unique"),
    _honoured("cache_salt", "only prompts with the same salt share cached blocks"),
    _honoured("explain_cache", "say in `usage` why tokens of the prompt were not cached"),
    _honoured(
        "cache_priority",
        "0 to 100: cached blocks of the request are evicted after those of lower ones, within the "
        "key's share of `--max-pinned-share`",
    ),
    _honoured(
        "priority",
        "requests with a lower value run first; `--max-priority` limits its absolute value (0)",
    ),
    _ignored("service_tier", "there is one tier; the answer is the same"),
    _ignored("store", "answers are not stored and cannot be retrieved later"),
    _ignored("metadata", "answers are not stored"),
    _ignored("user", "API keys identify callers"),
    _ignored("safety_identifier", "API keys identify callers"),
    _ignored("session_id", "requests are routed by their prompts"),
    _ignored("prompt_cache_key", "prompts are matched by tokens; `cache_salt` separates callers"),
    _ignored("prompt_cache_options", "prompts are cached until their space is needed"),
    _ignored("prompt_cache_retention", "prompts are cached until their space is needed"),
    _refused("kv_transfer_params", "the same server computes prompt and answer"),
    _refused("ec_transfer_params", "the same server computes prompt and answer"),
)
FIELDS = {"Prompt": _PROMPT, "Answer": _ANSWER, "Response": _FORM, "Request": _SERVICE}
"""Rules by topic."""


OTHER_NAMES: Mapping[str, str] = {
    "extra_body": "the openai client sends its content as fields of the request; send those",
    "guided_choice": 'use structured_outputs: {"choice": [...]}',
    "guided_decoding_backend": "there is only one; leave it out",
    "guided_grammar": 'use structured_outputs: {"grammar": "..."}',
    "guided_json": 'use structured_outputs: {"json": ...} or response_format',
    "guided_regex": 'use structured_outputs: {"regex": "..."}',
    "image_url": "this server accepts text only",
    "images": "this server accepts text only",
    "input": "use prompt, or messages with /v1/chat/completions",
    "inputs": "use prompt, or messages with /v1/chat/completions",
    "logits_processors": "code cannot be sent; use logit_bias, or the Python API",
    "max_length": "use max_tokens",
    "max_new_tokens": "use max_tokens",
    "max_output_tokens": "use max_tokens",
    "num_beams": "beam search is not served; use LLM.beam_search",
    "stop_sequences": "use stop",
    "stop_when": "code cannot be sent; use stop, or the Python API",
    "stopping_criteria": "code cannot be sent; use stop, or the Python API",
}
"""Hints for common field names that neither API has."""


def rules_of(route: str) -> dict[str, FieldRule]:
    """The rules of a route by field name; empty for a route without a table."""
    return _BY_ROUTE.get(route, {})


_BY_ROUTE = {
    route: {rule.name: rule for rule in chain(*FIELDS.values()) if route in rule.routes}
    for route in _ROUTES
}


def field_tables() -> Iterator[str]:
    """Lines of docs/reference/request-fields.md: a table per topic, and one of other names."""
    for title, rules in FIELDS.items():
        yield f"### {title}\n"
        yield "| field | completions | chats | |"
        yield "|---|---|---|---|"
        for name in dict.fromkeys(rule.name for rule in rules):
            yield _row(name)
        yield ""
    yield "### Names that neither API has\n"
    yield "| name | instead |"
    yield "|---|---|"
    for name, hint in OTHER_NAMES.items():
        yield f"| `{name}` | {hint} |"


def _row(name: str) -> str:
    rules = [_BY_ROUTE[route].get(name) for route in _ROUTES]
    notes = list(dict.fromkeys(rule.note for rule in rules if rule is not None and rule.note))
    note = notes[0] if len(notes) == 1 else "; in chats: ".join(notes)
    return f"| `{name}` | {_cell(rules[0])} | {_cell(rules[1])} | {note} |"


def _cell(rule: FieldRule | None) -> str:
    return "" if rule is None else rule.effect_in_words
