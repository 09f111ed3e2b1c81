"""A KV connector without a device: loads and sends in vLLM's real Scheduler, with faults.

Each request has a number of tokens outside the pool, which follows from its id. A synchronous load
fills its blocks when its step runs. An asynchronous one fills them a few slots at a time, in no
order with the steps, and goes on after an abort. Some blocks of some loads are filled with garbage
and reported. Some requests are sent after their end, and what is sent must be theirs.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM is in the peers' environment: make vllm-tests")

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.outputs import KVConnectorOutput

from tests.peers.world import BAD, Settings, World, link

NAME, POOL_CONNECTOR = "WorldConnector", "PoolConnector"


@dataclass
class Load:
    """Slots of a request's tokens from `start` to `end`; blocks with an index in `failed` fail."""

    request_id: str
    tokens: list[int]
    table: list[int]
    start: int
    end: int
    failed: set[int]
    written: int = 0
    speed: int = 1

    @property
    def invalid(self) -> set[int]:
        """The ids of the blocks that fail."""
        return {self.table[index] for index in self.failed}


@dataclass
class Sending:
    """A request that has ended, whose first tokens are sent for so many steps."""

    request_id: str
    tokens: list[int]
    table: list[int]
    steps: int


@dataclass
class Loads(KVConnectorMetadata):  # type: ignore[misc]
    """The synchronous loads of a step."""

    loads: list[Load] = field(default_factory=list)


class WorldConnector(KVConnectorBase_V1):  # type: ignore[misc]
    """The Scheduler's side; `ConnectedWorld` is the workers'."""

    def __init__(self, config: Any, role: Any, cache: Any) -> None:
        super().__init__(config, role, cache)
        self.faults = self._kv_transfer_config.kv_connector_extra_config
        self.block_size = config.cache_config.block_size
        self.new: list[Load] = []
        self.loading: dict[str, Load] = {}
        self.sending: dict[str, Sending] = {}
        self.local: dict[str, list[int]] = {}
        self.attempts: dict[str, int] = {}
        self.deferred: set[str] = set()
        self.fixed: dict[str, tuple[int, bool]] | None = None
        """Tokens outside the pool, and whether their load is asynchronous, instead of chances."""
        self.counts = {"sync": 0, "async": 0, "failed": 0, "sent": 0, "aborted": 0}

    def _chance(self, request: Any) -> tuple[random.Random, str]:
        """The same answers for the same attempt of a request."""
        name = f"{request.request_id} {self.attempts.get(request.request_id, 0)}"
        return random.Random(name), name

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """A length that follows from the request's id; `None` now and then, once."""
        if self.fixed is not None:
            outside, is_async = self.fixed.get(request.request_id, (0, False))
            return self._matched(request, num_computed_tokens, outside, is_async)
        chance, name = self._chance(request)
        if chance.random() < 0.1 and name not in self.deferred:
            self.deferred.add(name)
            return None, False
        is_async = chance.random() < self.faults["async"]
        most = request.num_tokens - (not is_async)
        outside = chance.choice((0, 0, chance.randint(0, most), most))
        return self._matched(request, num_computed_tokens, outside, is_async)

    def _matched(self, request: Any, local: int, outside: int, is_async: bool) -> tuple[int, bool]:
        self.local.setdefault(request.request_id, []).append(local)
        external = max(outside - local, 0)
        return external, is_async and external > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Blocks are allocated: begin the load."""
        if num_external_tokens == 0:
            return
        chance, _ = self._chance(request)
        self.attempts[request.request_id] = self.attempts.get(request.request_id, 0) + 1
        [table] = blocks.get_block_ids()
        start = self.local[request.request_id][-1]
        end = start + num_external_tokens
        failed = set()
        if chance.random() < self.faults["failed"]:
            size = self.block_size
            failed = {chance.randrange(start // size, -(-end // size)) for _ in range(2)}
        load = Load(request.request_id, list(request._all_token_ids), table, start, end, failed)
        load.speed = 1 if self.fixed is not None else chance.choice((1, 3, 10, 40))
        self.counts["failed"] += bool(failed)
        self.new.append(load)

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        """Separate synchronous loads, of requests in this step, from others."""
        meta = Loads()
        for load in self.new:
            if load.request_id in scheduler_output.num_scheduled_tokens:
                meta.loads.append(load)
            else:
                self.loading[load.request_id] = load
        self.counts["sync"] += len(meta.loads)
        self.counts["async"] += len(self.new) - len(meta.loads)
        self.new = []
        return meta

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        """Send some of the requests that have ended; not those that are being loaded."""
        if request.request_id in self.loading:
            self.counts["aborted"] += 1
            return False, None
        chance, _ = self._chance(request)
        computed = request.num_computed_tokens - request.num_in_flight_tokens
        computed = min(computed, request.num_tokens - 1)
        if computed <= 0 or chance.random() >= self.faults["sent"]:
            return False, None
        tokens = request._all_token_ids[:computed]
        self.sending[request.request_id] = Sending(
            request.request_id, list(tokens), list(block_ids), chance.choice((1, 2, 9))
        )
        self.counts["sent"] += 1
        return True, None

    def start_load_kv(self, *_: Any, **__: Any) -> None:
        """Of workers."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Of workers."""

    def save_kv_layer(self, *_: Any, **__: Any) -> None:
        """Of workers."""

    def wait_for_save(self) -> None:
        """Of workers."""


