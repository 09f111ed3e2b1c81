"""Items of a body are counted before parsing, and validation stops at the first error."""

import asyncio
import json
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pyengine.server.errors import ApiError
from pyengine.server.routes import json_route
from pyengine.server.routes.control import AbortRequest, LoadLoRAAdapter, UnloadLoRAAdapter
from pyengine.server.routes.json_route import MAX_FIELDS, MAX_OTHER_ITEMS, check_counts, check_items
from pyengine.server.routes.tokenize import DetokenizeRequest, TokenizeRequest
from pyengine.server.routes.weights import UpdateWeights
from pyengine.server.schemas.pooling import (
    ClassifyRequest,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
)
from pyengine.server.schemas.requests import ChatCompletionRequest, ClientModel, CompletionRequest

texts = st.text(st.sampled_from('"\\{}[],: a\n/é'), max_size=20)
plain = st.none() | st.booleans() | st.integers() | texts
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(texts, inner))


def size_of(value: Any) -> tuple[int, int, int]:
    """Objects and lists, texts, commas: counted in what was read."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, dict | list):
        return 0, 0, 0
    several = [*value, *value.values()] if isinstance(value, dict) else value
    sizes = [size_of(body) for body in several]
    own = (1, 0, max(0, len(value) - 1))
    return tuple(map(sum, zip(own, *sizes, strict=True)))  # type: ignore[return-value]


@given(values, st.integers(1, 9))
def test_counts_are_those_of_what_is_read(value: Any, slice: int) -> None:
    """However texts, escapes and slices meet."""
    body = json.dumps(value, ensure_ascii=False).encode()
    counts = size_of(value)

    def passes(limits: tuple[int, int, int]) -> bool:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(json_route, "SLICE", slice)
            patch.setattr(json_route, "MAX_CONTAINERS", limits[0])
            # A slice may end within a text, which then counts twice at most.
            patch.setattr(json_route, "MAX_STRINGS", limits[1])
            try:
                asyncio.run(check_counts(body, limits[2]))
            except ApiError as error:
                assert error.status_code == 400
                return False
            return True

    containers, num_texts, commas = counts
    max_texts = 2 * num_texts
    assert passes((containers, max_texts, commas))
    if containers:
        assert not passes((containers - 1, max_texts, commas))
    if commas:
        assert not passes((containers, max_texts, commas - 1))
    if num_texts:
        assert not passes((containers, num_texts - 1, commas))


MODELS: list[type[ClientModel]] = [
    CompletionRequest,
    ChatCompletionRequest,
    TokenizeRequest,
    DetokenizeRequest,
    AbortRequest,
    UpdateWeights,
    LoadLoRAAdapter,
    UnloadLoRAAdapter,
    EmbeddingRequest,
    RerankRequest,
    ScoreRequest,
    ClassifyRequest,
]
MANY = 50_000
WRONG: dict[str, Any] = {
    "objects": [{}] * MANY,
    "lists": [[]] * MANY,
    "nulls": [None] * MANY,
    "texts": [""] * MANY,
    "numbers": [1.5] * MANY,
    "late": [*range(MANY), {}],
    "lists that end badly": [[5, {}]] * MANY,
}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_no_list_has_an_error_for_each_of_its_items(model: type[ClientModel]) -> None:
    """For every field of every route, also those that are added later."""
    for name, field in model.model_fields.items():
        for value in WRONG.values():
            try:
                model.model_validate({field.alias or name: value})
            except ValidationError as error:
                of_field = [
                    error_of_field
                    for error_of_field in error.errors()
                    if name in error_of_field["loc"]
                ]
                assert len(of_field) < 32, name


def test_objects_have_no_more_fields_than_can_be_validated() -> None:
    check_items({"a": dict.fromkeys(range(MAX_FIELDS))})
    for field in (
        {"a": dict.fromkeys(range(MAX_FIELDS + 1))},
        {"a": [[dict.fromkeys(range(MAX_FIELDS + 1))]]},
        dict.fromkeys(map(str, range(MAX_FIELDS + 1))),
    ):
        with pytest.raises(ApiError, match="fields in one object"):
            check_items(field)


def test_prompts_may_be_longer_than_anything_else() -> None:
    check_items({"prompt": [5] * (MAX_OTHER_ITEMS + 1), "tokens": [5] * (MAX_OTHER_ITEMS + 1)})
    for body in ({"stop": [5] * (MAX_OTHER_ITEMS + 1)}, {"stop": [[5] * 1000] * 100}):
        with pytest.raises(ApiError, match="beside the prompt"):
            check_items(body)


def test_every_model_of_a_route_is_looked_at() -> None:
    from pyengine.server import app

    bodies = {
        field.field_info.annotation
        for router in app._ROUTERS
        for route in router.routes
        if (field := getattr(route, "body_field", None)) is not None
    }
    assert bodies == set(MODELS) and not [body for body in bodies if get_args(body)]
