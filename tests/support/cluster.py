"""Replicas that are block managers, and the network between them and a router."""

from collections import deque
from random import Random

from pyengine.cluster.feed import EventLog, merged
from pyengine.cluster.messages import (
    CacheFormat,
    Events,
    Load,
    ReplicaInfo,
    SharedStore,
    Snapshot,
)
from pyengine.cluster.prefix_router import PrefixRouter, Ticket, UpdateResult
from pyengine.kv_cache import BlockManager

BLOCK_SIZE = 4
KIND = CacheFormat("model", BLOCK_SIZE, 7)
MANY = 1 << 16


def manager_of(num_blocks: int) -> BlockManager:
    return BlockManager(num_blocks, BLOCK_SIZE, events=True, hash_seed=KIND.hash_seed)


def run(manager: BlockManager, tokens: list[int], namespace: bytes = b"") -> int:
    """Compute a prompt and forget it; its blocks stay. How many of its tokens were cached."""
    sequence = manager.sequence(tokens, namespace=namespace)
    plan = manager.begin_step(MANY)
    cached: int = plan.prefill(sequence, MANY).num_cached_tokens  # type: ignore[union-attr]
    plan.copies()
    plan.commit([0])
    sequence.free()
    return cached


class Cache:
    """A replica's cache in one epoch, and its blocks after each event."""

    def __init__(self, num_blocks: int) -> None:
        self.manager = manager_of(num_blocks)
        self.log = EventLog(self.manager)
        self.held: dict[int, set[bytes]] = {0: set()}
        """By the number of the event that comes next."""

    def take(self) -> Events:
        events = self.log.take(Load())
        self.held[events.end] = set(self.manager.cached_hashes())
        return events


