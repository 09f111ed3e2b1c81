"""The router by itself: what it knows follows from events, where it sends from that."""

from random import Random
from threading import Thread

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyengine.cluster.messages import (
    CacheFormat,
    Events,
    Load,
    ReplicaInfo,
    SharedStore,
    Snapshot,
)
from pyengine.cluster.prefix_router import MAX_REPLICAS, PrefixRouter, UpdateResult
from pyengine.errors import ConfigurationError, NoReplicaError
from pyengine.kv_cache import ConfigError
from tests.support.cluster import BLOCK_SIZE, KIND, Cache, World, run

PROMPT = list(range(BLOCK_SIZE * 10))


def router_of(*names: str, **options: float) -> tuple[PrefixRouter, dict[str, Cache]]:
    """A router over caches of 64 blocks that it knows."""
    router = PrefixRouter(KIND, **options)  # type: ignore[arg-type]
    caches = {name: Cache(64) for name in names}
    for name, cache in caches.items():
        router.join(ReplicaInfo(name, KIND, 64))
        assert router.restore(name, cache.log.snapshot(Load())) is UpdateResult.APPLIED
    return router, caches


def compute(router: PrefixRouter, name: str, cache: Cache, prompt: list[int]) -> None:
    run(cache.manager, prompt)
    assert router.apply(name, cache.take()) is UpdateResult.APPLIED


def test_a_prompt_goes_where_most_of_it_is() -> None:
    router, caches = router_of("a", "b", "c")
    compute(router, "b", caches["b"], PROMPT[:20])
    compute(router, "c", caches["c"], PROMPT[:36])
    choice = router.choose(PROMPT)
    assert (choice.replica, choice.num_blocks, choice.num_hits) == ("c", 10, 9)
    assert router.choose(PROMPT, among={"a", "b"}).replica == "b"
    assert router.choose(PROMPT, b"tenant").num_hits == 0
    run(caches["c"].manager, PROMPT, b"tenant")
    router.apply("c", caches["c"].take())
    assert router.choose(PROMPT, b"tenant").num_hits == 10


def test_what_is_evicted_is_missed() -> None:
    router, caches = router_of("a", "b")
    compute(router, "a", caches["a"], PROMPT)
    assert router.choose(PROMPT).replica == "a"
    caches["a"].manager.evict_all()
    compute(router, "b", caches["b"], PROMPT[:8])
    router.apply("a", caches["a"].take())
    assert (router.choose(PROMPT).replica, router.choose(PROMPT).num_hits) == ("b", 2)


def test_equal_costs_go_to_who_has_less_to_do() -> None:
    router, _ = router_of("a", "b", "c")
    seen = []
    for number in range(6):
        choice = router.choose([number] * 40)
        assert router.begin(choice) is not None
        seen.append(choice.replica)
    assert sorted(seen[:3]) == sorted(seen[3:]) == ["a", "b", "c"]


def test_a_burst_of_one_prompt_stays_together_before_any_event() -> None:
    router, _ = router_of("a", "b", slack=8)
    first = router.choose(PROMPT)
    ticket = router.begin(first)
    assert ticket is not None
    again = router.choose(PROMPT)
    assert (again.replica, again.num_hits) == (first.replica, 10)
    router.end(ticket)
    assert router.choose(PROMPT).num_hits == 0


def test_nobody_gets_many_more_than_the_mean() -> None:
    router, caches = router_of("a", "b", "c", "d", imbalance=1.25, slack=2)
    compute(router, "a", caches["a"], PROMPT)
    counts = dict.fromkeys("abcd", 0)
    for _ in range(200):
        choice = router.choose(PROMPT)
        router.begin(choice)
        counts[choice.replica] += 1
    assert max(counts.values()) <= 1.25 * 50 + 3
    assert router.stats.num_diverted > 0
    assert router.imbalance <= 1.35


def test_load_that_others_sent_counts_too() -> None:
    router, caches = router_of("a", "b")
    busy = Load(num_running=9, num_waiting=3, num_active=60)
    assert (
        router.apply("a", Events(caches["a"].log.epoch, 0, b"", b"", busy)) is UpdateResult.APPLIED
    )
    assert [replica.load for replica in router.replicas()] == [busy, Load()]
    assert {router.choose(PROMPT).replica for _ in range(4)} == {"b"}


