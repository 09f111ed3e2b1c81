"""KV that a store keeps: restored, it gives the tokens that computed KV gives, whatever fails."""

import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from time import monotonic, sleep
from typing import Any

import pytest

from pyengine.engine import offloading
from pyengine.engine.explain import explain_prompt
from pyengine.engine.offloading import KVOffloader
from pyengine.kv_cache import KVStore, StoreError, kv_fingerprint
from pyengine.kv_cache.block_memory import BlockMemory, DeviceBlocks, HostBlocks
from pyengine.request.prompts import Prompt
from pyengine.request.request import Request
from pyengine.sampling_params import SamplingParams
from tests.support.engines import GREEDY, Bench, add_parts, add_request, make_bench
from tests.support.fake_runner import continued
from tests.support.soak import soak_only

GROUPS = [(None,), (None, 6), (9, 5)]


class FaultyPrefix:
    """A stored prefix whose transfers `act` may spoil: it gets the blocks, and returns how many."""

    def __init__(self, prefix: Any, act: Callable[[str, Any], int | None]) -> None:
        self._prefix, self._act = prefix, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._prefix, name)

    def load(self, memory: Any, blocks: Sequence[Any]) -> list[Any]:
        most = self._act("load", blocks)
        return list(self._prefix.load(memory, blocks if most is None else blocks[:most]))

    def store(self, memory: Any, blocks: Sequence[Any]) -> list[Any]:
        most = self._act("store", blocks)
        return list(self._prefix.store(memory, blocks if most is None else blocks[:most]))


class FaultyStore:
    """A store with such prefixes."""

    def __init__(self, store: KVStore, act: Callable[[str, Any], int | None]) -> None:
        self._store, self.act = store, act

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def prefix(self, *args: Any, **kwargs: Any) -> FaultyPrefix:
        return FaultyPrefix(self._store.prefix(*args, **kwargs), self.act)

    def close(self, timeout: float) -> bool:
        """Write what is queued; the store is for the next engine too."""
        return self._store.flush(timeout)


def device_blocks(arrays: Sequence[Any], groups: Sequence[Sequence[int]]) -> BlockMemory:
    """As if the arrays were a device's: blocks go the way that they go there."""
    import torch

    return DeviceBlocks([torch.from_numpy(array) for array in arrays], groups)


make_memory: Callable[[Any, Any], BlockMemory] = HostBlocks


@pytest.fixture(autouse=True, params=[HostBlocks, device_blocks], ids=["host", "device"])
def each_memory(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "make_memory", request.param)


def with_store(bench: Bench, store: Any, name: str = "model") -> KVOffloader:
    """Have the bench's engine use a store."""
    runner, groups = bench.runner, bench.manager.groups
    arrays = [each.reshape(-1, runner.block_size) for each in (runner.slots, runner.writers)]
    memory = make_memory(arrays, [[0, 1]] * len(groups))
    fingerprints = [kv_fingerprint([(name, str(group).encode())]) for group in range(len(groups))]
    offloader = KVOffloader(store, memory, bench.manager, fingerprints)
    bench.scheduler._is_held = offloader.look_up
    add_parts(bench.engine, offloader)
    return offloader


@pytest.fixture
def store() -> Iterator[KVStore]:
    store = KVStore.in_memory(64 << 20, segment_bytes=1 << 20)
    yield store
    store.close(5)


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offloading, "_SHORT", 8)
    monkeypatch.setattr(offloading, "_GAIN", 1e6)  # the fake runner computes faster than any disk


def run(bench: Bench, seconds: float = 30) -> None:
    """Steps until no request is left."""
    deadline = monotonic() + seconds
    while bench.engine.has_work:
        assert monotonic() < deadline
        bench.engine.step()
        bench.manager.check()
        if bench.engine.is_waiting:
            sleep(0.001)
    bench.engine.idle()


def wait_until_stored(offloader: KVOffloader, seconds: float = 30) -> None:
    """Until no byte moves any more."""
    deadline, is_stored = monotonic() + seconds, threading.Event()
    offloader._work.put(is_stored.set)
    assert is_stored.wait(seconds)
    while offloader.is_busy or not offloader._store.flush(0.1):
        assert monotonic() < deadline
        offloader.finish_loads()
        sleep(0.001)


