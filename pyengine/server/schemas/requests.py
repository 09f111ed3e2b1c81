"""Request bodies: the fields of each route and their types.

Names are those of OpenAI's API and of vLLM's additions. Unknown fields are refused; `fields` lists
the effect of the known ones. `SamplingParams` checks the values of sampling parameters; this module
limits the lengths of lists and texts. Validation of a list stops at the first wrong item
(`fail_fast`), because a million errors would take minutes.
"""

import reprlib
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from pyengine.server.schemas.fields import CHAT, COMPLETIONS, rules_of

MAX_ITEMS = 1024
"""Items of any list in a request, except token ids of a prompt; also n times the prompts."""
MAX_STOPS = 32
MAX_WORD_CHARACTERS = 1 << 16
"""Characters of all `bad_words` of a request."""
MAX_TOP_LOGPROBS = 20

Text: TypeAlias = Annotated[str, Field(min_length=1, max_length=1024)]
StopText: TypeAlias = Annotated[str, Field(max_length=1024)]
Stops: TypeAlias = Annotated[list[StopText], Field(max_length=MAX_STOPS, fail_fast=True)]
Ids: TypeAlias = Annotated[list[int], Field(max_length=MAX_ITEMS, fail_fast=True)]
TopLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
RequestId: TypeAlias = Annotated[str, Field(pattern=r"^[!-~]{1,200}$")]
PromptIds: TypeAlias = Annotated[list[int], Field(min_length=1, fail_fast=True)]
Prompts: TypeAlias = (
    str
    | PromptIds
    | Annotated[list[str], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
)

Messages: TypeAlias = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
"""Their number is limited by the items of a body and by the context length."""


class ClientModel(BaseModel):
    """Base of request models: strict types, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, fields: Any) -> Any:
        """Leave out fields set to null, which clients send for fields that they do not set."""
        if not isinstance(fields, dict):
            return fields
        return {name: value for name, value in fields.items() if value is not None}


def _ignored_field(name: str, route: str = COMPLETIONS) -> Any:
    """A known field without effect, or without effect for some values."""
    rule = rules_of(route)[name]
    return Field(None, description=f"{rule.effect_in_words}: {rule.note}")


class StreamOptions(ClientModel):
    """Additional content of a stream."""

    include_usage: bool = Field(False, description="a last chunk with the usage")
    continuous_usage_stats: bool = Field(False, description="the usage in every chunk")
    include_obfuscation: bool | None = Field(
        None, description="without effect: chunks have no padding"
    )


class JsonSchema(ClientModel):
    """A JSON schema as in OpenAI's API. It is enforced regardless of `strict`."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(ClientModel):
    """The required form of an answer, as in OpenAI's API."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputFields(ClientModel):
    """The required form of an answer: exactly one of these, as in `StructuredOutputs`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class IgnoredFields(ClientModel):
    """Fields without effect, for all or some of their values."""

    best_of: int | None = _ignored_field("best_of")
    length_penalty: float | None = _ignored_field("length_penalty")
    logprob_token_ids: Ids | None = _ignored_field("logprob_token_ids")
    media_io_kwargs: dict[str, Any] | None = _ignored_field("media_io_kwargs")
    metadata: dict[str, str] | None = _ignored_field("metadata")
    mm_payload: str | None = _ignored_field("mm_payload")
    mm_processor_kwargs: dict[str, Any] | None = _ignored_field("mm_processor_kwargs")
    modalities: Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = (
        _ignored_field("modalities")
    )
    prediction: dict[str, Any] | None = _ignored_field("prediction")
    prompt_cache_key: str | None = _ignored_field("prompt_cache_key")
    prompt_cache_options: dict[str, Any] | None = _ignored_field("prompt_cache_options")
    prompt_cache_retention: str | None = _ignored_field("prompt_cache_retention")
    return_mm_kwargs: bool | None = _ignored_field("return_mm_kwargs")
    return_token_offsets: bool | None = _ignored_field("return_token_offsets")
    routed_experts_prompt_start: int | None = _ignored_field("routed_experts_prompt_start")
    safety_identifier: str | None = _ignored_field("safety_identifier")
    service_tier: str | None = _ignored_field("service_tier")
    session_id: str | None = _ignored_field("session_id")
    spaces_between_special_tokens: bool | None = _ignored_field("spaces_between_special_tokens")
    store: bool | None = _ignored_field("store")
    stream_interval: int | None = _ignored_field("stream_interval")
    suffix: str | None = _ignored_field("suffix")
    truncation_side: Literal["left", "right"] | None = _ignored_field("truncation_side")
    use_beam_search: bool | None = _ignored_field("use_beam_search")
    user: str | None = _ignored_field("user")
    vllm_xargs: dict[str, Any] | None = _ignored_field("vllm_xargs")
    watermarking: bool | None = _ignored_field("watermarking")


class SamplingFields(IgnoredFields):
    """Fields of completions and chats: sampling parameters, and fields of the request.

    Defaults come from the model's generation config, then from `SamplingParams`.
    """

    model: str | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_ITEMS)
    seed: int | None = None
    stop: StopText | Stops | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    prompt_logprobs: TopLogprobs | None = None
    detokenize: bool | None = Field(None, description="false: token ids only, no text")
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Text], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    allowed_token_ids: Ids | None = None
    thinking_token_budget: int | None = None
    truncate_prompt_tokens: int | None = None
    speculate: bool | None = Field(None, description="false: no speculative decoding; same tokens")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputFields | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="add token ids of prompt and answer")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="tokens of log-probabilities as `token_id:7`"
    )
    request_id: RequestId | None = Field(
        None, description="returned as x-request-id, like that header; need not be unique"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="only prompts with the same salt share cached blocks"
    )
    cache_priority: int | None = Field(
        None, description="0 to 100: higher ones are evicted later, within the key's share"
    )
    explain_cache: bool | None = Field(
        None, description="say in `usage` why tokens of the prompt were not cached"
    )
    priority: float = Field(0, description="requests with a lower value run first")


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: Prompts
    logprobs: TopLogprobs | None = None
    echo: bool | None = Field(None, description="prepend the prompt to the text")
    add_special_tokens: bool = Field(True, description="add the tokenizer's special tokens to text")


