"""Slots of adapters: who waits, who passes, which slot is taken."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pyengine.engine.adapters import AdapterSlots, with_adapter
from pyengine.models.adapters import Adapter, AppliedAdapter
from pyengine.request.prompts import Prompt, salt_namespace


def adapter(number: int, **options: Any) -> Adapter:
    matrix = np.full((1, 1), number, np.float32)
    return Adapter({"layer": (matrix, matrix)}, **options)


class Sequence(SimpleNamespace):
    """A sequence that steps may have drafts of."""

    __hash__ = object.__hash__  # type: ignore[assignment]


def sequence(number: int | None, start: int = 0) -> Any:
    """A sequence with an adapter of this number, or of the base."""
    applied = None if number is None else AppliedAdapter(adapter(number), start)
    return Sequence(request=SimpleNamespace(adapter=applied))


def step_of(decodes: list[Any], chunks: list[tuple[Any, int, int]], drafts: Any = None) -> Any:
    entries = [
        SimpleNamespace(sequence=each, start=start, num_tokens=count)
        for each, start, count in chunks
    ]
    sequences = [*decodes, *(each for each, _, _ in chunks)]
    return SimpleNamespace(
        decodes=tuple(decodes), chunks=entries, drafts=drafts or {}, sequences=sequences
    )


def test_one_that_waits_is_not_overtaken_by_others_with_adapters() -> None:
    slots = AdapterSlots(2)
    slots.before_plan(SimpleNamespace(running=[sequence(1), sequence(None)]), None)  # type: ignore[arg-type]
    assert not slots.is_held(sequence(2))
    assert not slots.is_held(sequence(1))
    assert slots.is_held(sequence(3))
    assert slots.is_held(sequence(1))
    assert not slots.is_held(sequence(None))
    slots.before_plan(SimpleNamespace(running=[sequence(2)]), None)  # type: ignore[arg-type]
    assert not slots.is_held(sequence(3))


def test_the_least_recently_used_slot_is_taken() -> None:
    slots = AdapterSlots(2)
    first = slots.of(step_of([sequence(1), sequence(2), sequence(None)], []))
    assert first.slots.tolist() == [0, 1, -1]
    assert slots.of(step_of([sequence(1)], [])).slots.tolist() == [0]
    third = slots.of(step_of([sequence(3), sequence(1)], []))
    assert third.slots.tolist() == [1, 0]
    assert [content.digest for content in third.contents.values()] == [
        adapter(3).digest,
        adapter(1).digest,
    ]


def test_tokens_of_drafts_and_chunks_have_slots() -> None:
    slots, drafting = AdapterSlots(4), sequence(1)
    chunks = [(sequence(2, start=5), 3, 4), (sequence(2, start=9), 0, 3), (sequence(None), 0, 2)]
    step = step_of([drafting, sequence(None)], chunks, {drafting: (7, 8)})
    assert slots.of(step).slots.tolist() == [0, 0, 0, -1, -1, -1, 1, 1, -1, -1, -1, -1, -1]
    assert slots.of(step).slots.dtype == np.int32


@pytest.mark.parametrize(
    ("tokens", "start"),
    [([7, 8, 1, 7, 8, 2], 3), ([7, 8], 0), ([8, 7], None), ([7], None), ([1, 7, 8], 1)],
)
def test_an_activated_adapter_begins_at_its_last_invocation(
    tokens: list[int], start: int | None
) -> None:
    activated = adapter(1, invocation_tokens=(7, 8))
    prompt = Prompt(token_ids=tokens, namespace=b"salt")
    applied = with_adapter(prompt, activated)
    assert activated.start(tokens) == start
    if start is None:
        assert applied == prompt
    else:
        assert applied.adapter is not None and applied.adapter.start == start


def test_blocks_are_found_by_the_content_of_an_adapter_and_the_salt() -> None:
    salts = [None, "a", "b"]
    prompts = [Prompt(token_ids=[9, 1], namespace=salt_namespace(salt)) for salt in salts]
    adapters = [adapter(1), adapter(2), adapter(1, invocation_tokens=(1,))]
    applied = [with_adapter(prompt, each) for prompt in prompts for each in adapters]
    spaces = {(prompt.namespace, prompt.switch) for prompt in (*prompts, *applied)}
    assert len(spaces) == 12
    again = with_adapter(prompts[1], adapter(1))
    assert (again.namespace, again.switch) == (applied[3].namespace, None)
    for prompt in applied:
        name = prompt.namespace if prompt.switch is None else prompt.switch[1]
        with pytest.raises(UnicodeDecodeError):  # no salt is equal
            name.decode()
    for prompt, activated in zip(prompts, applied[2::3], strict=True):
        assert activated.namespace == prompt.namespace
        assert activated.switch is not None and activated.switch[0] == 1