def generate(bench: Bench, prompts: list[list[int]], params: SamplingParams = GREEDY) -> list[Any]:
    bench.submit({str(at): prompt for at, prompt in enumerate(prompts)}, params)
    run(bench)
    done = bench.take_finished()
    return [done[str(at)] for at in range(len(prompts))]


def prompt_of(length: int, seed: int = 0) -> list[int]:
    random = Random(seed)
    return [random.randrange(3, 97) for _ in range(length)]


def widest(groups: Sequence[int | None]) -> int | None:
    return None if None in groups else max(window for window in groups if window)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_a_new_engine_restores_what_an_earlier_one_computed(
    groups: tuple[int | None, ...], depth: int, store: KVStore
) -> None:
    prompt = prompt_of(40)
    first = make_bench(groups=groups, depth=depth)
    offloader = with_store(first, store)
    (answer,) = generate(first, [prompt])
    assert (answer.num_cached_tokens, answer.num_restored_tokens) == (0, 0)
    wait_until_stored(offloader)
    first.assert_all_free()

    second = make_bench(groups=groups, depth=depth)
    offloader = with_store(second, store)
    (again,) = generate(second, [prompt])
    assert again.outputs[0].token_ids == answer.outputs[0].token_ids
    assert again.outputs[0].token_ids == continued(prompt, 8, widest(groups))
    assert again.num_restored_tokens >= 36  # of 40: the last token is computed for its logits
    assert again.num_cached_tokens == again.num_restored_tokens
    assert sum(second.runner.computed) <= 4 + 8
    wait_until_stored(offloader)
    second.assert_all_free()
    assert second.engine.stats().store["restored_tokens"] == 40


def test_restored_tokens_take_blocks_and_no_budget_of_tokens(store: KVStore) -> None:
    """Promise 4: computed, the prompt would take five steps."""
    prompt = prompt_of(40)
    generate_and_store(store, [prompt])
    second = make_bench(max_num_batched_tokens=8)
    with_store(second, store)
    (answer,) = generate(second, [prompt])
    assert answer.outputs[0].token_ids == continued(prompt, 8)
    assert answer.num_restored_tokens >= 36
    assert len(second.runner.computed) == 8 and second.runner.computed[0] <= 4


def test_the_next_turn_restores_prompt_and_answer(store: KVStore) -> None:
    prompt = prompt_of(21)
    first = make_bench()
    offloader = with_store(first, store)
    (answer,) = generate(
        first, [prompt], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    )
    wait_until_stored(offloader)
    turn = [*prompt, *answer.outputs[0].token_ids, 5, 6, 7]
    second = make_bench()
    with_store(second, store)
    (again,) = generate(second, [turn])
    assert again.outputs[0].token_ids == continued(turn, 8)
    assert again.num_restored_tokens == 40  # 41 tokens, of which the last was not computed


def test_several_that_wait_for_one_prefix_load_it_once(store: KVStore) -> None:
    prompt = prompt_of(40)
    generate_and_store(store, [prompt])
    second = make_bench()
    faulty = FaultyStore(store, lambda kind, blocks: sleep(0.05) if kind == "load" else None)
    offloader = with_store(second, faulty)
    prompts = [[*prompt, at] for at in range(6)]
    answers = generate(second, prompts)
    for own, answer in zip(prompts, answers, strict=True):
        assert answer.outputs[0].token_ids == continued(own, 8)
    assert sorted(answer.num_restored_tokens for answer in answers) == [0] * 5 + [40]
    assert offloader.counters["loads"] == 1
    assert sum(second.runner.computed) <= 6 * 9


def generate_and_store(store: KVStore, prompts: list[list[int]], **settings: Any) -> None:
    """By an engine of its own."""
    bench = make_bench(**settings)
    offloader = with_store(bench, store)
    generate(bench, prompts)
    wait_until_stored(offloader)


