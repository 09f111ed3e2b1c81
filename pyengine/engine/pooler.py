"""Requests that embed, classify or score texts, and their results."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.engine.input_processor import InputProcessor
from pyengine.errors import EngineClosedError, InvalidRequestError
from pyengine.models.pooling import Classifier, PoolingConfig
from pyengine.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from pyengine.pooling_params import PoolingParams
from pyengine.request.prompts import Prompt
from pyengine.request.request import Request, RequestOptions
from pyengine.sampling_params import SamplingParams

PoolingTask: TypeAlias = Literal["embed", "classify"]

_DEFAULTS = PoolingParams()
_NO_OPTIONS = RequestOptions()


@dataclass(frozen=True, slots=True)
class PoolingRequest:
    """A request for one pooled hidden state, and its parameters."""

    request: Request
    params: PoolingParams


@dataclass(frozen=True, slots=True)
class Scoring:
    """The requests that give the scores of pairs.

    `pairs` are the positions of their requests: one for a pair that is classified as a whole, two
    for a pair of embeddings.
    """

    requests: list[PoolingRequest]
    pairs: list[tuple[int, ...]]


class Pooler:
    """Makes requests without output from texts, and embeddings, classes and scores of them."""

    def __init__(self, config: PoolingConfig, hidden_size: int, processor: InputProcessor) -> None:
        self._config, self._hidden_size, self._processor = config, hidden_size, processor

    @property
    def classifier(self) -> Classifier:
        """The model's classifier. Raises `InvalidRequestError` if it has none."""
        if self._config.classifier is None:
            raise InvalidRequestError(
                "this model has no classifier: only models of a class "
                "...ForSequenceClassification have one"
            )
        return self._config.classifier

    def request(
        self,
        task: PoolingTask,
        prompt: Prompt,
        params: PoolingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions = _NO_OPTIONS,
    ) -> PoolingRequest:
        """A checked request for the embedding or the classes of a prompt.

        Raises `InvalidRequestError` if it cannot be served.
        """
        params = params or _DEFAULTS
        pooling = params.pooling or self._config.pooling
        if task == "classify":
            self._check_classifies(params)
            pooling = "last"
        elif params.use_activation is not None:
            raise InvalidRequestError("use_activation is for classes: leave it out for embeddings")
        if params.dimensions is not None and params.dimensions > self._hidden_size:
            raise InvalidRequestError(
                f"dimensions={params.dimensions}: this model's embeddings have {self._hidden_size}"
            )
        sampling = SamplingParams(
            max_tokens=0,
            temperature=0,
            detokenize=False,
            truncate_prompt_tokens=params.truncate_prompt_tokens,
        )
        options = replace(options, pooling=pooling)
        request = self._processor.request(request_id, prompt, sampling, options)
        return PoolingRequest(request, params)

    def _check_classifies(self, params: PoolingParams) -> None:
        _ = self.classifier
        for name in ("pooling", "normalize", "dimensions"):
            if getattr(params, name) is not None:
                raise InvalidRequestError(
                    f"{name}={getattr(params, name)!r} is for embeddings: classes are those of the "
                    "last token's hidden state"
                )

    def scoring(
        self,
        first: Sequence[Prompt],
        second: Sequence[Prompt],
        params: PoolingParams | None = None,
        request_id: str | None = None,
        options: RequestOptions = _NO_OPTIONS,
    ) -> Scoring:
        """The requests that score each pair of `first`, one prompt or N, and `second`, N.

        A model with a classifier of one label reads both texts of a pair, the first one first.
        Other scores are the cosine of two embeddings. Raises `InvalidRequestError`.
        """
        if len(first) not in (1, len(second)):
            raise InvalidRequestError(
                f"{len(first)} texts cannot be scored with {len(second)}: give one for all of "
                "them, or one for each"
            )
        if not second:
            raise InvalidRequestError("there is no text to score with: give at least one")
        firsts = range(len(first)) if len(first) == len(second) else [0] * len(second)
        pairs: list[tuple[int, ...]]
        task: PoolingTask
        if self._config.classifier is not None:
            self._check_scores(self._config.classifier)
            prompts = [_joined(first[one], second[at]) for at, one in enumerate(firsts)]
            pairs, task = [(at,) for at in range(len(prompts))], "classify"
        else:
            prompts, task = [*first, *second], "embed"
            pairs = [(one, len(first) + at) for at, one in enumerate(firsts)]
        requests = []
        for at, prompt in enumerate(prompts):
            name = None if request_id is None else f"{request_id}-{at}"
            requests.append(self.request(task, prompt, params, name, options))
        return Scoring(requests, pairs)

    @staticmethod
    def _check_scores(classifier: Classifier) -> None:
        if len(classifier.labels) != 1:
            raise InvalidRequestError(
                f"this model classifies with {len(classifier.labels)} labels, and a score needs "
                "one: use `classify`"
            )

    def embedding(self, request: PoolingRequest) -> npt.NDArray[np.float32]:
        """The embedding of a finished request: float32 `[dimensions]`."""
        params = request.params
        vector = _state(request.request)[: params.dimensions]
        normalizes = self._config.normalize if params.normalize is None else params.normalize
        return _normalized(vector) if normalizes else vector

    def probabilities(self, request: PoolingRequest) -> list[float]:
        """The probabilities of the classes, for a finished request."""
        classifier, state = self.classifier, _state(request.request)
        if request.params.use_activation is False:
            return [float(logit) for logit in classifier.logits(state)]
        return [float(share) for share in classifier.probabilities(state)]

    def score(self, scoring: Scoring, pair: tuple[int, ...]) -> float:
        """The score of a pair, for finished requests."""
        if len(pair) == 1:
            return self.probabilities(scoring.requests[pair[0]])[0]
        states = [self.embedding(scoring.requests[at]) for at in pair]
        one, other = (_normalized(state).astype(np.float64) for state in states)
        return float(one @ other)

    def embedded(self, request: PoolingRequest) -> EmbeddingRequestOutput:
        """The output of a finished request for an embedding."""
        output = EmbeddingOutput(self.embedding(request).tolist())
        return EmbeddingRequestOutput(outputs=output, **_about([request.request]))

    def classified(self, request: PoolingRequest) -> ClassificationRequestOutput:
        """The output of a finished request for classes."""
        output = ClassificationOutput(self.probabilities(request))
        return ClassificationRequestOutput(outputs=output, **_about([request.request]))

    def scored(self, scoring: Scoring) -> list[ScoringRequestOutput]:
        """The outputs of pairs, for finished requests."""
        return [
            ScoringRequestOutput(
                outputs=ScoringOutput(self.score(scoring, pair)),
                **_about([scoring.requests[at].request for at in pair]),
            )
            for pair in scoring.pairs
        ]


def _joined(first: Prompt, second: Prompt) -> Prompt:
    """Both texts of a pair as one prompt, as the tokenizers of causal models join pairs."""
    return replace(first, text=None, token_ids=[*first.token_ids, *second.token_ids])


def _state(request: Request) -> npt.NDArray[np.float32]:
    states = request.prompt_states
    result = None if states is None else states.result
    if result is None:
        raise EngineClosedError("the request was aborted before its prompt was computed")
    return result


def _normalized(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A vector of length 1; zeros stay zeros."""
    wide = vector.astype(np.float64)
    length = float(np.sqrt(wide @ wide))
    unit: npt.NDArray[np.float32] = (wide / max(length, 1e-12)).astype(np.float32)
    return unit


def _about(requests: Sequence[Request]) -> dict[str, Any]:
    """The fields of an output that say what it is of."""
    return {
        "request_id": requests[-1].request_id,
        "prompt_token_ids": [int(token) for each in requests for token in each.prompt_token_ids],
        "num_cached_tokens": sum([each.progress.num_cached_tokens for each in requests]),
    }