def test_prompts_that_wait_to_be_computed_count_until_they_are() -> None:
    router, _ = router_of("a", "b")
    long, short = list(range(400)), list(range(1000, 1200))
    first, second = router.begin(router.choose(long)), router.begin(router.choose(short))
    assert first is not None and second is not None
    assert first.choice.replica != second.choice.replica
    assert router.choose([7] * 8).replica == second.choice.replica
    router.begun(first, 400, 0)
    router.begun(second, 200, 0)
    assert (router.stats.prompt_tokens, router.stats.real_hits) == (600, 0)
    router.end(first)
    assert router.choose([7] * 8).replica == first.choice.replica


@pytest.mark.parametrize(
    ("field", "value"), [("model", "other"), ("block_size", 16), ("hash_seed", 8)]
)
def test_a_replica_of_another_kind_is_refused_with_both_values(field: str, value: object) -> None:
    router, _ = router_of("a")
    values = {"model": "model", "block_size": BLOCK_SIZE, "hash_seed": 7, field: value}
    with pytest.raises(ConfigurationError, match=f"{field}={value!r}.*{field}=") as refusal:
        router.join(ReplicaInfo("b", CacheFormat(**values), 8))  # type: ignore[arg-type]
    assert repr(getattr(KIND, field)) in str(refusal.value)
    assert [replica.name for replica in router.replicas()] == ["a"]
    assert router.stats.num_refused == 1


def test_events_out_of_order_twice_and_of_nobody() -> None:
    router, caches = router_of("a")
    cache = caches["a"]
    run(cache.manager, PROMPT[:8])
    first = cache.take()
    run(cache.manager, PROMPT)
    second = cache.take()
    assert router.apply("unknown", first) is UpdateResult.UNKNOWN_REPLICA
    assert router.restore("unknown", cache.log.snapshot(Load())) is UpdateResult.UNKNOWN_REPLICA
    assert router.apply("a", second) is UpdateResult.GAP
    assert router.apply("a", first) is UpdateResult.GAP, "only a snapshot helps"
    assert router.choose(PROMPT).replica == "a", "requests are served meanwhile"
    assert router.restore("a", cache.log.snapshot(Load())) is UpdateResult.APPLIED
    for known in (first, second):
        assert router.apply("a", known) is UpdateResult.DUPLICATE
    assert router.cached_hashes("a") == set(cache.manager.cached_hashes())
    assert (router.stats.num_gaps, router.stats.num_snapshots) == (1, 2)


def test_a_restarted_replica_has_nothing_of_its_earlier_life() -> None:
    router, caches = router_of("a")
    compute(router, "a", caches["a"], PROMPT)
    anew = Cache(64)
    assert router.apply("a", anew.take()) is UpdateResult.GAP
    assert router.cached_hashes("a") == set()
    assert router.restore("a", anew.log.snapshot(Load())) is UpdateResult.APPLIED
    assert router.apply("a", caches["a"].take()) is UpdateResult.GAP, "of the earlier epoch"


def test_bytes_that_are_no_events_change_nothing() -> None:
    router, caches = router_of("a")
    compute(router, "a", caches["a"], PROMPT)
    held, epoch = router.cached_hashes("a"), caches["a"].log.epoch
    for kinds, names in ((b"\1", b""), (b"\1\1", bytes(16)), (b"\3", bytes(16)), (b"", b"1")):
        with pytest.raises(ConfigError):
            router.apply("a", Events(epoch, 10, kinds, names))
    assert router.cached_hashes("a") == held
    run(caches["a"].manager, [5] * 40)
    assert router.apply("a", caches["a"].take()) is UpdateResult.APPLIED


def test_memory_is_bounded_by_the_blocks_that_a_replica_has() -> None:
    router = PrefixRouter(KIND)
    router.join(ReplicaInfo("a", KIND, 2))
    assert router.restore("a", Snapshot("epoch", 0, bytes(32))) is UpdateResult.APPLIED
    three = bytes(range(48))
    with pytest.raises(ConfigurationError, match=r"2 blocks and sent 3 hashes"):
        router.restore("a", Snapshot("epoch", 9, three))
    assert router.apply("a", Events("epoch", 0, b"\1\1\1", three)) is UpdateResult.GAP
    assert router.num_hashes == 0


