"""POST /v1/embeddings, /rerank, /score and /classify: texts to vectors, scores and classes."""

from base64 import b64encode
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from fastapi import APIRouter, Request, Response

from pyengine.engine.pooler import Pooler, PoolingRequest, Scoring
from pyengine.pooling_params import PoolingParams
from pyengine.request.prompts import Prompt, parse_prompt, salted
from pyengine.request.request import RequestOptions
from pyengine.server.callers import caller_of
from pyengine.server.context import Context, ServerContext
from pyengine.server.routes.completions import several
from pyengine.server.routes.generation import (
    Call,
    UsageCounter,
    client_id_of,
    encode,
    new_name,
    outputs_of,
    queued,
    responded,
    unless_gone,
)
from pyengine.server.routes.json_route import JsonRoute
from pyengine.server.routes.params import check_priority
from pyengine.server.schemas.pooling import (
    ClassifyRequest,
    Document,
    EmbeddingRequest,
    PoolingFields,
    PoolingResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
)
from pyengine.server.schemas.responses import ServerModel, Usage
from pyengine.server.schemas.slices import items

router = APIRouter(route_class=JsonRoute)

_Text: TypeAlias = str | Sequence[int]
_FIELDS = ("truncate_prompt_tokens", "dimensions", "pooling", "normalize", "use_activation")
"""Fields of `PoolingParams` that have the same name in requests."""


@dataclass(frozen=True, slots=True)
class _Maker:
    """Makes the requests of a call, on a thread with a tokenizer."""

    pooler: Pooler
    params: PoolingParams
    name: str
    options: RequestOptions
    prompts: Callable[[Sequence[_Text]], list[Prompt]]

    def requests(self, task: Any, texts: Sequence[_Text]) -> list[PoolingRequest]:
        """A request for each text."""
        return [
            self.pooler.request(task, prompt, self.params, f"{self.name}-{at}", self.options)
            for at, prompt in enumerate(self.prompts(texts))
        ]

    def scoring(self, first: Sequence[_Text], second: Sequence[_Text]) -> Scoring:
        """The requests for the scores of pairs."""
        pairs = self.prompts(first), self.prompts(second)
        return self.pooler.scoring(*pairs, self.params, self.name, self.options)


@router.post("/v1/embeddings", response_model=PoolingResponse)
async def embeddings(body: EmbeddingRequest, request: Request, context: Context) -> Response:
    """Embed texts, given as text or token ids."""
    texts, pooler = several(body.input), context.engine.pooler

    def written(call: Call, made: list[PoolingRequest], usage: Usage) -> ServerModel:
        def data() -> Iterator[dict[str, Any]]:
            for index, pooling in enumerate(made):
                vector = pooler.embedding(pooling)
                embedding: Any = vector.tolist()
                if body.encoding_format == "base64":
                    embedding = b64encode(vector.astype("<f4").tobytes()).decode()
                yield {"index": index, "object": "embedding", "embedding": embedding}

        return _response(call, "embd", items(len(made), data), usage)

    def made(maker: _Maker) -> list[PoolingRequest]:
        return maker.requests("embed", texts)

    return await _answer(request, context, body, made, lambda made: made, written)


@router.post("/classify", response_model=PoolingResponse)
async def classify(body: ClassifyRequest, request: Request, context: Context) -> Response:
    """Classify texts by the classifier of the model."""
    texts, pooler = several(body.input), context.engine.pooler

    def written(call: Call, made: list[PoolingRequest], usage: Usage) -> ServerModel:
        labels = pooler.classifier.labels

        def data() -> Iterator[dict[str, Any]]:
            for index, pooling in enumerate(made):
                probs = pooler.probabilities(pooling)
                label = labels[int(np.argmax(probs))]
                count = {"num_classes": len(probs)}
                yield {"index": index, "label": label, "probs": probs, **count}

        return _response(call, "classify", items(len(made), data), usage)

    def made(maker: _Maker) -> list[PoolingRequest]:
        return maker.requests("classify", texts)

    return await _answer(request, context, body, made, lambda made: made, written)


