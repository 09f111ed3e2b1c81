"""Bodies and responses of embeddings, scores, rankings and classes.

Names are those of OpenAI's API, of Jina's and Cohere's rankings, and of vLLM's additions.
"""

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, SkipValidation

from pyengine.server.schemas.requests import MAX_ITEMS, ClientModel, PromptIds, Prompts, RequestId
from pyengine.server.schemas.responses import ServerModel, Usage

Texts: TypeAlias = Annotated[list[str], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class PoolingFields(ClientModel):
    """Fields of all these routes."""

    model: str | None = None
    add_special_tokens: bool = Field(True, description="add the tokenizer's special tokens to text")
    truncate_prompt_tokens: int | None = Field(
        None, description="keep this many tokens at the end of a text"
    )
    request_id: RequestId | None = Field(
        None, description="returned as x-request-id, like that header; need not be unique"
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=1024)] | None = Field(
        None, description="only prompts with the same salt share cached blocks"
    )
    priority: float = Field(0, description="requests with a lower value run first")
    user: str | None = Field(None, description="without effect")


class EmbeddingFields(PoolingFields):
    """Fields of embeddings, and of scores by them: see `PoolingParams`."""

    dimensions: int | None = None
    pooling: str | None = None


class EmbeddingRequest(EmbeddingFields):
    """The body of POST /v1/embeddings."""

    input: Prompts
    encoding_format: Literal["float", "base64"] = Field(
        "float", description="base64: float32, little-endian"
    )
    normalize: bool | None = None


class ScoreRequest(EmbeddingFields):
    """The body of POST /score: one text and N, or N pairs."""

    text_1: str | PromptIds | Texts
    text_2: str | PromptIds | Texts


class Document(ClientModel):
    """A document as an object."""

    text: str


class RerankRequest(EmbeddingFields):
    """The body of POST /rerank."""

    query: str
    documents: (
        Texts | Annotated[list[Document], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]
    )
    top_n: Annotated[int, Field(ge=0)] | None = Field(
        None, description="the most relevant documents only; 0: all"
    )
    return_documents: bool = Field(True, description="repeat the documents in the results")


class ClassifyRequest(PoolingFields):
    """The body of POST /classify."""

    input: Prompts
    use_activation: bool | None = Field(None, description="false: logits, not probabilities")


class PoolingResponse(ServerModel):
    """The response of these routes but rankings. The items of `data` are as vLLM has them."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: SkipValidation[list[dict[str, Any]]]
    usage: Usage


class RerankResponse(ServerModel):
    """A ranking: the items of `results` are sorted by `relevance_score`, the largest first."""

    id: str
    model: str
    results: SkipValidation[list[dict[str, Any]]]
    usage: Usage
