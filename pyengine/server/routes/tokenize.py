"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from typing import Annotated, Any

from fastapi import APIRouter, Request, Response
from pydantic import Field

from pyengine.errors import InvalidRequestError
from pyengine.request.chat_messages import template_reads
from pyengine.request.chat_template import template_text
from pyengine.request.untrusted_calls import tokenizer_errors
from pyengine.server.callers import caller_of
from pyengine.server.context import Context
from pyengine.server.errors import FieldError
from pyengine.server.routes.chat import chat_options, ignored_of_tools, render
from pyengine.server.routes.generation import encode, unless_gone
from pyengine.server.routes.ignored import check_ignored, ignored_header
from pyengine.server.routes.json_route import JsonRoute
from pyengine.server.routes.template_variables import TemplateVariables
from pyengine.server.schemas.fields import CHAT
from pyengine.server.schemas.requests import ChatOptionFields, ClientModel, Messages
from pyengine.server.schemas.responses import ServerModel

router = APIRouter(route_class=JsonRoute)


class TokenizeRequest(ChatOptionFields):
    """The body of POST /tokenize: a prompt or a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = Field(True, description="as the tokenizer does, to a prompt")
    return_token_strs: bool = Field(False, description="the text of each token, too")


class TokenizeResponse(ServerModel):
    """The response of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeRequest(ClientModel):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], Field(fail_fast=True)]


class DetokenizeResponse(ServerModel):
    """The response of POST /detokenize."""

    prompt: str


@router.post("/tokenize", response_model=TokenizeResponse)
async def tokenize(body: TokenizeRequest, request: Request, context: Context) -> Response:
    """The token ids of a prompt, or of a conversation by the model's chat template."""
    context.check_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise FieldError("prompt", "send either prompt or messages")
    template = template_text(context.engine.tokenizer, has_tools=bool(body.tools))
    variables = TemplateVariables.of(body, template, context.settings)
    ignored = [*variables.ignored, *ignored_of_tools(body.tools or ())]
    if body.tools and not template_reads(template, "tools"):
        ignored.append("tools")
    check_ignored(ignored, CHAT, context.settings)
    headers = ignored_header(ignored)
    options = chat_options(body, variables, context.settings, body.tools, context.longest_text)

    def tokenized(tokenizer: Any) -> str:
        if body.messages is not None:
            ids = render(body.messages, tokenizer, options)
        else:
            text = body.prompt or ""
            ids = encode(context, tokenizer, text, special=body.add_special_tokens)
        texts = tokenizer.convert_ids_to_tokens(ids) if body.return_token_strs else None
        # Serialized on this thread: a million tokens would block the event loop.
        return TokenizeResponse(
            count=len(ids), max_model_len=context.max_model_len, tokens=ids, token_strs=texts
        ).to_json()

    tenant = caller_of(request.scope).tenant
    content = await unless_gone(request, context.tokenizers.run(tokenized, tenant))
    return Response(content, headers=headers, media_type="application/json")


@router.post("/detokenize", response_model=DetokenizeResponse)
async def detokenize(body: DetokenizeRequest, request: Request, context: Context) -> Response:
    """The text of token ids."""
    context.check_model(body.model)

    def decoded(tokenizer: Any) -> str:
        if tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer")
        size = len(tokenizer)  # slow, so only once
        unknown = next((token for token in body.tokens if not 0 <= token < size), None)
        if unknown is not None:
            raise InvalidRequestError(
                f"token id {unknown} is outside the vocabulary of {size} tokens"
            )
        with tokenizer_errors():
            text = str(tokenizer.decode(body.tokens))
        return DetokenizeResponse(prompt=text).to_json()  # on this thread, as it may be long

    tenant = caller_of(request.scope).tenant
    content = await unless_gone(request, context.tokenizers.run(decoded, tenant))
    return Response(content, media_type="application/json")


@router.get("/tokenizer_info")
async def tokenizer_info(request: Request, context: Context) -> dict[str, Any]:
    """The tokenizer's class, vocabulary size, special tokens and chat template."""

    def described(tokenizer: Any) -> dict[str, Any]:
        if tokenizer is None:
            raise InvalidRequestError("this model has no tokenizer")
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return {
            "tokenizer_class": type(tokenizer).__name__,
            "vocab_size": len(tokenizer),
            "model_max_length": context.max_model_len,
            **{name: getattr(tokenizer, name, None) for name in names},
        }

    return await context.tokenizers.run(described, caller_of(request.scope).tenant)
