"""Namespaces, images and embeddings, and events in vLLM's classes."""

from types import SimpleNamespace
from typing import Any

import pytest

from pyengine.integrations.vllm_keys import FIRST_PSEUDO_TOKEN, PseudoTokens, namespace_of
from tests.support.vllm_fakes import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Request,
    RequestStatus,
    image,
)
from tests.unit.integrations.test_vllm_manager import admit, decode, held, make

ADAPTER = SimpleNamespace(lora_name="poet", adapter_id=3)


def hit(manager: Any, *tokens: int, **more: Any) -> int:
    return int(manager.get_computed_blocks(Request("asks", list(tokens), **more))[1])


def test_adapters_and_salts_separate() -> None:
    prompt = list(range(9))
    names = [
        namespace_of(Request("r", prompt, lora_request=adapter, cache_salt=salt))
        for adapter in (None, ADAPTER)
        for salt in (None, "a", "null", "x" * 100_000, "x" * 100_001)
    ]
    assert len(set(names)) == len(names)
    assert names[0] == b""
    assert max(map(len, names)) <= 4096
    manager = make()
    admit(manager, Request("a", prompt, cache_salt="a"))
    assert (hit(manager, *prompt), hit(manager, *prompt, cache_salt="b")) == (0, 0)
    assert hit(manager, *prompt, cache_salt="a") == 8


def test_images_separate_and_what_is_before_them_is_shared() -> None:
    manager = make()
    prompt = [1, 2, 3, 4, 7, 7, 7, 7, 7, 5, 6, 8, 9]
    admit(manager, Request("a", list(prompt), mm_features=[image("cat", 4, 5)]))
    assert hit(manager, *prompt, mm_features=[image("cat", 4, 5)]) == 12
    assert hit(manager, *prompt, mm_features=[image("dog", 4, 5)]) == 4
    assert hit(manager, *prompt) == 4
    assert hit(manager, *prompt, mm_features=[image("cat", 5, 4)]) == 4


def test_a_table_of_images_that_is_full_makes_requests_stay_alone() -> None:
    manager = make()
    manager.tables.images.limit = 3
    prompt = [1, 2, 3, 4, 7, 7, 7, 7, 7]
    first = Request("a", list(prompt), mm_features=[image("cat", 4, 4)])
    admit(manager, first)
    second = Request("b", list(prompt), mm_features=[image("dog", 4, 5)])
    third = Request("c", list(prompt), mm_features=[image("cow", 4, 5)])
    for request in (second, third):
        assert manager.get_computed_blocks(request)[1] == (4 if request is second else 0)
        admit(manager, request)
        decode(manager, request)
    for request in (first, second, third):
        manager.free(request)
    assert held(manager) == 0
    assert manager.reset_prefix_cache()
    assert len(manager.tables.images) == 0


def test_numbers_of_images_are_above_all_tokens() -> None:
    images = PseudoTokens(block_size=4)
    request = Request("a", list(range(10)), mm_features=[image("cat", 2, 4)])
    tokens = images.tokens(request, 0, 10)
    assert [token for token in tokens if token < FIRST_PSEUDO_TOKEN] == [0, 1, 6, 7, 8, 9]
    assert images.tokens(request, 3, 6) == tokens[3:6]
    placeholder = images.placeholder(tokens[4])
    assert placeholder is not None
    assert (placeholder.identifier, placeholder.offset, placeholder.token) == ("cat", -2, 4)
    assert images.placeholder(5) is None


def test_embeddings_are_never_shared() -> None:
    manager = make()
    first = Request("a", [0] * 9, prompt_embeds=object())
    admit(manager, first)
    for _ in range(8):
        decode(manager, first)
    assert hit(manager, *([0] * 9), prompt_embeds=object()) == 0
    assert hit(manager, *([0] * 9)) == 0
    manager.free(first)
    manager.take_new_block_ids()
    assert manager.tables.kv.usage().evictable == 0


def test_events_speak_of_contents() -> None:
    manager = make(num_blocks=7, enable_kv_cache_events=True)
    first = Request("a", list(range(9)), lora_request=ADAPTER, cache_salt="s")
    admit(manager, first)
    [stored] = manager.take_events()
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.block_size) == (list(range(8)), 4)
    assert (stored.parent_block_hash, len(stored.block_hashes)) == (None, 2)
    assert (stored.lora_name, stored.lora_id, stored.medium) == ("poet", 3, "GPU")
    assert stored.extra_keys == [("poet", "s"), ("poet",)]
    assert (stored.group_idx, stored.kv_cache_spec_kind) == (0, "full_attention")
    decode(manager, first), decode(manager, first), decode(manager, first)
    [more] = manager.take_events()
    assert more.parent_block_hash == stored.block_hashes[1]
    manager.free(first)
    assert manager.take_events() == []
    other = Request("b", [70] * 20, status=RequestStatus.WAITING)
    admit(manager, other)
    events = manager.take_events()
    removed = [event for event in events if isinstance(event, BlockRemoved)]
    gone = [name for event in removed for name in event.block_hashes]
    assert set(gone) < {*stored.block_hashes, *more.block_hashes}
    assert len(gone) == len(set(gone)) == 2
    manager.free(other)
    manager.reset_prefix_cache()
    assert isinstance(manager.take_events()[-1], AllBlocksCleared)


def test_events_of_images_have_vllms_tokens_and_keys() -> None:
    manager = make(enable_kv_cache_events=True)
    prompt = [1, 2, 7, 7, 7, 5, 6, 8, 9]
    admit(manager, Request("a", list(prompt), mm_features=[image("cat", 2, 3)]))
    [stored] = manager.take_events()
    assert stored.token_ids == prompt[:8]
    assert stored.extra_keys == [(("cat", 2),), (("cat", -2),)]


def test_events_name_the_session_that_caused_them() -> None:
    manager = make(enable_kv_cache_events=True)
    admit(manager, Request("a", list(range(9)), session_id="first"))
    admit(manager, Request("b", [*range(8), 50, 51, 52, 53, 54], session_id="second"))
    admit(manager, Request("c", [60, 61, 62, 63]))
    sessions = [event.session_id for event in manager.take_events()]
    assert sessions == ["first", "second", None]


def test_tokens_that_are_none_are_not_shared_but_beside_images() -> None:
    manager = make()
    for name in "ab":
        request = Request(name, [1, 2, 3, 4, -1, 6, 7, 8])
        assert manager.get_computed_blocks(request)[1] == 0
        admit(manager, request)
    late = Request("c", [1, 2, 3])
    admit(manager, late)
    decode(manager, late, -7), decode(manager, late)
    assert manager.estimate_cached_tokens(late) == 0
    for name, hit in (("d", 0), ("e", 7)):
        request = Request(name, [1, 2, -1, 4, -1, -1, 7, 8], mm_features=[image("cat", 4, 2)])
        assert manager.get_computed_blocks(request)[1] == hit
        admit(manager, request)


def test_a_request_without_tokens() -> None:
    manager, request = make(), Request("a", [])
    assert manager.allocate_slots(request, 3, num_lookahead_tokens=2) is not None
    assert manager.get_block_ids("a") == ([1, 2],)


def test_events_off_are_none() -> None:
    manager = make()
    admit(manager, Request("a", list(range(9))))
    assert manager.take_events() == []


@pytest.mark.parametrize("salt", ["\ud800", "", "ü" * 5000])
def test_salts_of_any_kind(salt: str) -> None:
    assert namespace_of(Request("r", [1], cache_salt=salt)) != b""