def test_replicas_come_and_go_and_their_numbers_are_used_again() -> None:
    router = PrefixRouter(KIND)
    for number in range(MAX_REPLICAS):
        router.join(ReplicaInfo(f"{number}", KIND, 4))
    with pytest.raises(ConfigurationError, match="limit of 128 replicas"):
        router.join(ReplicaInfo("more", KIND, 4))
    with pytest.raises(ConfigurationError, match="'3' has joined already"):
        router.join(ReplicaInfo("3", KIND, 4))
    ticket = router.begin(router.choose(PROMPT, among={"5"}))
    assert ticket is not None
    router.leave("5")
    router.leave("5")
    with pytest.raises(ConfigurationError, match="exceeds the limit"):  # it has requests
        router.join(ReplicaInfo("more", KIND, 4))
    router.end(ticket)
    router.join(ReplicaInfo("more", KIND, 4))
    assert router.choose(PROMPT, among={"more"}).num_hits == 0


def test_nobody_there() -> None:
    router = PrefixRouter(KIND)
    with pytest.raises(NoReplicaError):
        router.choose(PROMPT)
    router.join(ReplicaInfo("a", KIND, 4))
    choice = router.choose(PROMPT)
    with pytest.raises(NoReplicaError):
        router.choose(PROMPT, among=())
    router.leave("a")
    assert router.begin(choice) is None
    with pytest.raises(ConfigurationError, match=r"imbalance=0\.5"):
        PrefixRouter(KIND, imbalance=0.5)


def test_a_request_that_went_elsewhere_is_counted_there() -> None:
    router, caches = router_of("a", "b")
    compute(router, "a", caches["a"], PROMPT)
    ticket = router.begin(router.choose(PROMPT), "b")
    assert ticket is not None
    assert (ticket.choice.replica, ticket.choice.num_hits) == ("b", 0)
    assert [replica.num_requests for replica in router.replicas()] == [0, 1]


def sharing(
    *readers: str, cost: float, folder_blocks: int = 64
) -> tuple[PrefixRouter, dict[str, Cache]]:
    """Replicas on one folder, to which "w" writes."""
    router = PrefixRouter(KIND)
    caches = {name: Cache(16) for name in ("w", *readers)}
    for name, cache in caches.items():
        store = SharedStore("folder", folder_blocks, is_writer=name == "w")
        router.join(ReplicaInfo(name, KIND, 16, store))
        router.restore(name, cache.log.snapshot(Load(restore_cost=cost)))
    return router, caches


def learn(router: PrefixRouter, name: str, cache: Cache, prompt: list[int], cost: float) -> None:
    run(cache.manager, prompt)
    router.apply(name, cache.log.take(Load(restore_cost=cost)))


def keep_busy(router: PrefixRouter, name: str, num_blocks: int) -> None:
    """A request of other tokens that waits there."""
    prompt = [99] * (BLOCK_SIZE * num_blocks)
    assert router.begin(router.choose(prompt, among={name})) is not None


@pytest.mark.parametrize(("cost", "expected"), [(0.1, "r"), (0.3, "w"), (1.0, "w")])
def test_a_cached_block_is_worth_what_a_restore_would_cost(cost: float, expected: str) -> None:
    """The writer has 10 blocks and 2 others to compute; a reader can restore these 10."""
    router, caches = sharing("r", cost=cost)
    learn(router, "w", caches["w"], PROMPT, cost)
    assert router.choose(PROMPT).replica == "w"
    keep_busy(router, "w", 2)
    choice = router.choose(PROMPT)
    assert choice.replica == expected
    if expected == "r":
        assert (choice.num_hits, choice.num_restorable, choice.num_to_compute) == (0, 10, 1)


def test_evicted_blocks_of_the_writer_can_be_restored_anywhere() -> None:
    router, caches = sharing("r", cost=0.1)
    learn(router, "w", caches["w"], PROMPT, 0.1)
    caches["w"].manager.evict_all()
    router.apply("w", caches["w"].log.take(Load(restore_cost=0.1)))
    found = {router.choose(PROMPT, among={name}).num_restorable for name in ("w", "r")}
    assert found == {10}
    learn(router, "r", caches["r"], PROMPT[: BLOCK_SIZE * 4], 0.1)
    choice = router.choose(PROMPT)
    assert (choice.replica, choice.num_hits, choice.num_restorable) == ("r", 4, 6)