class World:
    """Random operations on caches, delivery queues and a router, whose state must soon be right."""

    def __init__(self, random: Random, num_replicas: int = 4) -> None:
        self.random = random
        self.names = [f"r{number}" for number in range(num_replicas)]
        self.sizes = {name: random.choice((1, 3, 8, 40)) for name in self.names}
        self.caches = {name: Cache(self.sizes[name]) for name in self.names}
        self.epochs = {cache.log.epoch: cache for cache in self.caches.values()}
        self.queues: dict[str, deque[Events | Snapshot]] = {name: deque() for name in self.names}
        self.tickets: list[Ticket] = []
        self.restart_router()
        self.written: set[bytes] = set()
        self.num_checked = self.num_gaps = self.num_snapshots = self.num_events = 0
        self.num_restorable = 0

    def info(self, name: str) -> ReplicaInfo:
        store = SharedStore("folder", 2 * self.sizes["r0"], is_writer=name == "r0")
        return ReplicaInfo(name, KIND, self.sizes[name], store)

    def prompt(self) -> list[int]:
        family, length = self.random.randrange(6), self.random.randrange(1, 24)
        own = [self.random.randrange(2) for _ in range(length)]
        return [family] * (BLOCK_SIZE * self.random.randrange(3)) + own

    def compute(self, name: str) -> None:
        prompt = self.prompt()
        if len(prompt) <= BLOCK_SIZE * self.sizes[name]:
            run(self.caches[name].manager, prompt)
        self.queues[name].append(self.caches[name].take())
        if name == "r0":  # the one that writes to the folder
            self.written |= set(self.caches[name].manager.cached_hashes())

    def forget_evictable(self, name: str) -> None:
        self.caches[name].manager.evict_all()
        self.queues[name].append(self.caches[name].take())

    def picture(self, name: str) -> None:
        """Send a snapshot, behind the events before it."""
        self.queues[name].append(self.caches[name].take())
        self.queues[name].append(self.caches[name].log.snapshot(Load()))

    def deliver(self, name: str) -> None:
        if not self.queues[name]:
            return
        update = self.queues[name].popleft()
        result = self.give(name, update)
        self.num_gaps += result is UpdateResult.GAP
        if result is UpdateResult.APPLIED:
            self.num_snapshots += isinstance(update, Snapshot)
            self.num_events += 0 if isinstance(update, Snapshot) else len(update.kinds)
        if result is UpdateResult.GAP and self.random.random() < 0.5:
            self.picture(name)
        self.check(name)

    def give(self, name: str, update: Events | Snapshot) -> UpdateResult:
        if isinstance(update, Snapshot):
            return self.router.restore(name, update)
        return self.router.apply(name, update)

    def lose(self, name: str) -> None:
        if self.queues[name]:
            self.queues[name].popleft()

    def repeat(self, name: str) -> None:
        if self.queues[name]:
            self.queues[name].append(self.random.choice(self.queues[name]))

    def swap(self, name: str) -> None:
        queue = self.queues[name]
        if len(queue) > 1:
            queue[0], queue[-1] = queue[-1], queue[0]

    def merge(self, name: str) -> None:
        """Two batches as one; the first or the second may come by itself, too."""
        queue = self.queues[name]
        if len(queue) > 1 and isinstance(queue[0], Events) and isinstance(queue[1], Events):
            first, second = queue[0], queue[1]
            if first.epoch == second.epoch and first.end == second.first:
                queue[self.random.randrange(2)] = merged([first, second])

    def restart(self, name: str) -> None:
        """Its queue is not empty."""
        self.caches[name] = Cache(self.sizes[name])
        self.epochs[self.caches[name].log.epoch] = self.caches[name]

    def come_and_go(self, name: str) -> None:
        if any(replica.name == name for replica in self.router.replicas()):
            self.router.leave(name)
        else:
            self.router.join(self.info(name))

    def restart_router(self) -> None:
        self.router = PrefixRouter(KIND)
        self.tickets.clear()
        for name in self.names:
            self.router.join(self.info(name))

    def send(self) -> None:
        """Choose for a prompt, and compare with what the caches held that the router knows of."""
        states = {replica.name: replica for replica in self.router.replicas()}
        if not states:
            return
        prompt = self.prompt()
        choice = self.router.choose(prompt)
        assert choice.replica in states
        assert choice.num_blocks == -(-len(prompt) // BLOCK_SIZE)
        known = self.router.cached_hashes(choice.replica)
        expected = {
            name
            for ticket in self.tickets
            if ticket.replica is self.router._replicas[choice.replica]
            for name in cut(ticket.choice.hashes)
        }
        hits = 0
        for name in cut(choice.hashes):
            if name not in known | expected:
                break
            hits += 1
        assert choice.num_hits == hits
        restorable = cut(choice.hashes)[hits : hits + choice.num_restorable]
        assert len(restorable) == choice.num_restorable
        assert self.written.issuperset(restorable)
        self.num_restorable += choice.num_restorable
        ticket = self.router.begin(choice)
        assert ticket is not None
        self.tickets.append(ticket)

    def end(self) -> None:
        if self.tickets:
            ticket = self.tickets.pop(self.random.randrange(len(self.tickets)))
            self.router.begun(ticket, 1, 0)
            self.router.end(ticket)
            self.router.end(ticket)

    def check(self, name: str) -> None:
        """What is said to be current is what was held after the last event that was taken."""
        replica = self.router._replicas.get(name)
        if replica is None or not replica.is_current:
            return
        held = self.epochs[replica.epoch].held[replica.next]
        assert self.router.cached_hashes(name) == held
        assert replica.num_cached_blocks == len(held)
        self.num_checked += 1

    def catch_up(self) -> None:
        """Lose all messages. After the next events the state is right."""
        for name, cache in self.caches.items():
            self.queues[name].clear()
            if all(replica.name != name for replica in self.router.replicas()):
                self.router.join(self.info(name))
            if self.router.apply(name, cache.take()) is UpdateResult.GAP:
                assert self.router.restore(name, cache.log.snapshot(Load())) is UpdateResult.APPLIED
            assert self.router.cached_hashes(name) == set(cache.manager.cached_hashes())
        assert all(replica.is_current for replica in self.router.replicas())
        while self.tickets:
            self.end()
        assert all(replica.num_requests == 0 for replica in self.router.replicas())

    def step(self) -> None:
        """One random operation."""
        kinds = {
            **{self.compute: 30, self.deliver: 40, self.lose: 2, self.repeat: 3, self.swap: 2},
            **{self.merge: 4, self.picture: 2, self.forget_evictable: 1, self.restart: 1},
            **{self.come_and_go: 1},
        }
        if self.random.random() < 0.2:
            (self.send if self.random.random() < 0.55 else self.end)()
        elif self.random.random() < 0.001:
            self.restart_router()
        else:
            [operation] = self.random.choices(list(kinds), weights=list(kinds.values()))
            operation(self.random.choice(self.names))


def cut(names: bytes) -> list[bytes]:
    return [names[at : at + 16] for at in range(0, len(names), 16)]