@pytest.mark.parametrize("wrong", ["fingerprint", "salt"])
def test_another_model_or_namespace_finds_nothing(wrong: str, store: KVStore) -> None:
    prompt = prompt_of(40)
    generate_and_store(store, [prompt])
    second = make_bench()
    offloader = with_store(second, store, "other" if wrong == "fingerprint" else "model")
    second.submit({"0": prompt})
    if wrong == "salt":
        second.engine.abort(list(second.requests.values()))
        request = second.requests.pop("0")
        second.requests["0"] = add_request(
            second, "1", Prompt(token_ids=request.prompt_token_ids, namespace=b"x"), GREEDY
        )
    run(second)
    answer = second.take_finished()["0"]
    assert answer.outputs[0].token_ids == continued(prompt, 8)
    assert (answer.num_restored_tokens, offloader.counters["loads"]) == (0, 0)


def test_a_disk_that_never_answers_delays_its_request_alone(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Promise 6 of the scheduler holds: others go on, and this one is computed after a time."""
    monkeypatch.setattr(offloading, "_PATIENCE", 2.0)
    prompt = prompt_of(40)
    generate_and_store(store, [prompt])
    answers, is_held = threading.Event(), threading.Event()

    def block(kind: str, blocks: Any) -> None:
        if kind == "load":
            is_held.set()
            assert answers.wait(30)

    second = make_bench()
    offloader = with_store(second, FaultyStore(store, block))
    second.submit({"slow": prompt, "same": [*prompt, 9], "other": [5, 6]})
    start = monotonic()
    ends: dict[str, float] = {}
    while second.engine.has_work:
        second.engine.step()
        second.manager.check()
        ends |= dict.fromkeys(second.take_finished(), monotonic() - start)
        assert monotonic() - start < 20
    assert is_held.is_set() and ends["other"] < 2.0 <= min(ends["slow"], ends["same"])
    assert second.manager.usage().loading == 10  # not reused while the disk may still write
    assert offloader.counters["abandoned_loads"] == 1
    answers.set()
    while second.manager.usage().loading:
        offloader.finish_loads()
        assert monotonic() - start < 20
    wait_until_stored(offloader)
    second.assert_all_free()
    (answer,) = generate(second, [prompt])
    assert answer.outputs[0].token_ids == continued(prompt, 8)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", GROUPS)
def test_nothing_starves_beside_a_disk_that_stops_to_answer(
    groups: tuple[int | None, ...],
    seed: int,
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Promise 6: loads are overtaken until they are abandoned, then all run in order of arrival."""
    monkeypatch.setattr(offloading, "_PATIENCE", 0.3)
    random, may_go = Random(seed), threading.Event()
    documents = [prompt_of(40, each) for each in range(8)]
    generate_and_store(store, documents, num_blocks=256, groups=groups)
    left = random.randrange(4)
    """Loads that the disk still answers."""

    def act(kind: str, blocks: Any) -> None:
        nonlocal left
        if kind == "load":
            left -= 1
            assert left >= 0 or may_go.wait(60)

    bench = make_bench(num_blocks=160, groups=groups, max_num_seqs=4, max_num_batched_tokens=48)
    offloader = with_store(bench, FaultyStore(store, act))
    prompts: dict[str, list[int]] = {}
    abandoned, start = 0.0, monotonic()
    requests: list[Request] = []
    while len(prompts) < 120 or bench.engine.has_work:
        if len(prompts) < 120 and bench.scheduler.num_waiting < 12:
            begin = random.choice(documents) if random.random() < 0.5 else []
            name = str(len(prompts))
            prompts[name] = [*begin, *prompt_of(random.randint(1, 12), seed=len(prompts) + 50)]
            bench.submit({name: prompts[name]})
            requests.append(bench.requests[name])
        bench.engine.step()
        bench.manager.check()
        if not abandoned and offloader.counters["abandoned_loads"]:
            abandoned = monotonic()
        if bench.engine.is_waiting:
            sleep(0.001)
        assert monotonic() < start + 30
    assert 0.3 <= abandoned - start < 10
    for name, answer in bench.take_finished().items():
        assert answer.outputs[0].token_ids == continued(prompts[name], 8, widest(groups))
    admitted = [request.progress.scheduled_time or 0.0 for request in requests]
    late = [time for time in admitted if time > abandoned]
    assert late == sorted(late) and len(late) > 20
    may_go.set()
    while bench.manager.usage().loading:
        offloader.finish_loads()
        sleep(0.001)
    wait_until_stored(offloader)
    bench.assert_all_free()


@pytest.mark.parametrize("does_answer", [True, False])
def test_a_request_that_needs_the_blocks_of_an_abandoned_load(
    store: KVStore, monkeypatch: pytest.MonkeyPatch, does_answer: bool
) -> None:
    """It waits until the disk answers, and ends with an error that names it only after a time."""
    monkeypatch.setattr(offloading, "_PATIENCE", 0.2)
    monkeypatch.setattr(offloading, "_LAST_WAIT", 30.0 if does_answer else 0.5)
    generate_and_store(store, [prompt_of(40)])
    may_go = threading.Event()

    def block(kind: str, blocks: Any) -> None:
        if kind == "load":
            assert may_go.wait(30)

    second = make_bench(num_blocks=24)
    offloader = with_store(second, FaultyStore(store, block))
    second.submit({"late": prompt_of(40)})
    while not offloader.counters["abandoned_loads"]:
        second.engine.step()
    large = prompt_of(80, seed=1)
    second.submit({"large": large})
    while second.engine.has_work and not second.engine.is_waiting:
        second.engine.step()
    if does_answer:
        may_go.set()
    run(second)
    answer = second.take_finished()["large"]
    if does_answer:
        assert answer.outputs[0].token_ids == continued(large, 8)
    else:
        assert answer.outputs[0].finish_reason == "error"
        assert "the disk of the KV store does not answer" in str(answer.error)
        may_go.set()
    while second.manager.usage().loading:
        offloader.finish_loads()
        sleep(0.001)
    wait_until_stored(offloader)
    second.assert_all_free()


def test_an_abort_waits_for_no_disk_and_frees_no_block_of_it(store: KVStore) -> None:
    prompt = prompt_of(40)
    generate_and_store(store, [prompt])
    answers = threading.Event()
    second = make_bench()
    faulty = FaultyStore(store, lambda kind, blocks: answers.wait(30) and None)
    offloader = with_store(second, faulty)
    second.submit({"0": prompt})
    second.engine.step()
    (ended,) = second.abort(["0"])
    assert ended.outputs[0].finish_reason == "abort" and not second.engine.has_work
    assert second.manager.usage().loading == 10
    answers.set()
    wait_until_stored(offloader)
    assert second.manager.usage().loading == 0  # and they are cached now
    (answer,) = generate(second, [prompt])
    assert answer.num_cached_tokens >= 36 and answer.num_restored_tokens == 0


def test_what_is_slower_than_computing_is_computed(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_GAIN", 0.8)
    prompt = prompt_of(40)
    generate_and_store(store, [prompt])
    second = make_bench()
    offloader = with_store(second, store)
    offloader._load_rate.add(1, 1.0)  # a byte per second
    offloader._compute_rate.add(1000, 0.1)
    (answer,) = generate(second, [prompt])
    assert answer.outputs[0].token_ids == continued(prompt, 8)
    assert (answer.num_cached_tokens, offloader.counters["loads"]) == (0, 0)


def test_short_ones_are_stored_at_their_second_use(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_SHORT", 256)
    bench = make_bench()
    offloader = with_store(bench, store)
    generate(bench, [prompt_of(20)])
    wait_until_stored(offloader)
    assert store.stats()["stored"] == 0
    generate(bench, [prompt_of(20)])
    wait_until_stored(offloader)
    assert store.stats()["stored"] >= 5


def test_pins_of_stores_do_not_stop_admission(store: KVStore) -> None:
    """A request that finds the pool held by stores waits for them, and fails only without."""
    has_pinned, may_go = threading.Event(), threading.Event()

    def wait(kind: str, blocks: Any) -> None:
        has_pinned.set()
        may_go.wait(30)

    bench = make_bench(num_blocks=16)
    with_store(bench, FaultyStore(store, wait))
    bench.submit({"0": prompt_of(40)}, SamplingParams(temperature=0, max_tokens=1))
    while bench.engine.has_work:
        bench.engine.step()
    assert has_pinned.wait(30)
    bench.submit({"1": prompt_of(48, seed=1)})
    for _ in range(50):
        bench.engine.step()
        assert bench.engine.is_waiting
    may_go.set()
    run(bench)
    answer = bench.take_finished()["1"]
    assert answer.outputs[0].token_ids == continued(prompt_of(48, seed=1), 8)


def test_transfers_rest_while_steps_run_and_not_after_them(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    monkeypatch.setattr(offloading, "sleep", rests.append)
    clocks = threading.local()

    def tick() -> int:
        clocks.now = getattr(clocks, "now", 0) + 1
        return int(clocks.now)

    monkeypatch.setattr(offloading, "thread_time", tick)
    prompt = prompt_of(40)
    generate_and_store(store, [prompt])
    offloader = with_store(second := make_bench(), store)
    second.submit({"runs": prompt_of(8, seed=1)})
    second.engine.step()
    second.engine.step()
    second.submit({"loads": prompt})
    second.engine.step()
    assert offloader.counters["loads"] == 1
    assert offloader.are_steps_running
    while offloader._loaded.empty():  # else the steps could end before the load begins
        sleep(0.001)
    run(second)
    assert (offloading._LOAD_REST in rests) == offloader._memory.shares_processors
    assert not offloader.are_steps_running


def recorded_rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The factors by which transfers rest from now on."""
    factors: list[float] = []
    resting = KVOffloader._resting

    def rest(self: KVOffloader, factor: float) -> Any:
        factors.append(factor)
        return resting(self, factor)

    monkeypatch.setattr(KVOffloader, "_resting", rest)
    return factors


def test_loads_of_the_first_requests_do_not_rest(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sequences that run beside them began after they were looked up."""
    generate_and_store(store, [prompt_of(40)])
    factors = recorded_rests(monkeypatch)
    offloader = with_store(second := make_bench(), store)
    second.submit({"loads": prompt_of(40)})
    second.engine.step()
    while offloader._loaded.empty():
        sleep(0.001)
    assert set(factors) == {0.0}
    run(second)
    assert offloader.counters["restored_tokens"] > 0


def test_prompts_that_may_never_come_again_are_stored_more_slowly(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a sequence that began with cached tokens waits behind them."""
    rests = recorded_rests(monkeypatch)
    may_go, is_held = threading.Event(), threading.Event()

    def wait(kind: str, blocks: Any) -> None:
        is_held.set()
        assert may_go.wait(30)

    bench = make_bench()
    offloader = with_store(bench, FaultyStore(store, wait))
    new, used = offloading._NEW_STORE_REST, offloading._STORE_REST
    generate(bench, [prompt_of(40)])
    assert is_held.wait(30) and rests == [new]
    generate(bench, [[*prompt_of(40), 9, 9, 9, 9]])
    may_go.set()
    wait_until_stored(offloader)
    assert set(rests[1:]) == {used} and new > used
    assert offloader._used_again.num_tokens == offloader._new.num_tokens == 0
    rests.clear()
    generate(bench, [prompt_of(40, seed=1)])
    wait_until_stored(offloader)
    assert set(rests) == {new}


def test_the_first_step_of_a_request_counts_as_one_that_runs(store: KVStore) -> None:
    bench = make_bench()
    offloader = with_store(bench, store)
    running: list[bool] = []
    submit = bench.engine._executor.submit
    bench.engine._executor.submit = lambda *args: (
        running.append(offloader.are_steps_running) or submit(*args)
    )
    generate(bench, [prompt_of(40)])
    assert running and all(running) and not offloader.are_steps_running


def test_no_more_wait_to_be_stored_than_a_bound(
    store: KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_MAX_QUEUED_TOKENS", 40)
    may_go = threading.Event()
    bench = make_bench()
    faulty = FaultyStore(store, lambda kind, blocks: may_go.wait(30) and None)
    offloader = with_store(bench, faulty)
    one = SamplingParams(temperature=0, max_tokens=1)
    for seed in range(3):
        generate(bench, [prompt_of(40, seed)], one)
    assert offloader.counters["dropped_stores"] == 2 * 2  # a prompt, and the sequence at its end
    may_go.set()
    wait_until_stored(offloader)
    generate(bench, [prompt_of(40, seed=2)], one)
    wait_until_stored(offloader)
    assert offloader.counters["dropped_stores"] == 4
    assert store.stats()["stored"] == 20


def test_blocks_that_are_stored_are_not_moved_again(store: KVStore) -> None:
    moved: list[Any] = []
    bench = make_bench()
    offloader = with_store(bench, FaultyStore(store, lambda kind, blocks: moved.extend(blocks)))
    generate(bench, [prompt_of(40)])
    wait_until_stored(offloader)
    assert [row for row, *_ in moved] == list(range(len(moved)))
    before = store.stats()
    generate(bench, [prompt_of(40)])
    wait_until_stored(offloader)
    assert len(moved) == before["stored"]
    assert store.stats()["known"] > before["known"]  # that they were used is known


def test_a_prefix_that_another_request_loads_is_looked_up_once(store: KVStore) -> None:
    prompt = prompt_of(40)
    generate_and_store(store, [prompt])
    may_go = threading.Event()
    matched: list[Any] = []
    second = make_bench()
    faulty = FaultyStore(store, lambda kind, blocks: may_go.wait(30) and None)
    offloader = with_store(second, faulty)
    prefix_of = faulty.prefix
    faulty.prefix = lambda *args, **kw: matched.append(args) or prefix_of(*args, **kw)  # type: ignore[method-assign]
    second.submit({"0": prompt, "1": [*prompt, 5]})
    for _ in range(20):
        second.engine.step()
    assert len(matched) == 2
    may_go.set()
    run(second)
    assert offloader.counters["loads"] == 1
    answers = second.take_finished()
    assert answers["0"].outputs[0].token_ids == continued(prompt, 8)
    assert answers["1"].outputs[0].token_ids == continued([*prompt, 5], 8)


def test_a_flush_writes_what_is_queued_or_says_that_it_cannot(store: KVStore) -> None:
    may_go = threading.Event()

    def wait(kind: str, blocks: Any) -> None:
        assert may_go.wait(30)

    bench = make_bench()
    offloader = with_store(bench, FaultyStore(store, wait))
    generate(bench, [prompt_of(40)])
    assert not offloader.flush(0.05)
    may_go.set()
    assert offloader.flush(30)
    assert store.stats()["readable_entries"] >= 10


class StuckStore(FaultyStore):
    """A store whose disk does not return from a write."""

    is_stalled = False

    def flush(self, timeout: float) -> bool:
        sleep(timeout)
        return False

    def stats(self) -> dict[str, Any]:
        return {**self._store.stats(), "is_stalled": self.is_stalled, "queued_bytes": 5}


@pytest.mark.parametrize("is_stalled", [True, False])
@pytest.mark.parametrize("timeout", [60.0, math.inf])
def test_a_flush_ends_soon_if_the_disk_writes_nothing(
    store: KVStore, is_stalled: bool, timeout: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "FLUSH_PATIENCE", 0.3)
    bench = make_bench()
    stuck = StuckStore(store, lambda kind, blocks: None)
    stuck.is_stalled = is_stalled
    offloader = with_store(bench, stuck)
    generate(bench, [prompt_of(40)])
    start = monotonic()
    assert not offloader.flush(timeout)
    assert monotonic() - start < 5
    start = monotonic()
    offloader.close(60.0)  # it is not waited for once more
    assert monotonic() - start < 5


def test_entries_of_another_length_are_computed(store: KVStore) -> None:
    """As if a part of the layout were missing in the fingerprint."""
    prompt = prompt_of(40)
    generate_and_store(store, [prompt])

    def refuse(kind: str, blocks: Any) -> None:
        if kind == "load":
            raise StoreError("the entry holds 64 bytes, the buffers 32")

    second = make_bench()
    offloader = with_store(second, FaultyStore(store, refuse))
    (answer,) = generate(second, [prompt])
    assert answer.outputs[0].token_ids == continued(prompt, 8)
    assert (answer.num_restored_tokens, offloader.counters["failed_loads"]) == (0, 1)


@pytest.mark.parametrize("num_requests", [120, *soak_only([10_000])])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("groups", GROUPS)
def test_faults_in_a_third_of_all_transfers_change_no_answer(
    groups: tuple[int | None, ...],
    depth: int,
    num_requests: int,
    store: KVStore,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Small pools, shared prefixes, aborts; loads end early, late, with errors, or too late."""
    monkeypatch.setattr(offloading, "_PATIENCE", 0.02)
    random, faults = Random(depth), Random(7)
    stats = {"faults": 0, "transfers": 0}
    engine = threading.get_ident()

    def act(kind: str, blocks: Any) -> int | None:
        assert threading.get_ident() != engine
        stats["transfers"] += 1
        if faults.random() > 1 / 3:
            return None
        stats["faults"] += 1
        match faults.choice(["error", "none", "some", "late"]):
            case "error":
                raise StoreError("as if the disk had failed")
            case "none":
                return 0
            case "some":
                return faults.randrange(len(blocks) + 1)
            case _:
                sleep(faults.choice([0.001, 0.01, 0.05]))
        return None

    faulty = FaultyStore(store, act)
    documents = [prompt_of(random.randint(12, 60), seed) for seed in range(8)]
    total = 0
    for round_number in count():
        if total >= num_requests:
            break
        bench = make_bench(num_blocks=48, groups=groups, depth=depth, max_num_batched_tokens=64)
        offloader = with_store(bench, faulty)
        for batch in range(12):
            prompts = {}
            for at in range(random.randint(1, 6)):
                document = random.choice(documents)
                begin = document[: random.randint(1, len(document))]
                prompts[f"{round_number}.{batch}.{at}"] = [
                    *begin,
                    *prompt_of(2, random.randrange(9)),
                ]
            bench.submit(prompts)
            for _ in range(random.randint(0, 3)):
                bench.engine.step()
            if random.random() < 0.3:
                bench.abort([random.choice(list(prompts))])
            run(bench)
            for name, answer in bench.take_finished().items():
                total += 1
                if answer.outputs[0].finish_reason != "abort":
                    expected = continued(prompts[name], 8, widest(groups))
                    assert answer.outputs[0].token_ids == expected
        wait_until_stored(offloader)
        while bench.manager.usage().loading:
            offloader.finish_loads()
            sleep(0.001)
        bench.assert_all_free()
        assert bench.engine.stats().store["failed_loads"] <= stats["faults"]
        assert offloader.close(5)  # its threads keep the memory of its pool
    assert stats["faults"] > num_requests // 8


def test_everything_that_is_admitted_at_once_is_looked_up(store: KVStore) -> None:
    """More than the first of the queue, and each with a stored end after the stored beginning."""
    begin = prompt_of(24)
    prompts = [[*begin, *prompt_of(12, seed)] for seed in range(40)]
    generate_and_store(store, prompts, num_blocks=512)
    second = make_bench(num_blocks=512)
    with_store(second, store)
    answers = generate(second, prompts)
    for own, answer in zip(prompts, answers, strict=True):
        assert answer.outputs[0].token_ids == continued(own, 8)
        assert answer.num_cached_tokens >= 32
    assert sum(second.runner.computed) <= 40 * (4 + 8)


def test_kv_of_other_weights_is_told(store: KVStore) -> None:
    before = make_bench(64, 4, explain=True)
    offloader = with_store(before, store, "old weights")
    tokens = [5 + place for place in range(13)]
    add_request(before, "first", Prompt(token_ids=tokens), GREEDY)
    run(before)
    wait_until_stored(offloader)
    bench = make_bench(64, 4, explain=True)
    now = with_store(bench, store, "new weights")

    def reason(token_ids: list[int], namespace: bytes = b"") -> str | None:
        prompt = Prompt(token_ids=token_ids, namespace=namespace)
        return explain_prompt(bench.manager, prompt, None, now).reason

    assert reason(tokens) == "weights_changed"
    assert reason(tokens, b"other") == reason([9, *tokens]) == "new"
    assert explain_prompt(bench.manager, Prompt(token_ids=tokens), None, None).reason == "new"
    assert explain_prompt(before.manager, Prompt(token_ids=tokens), None, offloader).reason is None
