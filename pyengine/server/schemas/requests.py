"""What clients send: the fields of each route and their types.

Names are those of OpenAI's API, and of vLLM where that has more. An unknown field is refused;
`fields` says which of the known ones have no effect. What a sampling parameter may be is checked by
`SamplingParams`; here is what it may weigh: the lengths of lists and texts. Lists are validated up
to the first item that is wrong (`fail_fast`): an error for each of a million items would take
minutes.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field

from pyengine.server.schemas.fields import CHAT, COMPLETIONS, rules_of

MAX_ITEMS = 1024
"""Items of any list in a request, token ids of a prompt aside; also n times the prompts."""
MAX_STOPS = 32
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

Messages: TypeAlias = Annotated[
    list[dict[str, Any]], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)
]


class ClientModel(BaseModel):
    """Of what clients send: types as they are, no unknown fields."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _inert(name: str, route: str = COMPLETIONS) -> Any:
    """A field that is known and has no effect, or none for some of its values."""
    rule = rules_of(route)[name]
    return Field(None, description=f"{rule.effect_in_words}: {rule.note}")


class StreamOptions(ClientModel):
    """What a stream holds beside the answer."""

    include_usage: bool = Field(False, description="a last item with the usage")
    continuous_usage_stats: bool = Field(False, description="the usage in every item")
    include_obfuscation: bool | None = Field(None, description="without effect: nothing is padded")


class JsonSchema(ClientModel):
    """A schema as OpenAI's API names it. The answer follows it, whatever `strict` says."""

    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(ClientModel):
    """The form of an answer, as OpenAI's API has it."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputFields(ClientModel):
    """The form of an answer: exactly one of these, as in `StructuredOutputs`."""

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class InertFields(ClientModel):
    """Fields that have no effect here, whatever their value or for some of them."""

    best_of: int | None = _inert("best_of")
    length_penalty: float | None = _inert("length_penalty")
    logprob_token_ids: Ids | None = _inert("logprob_token_ids")
    media_io_kwargs: dict[str, Any] | None = _inert("media_io_kwargs")
    metadata: dict[str, str] | None = _inert("metadata")
    mm_payload: str | None = _inert("mm_payload")
    mm_processor_kwargs: dict[str, Any] | None = _inert("mm_processor_kwargs")
    modalities: Annotated[list[str], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = _inert(
        "modalities"
    )
    prediction: dict[str, Any] | None = _inert("prediction")
    prompt_cache_key: str | None = _inert("prompt_cache_key")
    prompt_cache_options: dict[str, Any] | None = _inert("prompt_cache_options")
    prompt_cache_retention: str | None = _inert("prompt_cache_retention")
    return_mm_kwargs: bool | None = _inert("return_mm_kwargs")
    return_token_offsets: bool | None = _inert("return_token_offsets")
    routed_experts_prompt_start: int | None = _inert("routed_experts_prompt_start")
    safety_identifier: str | None = _inert("safety_identifier")
    service_tier: str | None = _inert("service_tier")
    session_id: str | None = _inert("session_id")
    spaces_between_special_tokens: bool | None = _inert("spaces_between_special_tokens")
    store: bool | None = _inert("store")
    stream_interval: int | None = _inert("stream_interval")
    suffix: str | None = _inert("suffix")
    truncation_side: Literal["left", "right"] | None = _inert("truncation_side")
    use_beam_search: bool | None = _inert("use_beam_search")
    user: str | None = _inert("user")
    vllm_xargs: dict[str, Any] | None = _inert("vllm_xargs")
    watermarking: bool | None = _inert("watermarking")


class SamplingFields(InertFields):
    """What completions and chats have in common: the fields of `SamplingParams`, and the request's.

    What is left out or null is as the model's own configuration or `SamplingParams` has it.
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
    detokenize: bool | None = Field(None, description="false: no text, token ids alone")
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[Text], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    allowed_token_ids: Ids | None = None
    truncate_prompt_tokens: int | None = None
    speculate: bool | None = Field(None, description="whether drafts may be tried; the same tokens")
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputFields | None = None

    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = Field(None, description="token ids of prompt and answer, too")
    return_tokens_as_token_ids: bool | None = Field(
        None, description="tokens of log-probabilities as `token_id:7`"
    )
    request_id: RequestId | None = Field(
        None, description="comes back as x-request-id, as that header does; need not be unique"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="only prompts with the same salt share cached blocks"
    )
    priority: float = Field(0, description="smaller ones are served first")


class CompletionRequest(SamplingFields):
    """The body of POST /v1/completions."""

    prompt: Prompts
    logprobs: TopLogprobs | None = None
    echo: bool | None = Field(None, description="the text begins with the prompt")
    add_special_tokens: bool = Field(True, description="as the tokenizer does, to prompts of text")


class Function(ClientModel):
    """A function that the model may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ClientModel):
    """A tool that the model may use: a function."""

    type: Literal["function"]
    function: Function


class ChatOptionFields(ClientModel):
    """How a conversation becomes a prompt."""

    add_generation_prompt: bool | None = Field(
        None, description="begin the assistant's turn; true, but with continue_final_message"
    )
    continue_final_message: bool = Field(False, description="go on with the last message")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="variables of the chat template, those that the server allows"
    )
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        Field(None, description="for the model's chat template, if that reads it")
    )
    verbosity: Literal["low", "medium", "high"] | None = Field(
        None, description="for the model's chat template, if that reads it and the server lets it"
    )


class ChatCompletionRequest(SamplingFields, ChatOptionFields):
    """The body of POST /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None

    add_special_tokens: bool | None = _inert("add_special_tokens", CHAT)
    documents: Annotated[list[Any], Field(max_length=MAX_ITEMS)] | None = _inert("documents", CHAT)
    echo: bool | None = _inert("echo", CHAT)
    function_call: str | dict[str, Any] | None = _inert("function_call", CHAT)
    functions: Annotated[list[Any], Field(max_length=MAX_ITEMS)] | None = _inert("functions", CHAT)
    include_reasoning: bool | None = _inert("include_reasoning", CHAT)
    return_prompt_text: bool | None = _inert("return_prompt_text", CHAT)