class PoolConnector(WorldConnector):
    """One that uses vLLM's own pool."""

    def bind_gpu_block_pool(self, gpu_block_pool: Any) -> None:
        """Would count references in it."""


for connector in (WorldConnector, PoolConnector):
    KVConnectorFactory.register_connector(connector.__name__, __name__, connector.__name__)


def connected(**faults: float) -> Any:
    """Adjusts an engine's configuration: with a connector of these faults."""
    chances = {"async": 0.5, "failed": 0.2, "sent": 0.3} | faults

    def adjust(config: Any, cache: Any) -> None:
        config.scheduler_config.disable_hybrid_kv_cache_manager = True
        config.kv_transfer_config = KVTransferConfig(
            kv_connector=NAME,
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config=chances,
        )

    return adjust


class ConnectedWorld(World):
    """A world with a connector. Overlapping steps run late: after the next one is planned."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.connector: WorldConnector = self.scheduler.connector

    def step(self) -> Any:
        """Plan a step, go on with the loads, and run what is due."""
        step = self.scheduler.schedule()
        for new in step.scheduled_new_reqs:
            self.hits[new.req_id].append(new.num_computed_tokens)
        self.preemptions += len(step.preempted_req_ids or ())
        for load in self.connector.loading.values():
            self._write(load, load.speed)
        self.waiting_output.append((step, None))
        keep = 1 if self.settings.overlapping and step.total_num_scheduled_tokens else 0
        while len(self.waiting_output) > keep:
            planned, _ = self.waiting_output.pop(0)
            self._deliver(planned, self._run(planned))
        return step

    def _run(self, step: Any) -> Any:
        """The output of a step, after its synchronous loads."""
        loads = step.kv_connector_metadata.loads
        for load in loads:
            self._write(load, load.end - load.start)
        self.worker.invalid = set().union(*(load.invalid for load in loads))
        output = self.worker.run(step)
        ended, sent = self._ended()
        invalid = self.worker.invalid.union(*(load.invalid for load in ended))
        output.kv_connector_output = KVConnectorOutput(
            finished_recving={load.request_id for load in ended},
            finished_sending=sent,
            invalid_block_ids=invalid,
        )
        return output

    def _ended(self) -> tuple[list[Load], set[str]]:
        """Asynchronous loads that have ended, and requests that are sent."""
        loading, sending = self.connector.loading, self.connector.sending
        ended = [load for load in loading.values() if load.written == load.end - load.start]
        for load in ended:
            del loading[load.request_id]
        sent = set()
        for each in list(sending.values()):
            each.steps -= 1
            if each.steps <= 0:
                self._check_sent(sending.pop(each.request_id))
                sent.add(each.request_id)
        return ended, sent

    def _chain(self, request_id: str, tokens: list[int]) -> list[int]:
        value, chain = self.worker.roots.get(request_id, 0), []
        for token in tokens:
            value = link(value, token)
            chain.append(value)
        return chain

    def _slots(self, table: list[int], positions: range) -> list[int]:
        size = self.settings.block_size
        return [table[at // size] * size + at % size for at in positions]

    def _write(self, load: Load, count: int) -> None:
        """Fill the next slots of a load."""
        first = load.start + load.written
        positions = range(first, min(first + count, load.end))
        chain = self._chain(load.request_id, load.tokens[: positions.stop])
        size = self.settings.block_size
        values = [BAD if at // size in load.failed else chain[at] for at in positions]
        self.worker.kv.reshape(-1)[self._slots(load.table, positions)] = values
        load.written += len(positions)

    def _check_sent(self, sending: Sending) -> None:
        slots = self._slots(sending.table, range(len(sending.tokens)))
        found = self.worker.kv.reshape(-1)[slots]
        chain = self._chain(sending.request_id, sending.tokens)
        if not np.array_equal(found, np.array(chain, np.int64)):
            self.worker.wrong.append(f"{sending.request_id}: sent {len(slots)} tokens, some wrong")