@router.post("/score", response_model=PoolingResponse)
@router.post("/v1/score", response_model=PoolingResponse)
async def score(body: ScoreRequest, request: Request, context: Context) -> Response:
    """Score pairs of texts."""
    first, second = several(body.text_1), several(body.text_2)

    def written(call: Call, scoring: Scoring, usage: Usage) -> ServerModel:
        data = [
            {"index": index, "object": "score", "score": value}
            for index, value in enumerate(_scores(context, scoring))
        ]
        return _response(call, "score", data, usage)

    def made(maker: _Maker) -> Scoring:
        return maker.scoring(first, second)

    return await _answer(request, context, body, made, lambda made: made.requests, written)


@router.post("/rerank", response_model=RerankResponse)
@router.post("/v1/rerank", response_model=RerankResponse)
async def rerank(body: RerankRequest, request: Request, context: Context) -> Response:
    """Sort documents by their relevance to a query."""
    texts = [each.text if isinstance(each, Document) else each for each in body.documents]

    def written(call: Call, scoring: Scoring, usage: Usage) -> ServerModel:
        scores = _scores(context, scoring)
        order = sorted(range(len(texts)), key=lambda at: (-scores[at], at))
        results = []
        for at in order[: body.top_n or len(order)]:
            document = {"document": {"text": texts[at]}} if body.return_documents else {}
            results.append({"index": at, **document, "relevance_score": scores[at]})
        return RerankResponse(
            id=f"rerank-{call.name}", model=call.model, results=results, usage=usage
        )

    def made(maker: _Maker) -> Scoring:
        return maker.scoring([body.query], texts)

    return await _answer(request, context, body, made, lambda made: made.requests, written)


def _scores(context: ServerContext, scoring: Scoring) -> list[float]:
    return [context.engine.pooler.score(scoring, pair) for pair in scoring.pairs]


def _response(call: Call, kind: str, data: Any, usage: Usage) -> PoolingResponse:
    return PoolingResponse(
        id=f"{kind}-{call.name}",
        object="list",
        created=call.created,
        model=call.model,
        data=data,
        usage=usage,
    )


async def _answer(
    request: Request,
    context: ServerContext,
    body: PoolingFields,
    made: Callable[[_Maker], Any],
    requests_of: Callable[[Any], list[PoolingRequest]],
    written: Callable[[Call, Any, Usage], ServerModel],
) -> Response:
    """Make the requests of a body on a thread, run them, and write the response."""
    model, caller = context.check_model(body.model), caller_of(request.scope)
    client_id = client_id_of(request, body)
    name, salt = new_name(client_id), context.salt(caller.key, body.cache_salt)
    check_priority(body.priority, caller.max_priority)
    fields = {name: getattr(body, name, None) for name in _FIELDS}
    params = PoolingParams(**{name: value for name, value in fields.items() if value is not None})
    options = RequestOptions(priority=body.priority, tenant=caller.tenant)
    pooler = context.engine.pooler

    def created(tokenizer: Any) -> Any:
        def prompts(texts: Sequence[_Text]) -> list[Prompt]:
            special = body.add_special_tokens
            token_ids = [
                encode(context, tokenizer, text, special=special)
                if isinstance(text, str)
                else list(text)
                for text in texts
            ]
            return [salted(parse_prompt(ids, tokenizer), salt) for ids in token_ids]

        return made(_Maker(pooler, params, name, options, prompts))

    async def run() -> Response:
        result = await context.tokenizers.run(created, caller.tenant)
        requests = [pooling.request for pooling in requests_of(result)]
        call = queued(context, request, (name, client_id, model), requests)
        outputs = await outputs_of(call)
        tally = UsageCounter(call)
        for item in outputs:
            tally.add(item)
        return await responded(call, written(call, result, tally.usage()))

    return await unless_gone(request, run())