def test_blocks_of_a_reader_are_in_no_folder() -> None:
    router, caches = sharing("r", cost=0.1)
    learn(router, "r", caches["r"], PROMPT, 0.1)
    keep_busy(router, "r", 8)
    assert router.choose(PROMPT).replica == "r"
    assert router.choose(PROMPT, among={"w"}).num_restorable == 0


def test_a_prompt_in_progress_cannot_be_restored_yet() -> None:
    """A burst of one prompt stays together."""
    router, _ = sharing("r", cost=0.01)
    assert router.begin(router.choose(PROMPT, among={"w"})) is not None
    assert router.choose(PROMPT).replica == "w"
    assert router.choose(PROMPT, among={"r"}).num_restorable == 0


def test_replicas_with_another_folder_or_none_restore_nothing() -> None:
    router, caches = sharing(cost=0.1)
    other = SharedStore("another", 64, is_writer=True)
    for name, store in (("other", other), ("none", None)):
        router.join(ReplicaInfo(name, KIND, 16, store))
    learn(router, "w", caches["w"], PROMPT, 0.1)
    for name in ("other", "none"):
        assert router.choose(PROMPT, among={name}).num_restorable == 0


def test_restored_tokens_are_expected_hits_and_restores_pending_work() -> None:
    router, caches = sharing("r", cost=0.2)
    learn(router, "w", caches["w"], PROMPT, 0.2)
    ticket = router.begin(router.choose(PROMPT), "r")
    assert ticket is not None
    assert router._replicas["r"].num_pending == 2  # 10 blocks at a fifth
    router.begun(ticket, 40, 40)
    router.end(ticket)
    assert router._replicas["r"].num_pending == 0
    assert router.stats.expected_hits == router.stats.real_hits == 40


def test_what_is_known_of_a_folder_is_bounded_and_ends_with_its_last_replica() -> None:
    router, caches = sharing("r", cost=0.1, folder_blocks=20)
    for number in range(40):
        learn(router, "w", caches["w"], [number] * (BLOCK_SIZE * 8), 0.1)
        assert router._stored._index.num_blocks <= 32  # twice the pool
    last = [39] * (BLOCK_SIZE * 8)
    assert router.choose(last, among={"r"}).num_restorable == 8
    assert router.choose([0] * (BLOCK_SIZE * 8), among={"r"}).num_restorable == 0
    router.leave("w")
    assert router.choose(last).num_restorable == 8
    again = SharedStore("folder", 20, is_writer=True)  # another process writes now
    router.join(ReplicaInfo("w2", KIND, 16, again))
    assert router.choose(last, among={"w2"}).num_restorable == 8
    router.leave("r")
    router.leave("w2")
    assert router._stored._index.num_blocks == 0


@given(seed=st.integers(0, 2**32), count=st.integers(1, 400))
@settings(max_examples=60, deadline=None)
def test_the_picture_is_right_once_it_has_caught_up(seed: int, count: int) -> None:
    world = World(Random(seed))
    for _ in range(count):
        world.step()
    world.catch_up()


@pytest.mark.slow
def test_the_picture_is_right_over_a_hundred_thousand_operations() -> None:
    world = World(Random(17))
    for number in range(100_000):
        world.step()
        if number % 1000 == 999:
            world.catch_up()
    assert min(world.num_checked, world.num_events) > 10_000
    assert min(world.num_gaps, world.num_snapshots, world.num_restorable) > 1_000


def test_threads_may_call_it_at_once() -> None:
    router, caches = router_of("a", "b")

    def send(seed: int) -> None:
        random = Random(seed)
        for _ in range(300):
            ticket = router.begin(router.choose([random.randrange(9)] * 40))
            assert ticket is not None
            router.begun(ticket, 40, 0)
            router.end(ticket)

    threads = [Thread(target=send, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for number in range(100):
        compute(router, "a", caches["a"], [number % 7] * 40)
    for thread in threads:
        thread.join()
    assert router.stats.num_routed == 1200
    assert all(replica.num_requests == 0 for replica in router.replicas())