class Function(ClientModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    cache_control: dict[str, Any] | None = Field(None, description="without effect")


class Tool(ClientModel):
    """A tool that the model may call: a function."""

    type: Literal["function"]
    function: Function
    cache_control: dict[str, Any] | None = Field(None, description="without effect")

    @model_validator(mode="before")
    @classmethod
    def _is_function(cls, fields: Any) -> Any:
        kind = fields.get("type") if isinstance(fields, dict) else None
        if kind is None or kind == "function":
            return fields
        raise PydanticCustomError(
            "unsupported_tool",
            "tools of type {kind} are not supported, and nothing was run: describe a tool as a "
            "function, and its free text as a parameter of type string",
            {"kind": reprlib.repr(kind)},
        )


class ChatOptionFields(ClientModel):
    """Options of rendering a conversation as a prompt."""

    add_generation_prompt: bool | None = Field(
        None, description="begin a message of the assistant; default: not continue_final_message"
    )
    continue_final_message: bool = Field(False, description="continue the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template; the server has an allow-list"
    )
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(None, description="for chat templates that read it")
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="for chat templates that read it, if the server allows it"
    )


class ChatCompletionRequest(SamplingFields, ChatOptionFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    add_special_tokens: bool | None = _ignored_field("add_special_tokens", CHAT)
    documents: Annotated[list[Any], Field(max_length=MAX_ITEMS)] | None = _ignored_field(
        "documents", CHAT
    )
    echo: bool | None = _ignored_field("echo", CHAT)
    function_call: str | dict[str, Any] | None = Field(
        None, description="the older form of tool_choice"
    )
    functions: Annotated[list[Function], Field(max_length=128, fail_fast=True)] | None = Field(
        None, description="the older form of tools"
    )
    include_reasoning: bool | None = _ignored_field("include_reasoning", CHAT)
    return_prompt_text: bool | None = _ignored_field("return_prompt_text", CHAT)
