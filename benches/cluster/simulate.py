"""Policies of routing over replicas without a model, on traces of real conversations and questions.

    python -m benches.cluster.simulate --replicas 16 --data FOLDER

The router is `PrefixRouter` itself, the caches are block managers; time is a cost model's, whose
constants `measure.py` has measured. Figures go to `benches/results/cluster-xeon-amx.json`.
"""

import argparse
import gzip
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from benches.cluster.replica import Costs, Heard, Later, SimReplica, SimRequest
from benches.peers.traces import bbh, mooncake
from pyengine.cluster.messages import CacheFormat, Events, Load, ReplicaInfo
from pyengine.cluster.prefix_router import RUNNING_WEIGHT, PrefixRouter

BLOCK_SIZE = 16
LAG = 0.005
"""Seconds between a step's end and its events in the router."""
KIND = CacheFormat("simulated", BLOCK_SIZE, 0)
RESULTS = Path(__file__).parents[1] / "results" / "cluster-xeon-amx.json"


@dataclass(frozen=True)
class Arrival:
    """A request of a trace."""

    time: float
    tokens: np.ndarray[Any, Any]
    output: int
    session: int


def conversation(folder: Path, limit: int | None) -> list[Arrival]:
    """Mooncake's trace; a session is what begins with the same blocks after those that all have."""
    path = folder / "mooncake_conversation.jsonl.gz"
    with gzip.open(path, "rt") as lines:
        said = [json.loads(line) for line in lines][:limit]
    random, prompts = Random(0), (request for tick in mooncake(path, limit) for request in tick)
    arrivals = [
        # Times are of ticks of three seconds: within one they are spread out.
        Arrival(
            request["timestamp"] / 1000 + random.random() * 3,
            prompt.tokens,
            max(1, request["output_length"]),
            request["hash_ids"][1] if len(request["hash_ids"]) > 1 else request["hash_ids"][0],
        )
        for request, prompt in zip(said, prompts, strict=True)
    ]
    return sorted(arrivals, key=lambda arrival: arrival.time)


def questions(folder: Path, _: int | None) -> list[Arrival]:
    """BBH in a random order, a Poisson process; a session is a task's examples."""
    random, now, arrivals = Random(0), 0.0, []
    prompts = bbh(folder / "bbh_text.tar.gz", BLOCK_SIZE, 1, 1)
    random.shuffle(prompts)
    for prompt in prompts:
        now += random.expovariate(1.0)
        arrivals.append(Arrival(now, prompt.tokens, 1 + random.randrange(200), prompt.block_ids[3]))
    return arrivals


def stretched(arrivals: list[Arrival], costs: Costs, num_replicas: int, load: float) -> float:
    """Factor on times for which all prompts, computed without a cache, are `load` of the work."""
    work = sum(
        costs.seconds(len(arrival.tokens), 0, 0, 0)
        + arrival.output * (costs.row + costs.row_context * len(arrival.tokens) / 1e3)
        for arrival in arrivals
    )
    return work / (load * num_replicas) / (arrivals[-1].time - arrivals[0].time)


class Simulation:
    """Replicas, the router that hears them, and a policy."""

    def __init__(
        self, policy: str, num_replicas: int, num_blocks: int, costs: Costs, weight: float
    ) -> None:
        self.policy = policy
        self.later = Later()
        self.router = PrefixRouter(KIND, running_weight=weight)
        heard = Heard(self._events, self._first, self._end)
        self.replicas = {
            f"{n}": SimReplica(f"{n}", num_blocks, BLOCK_SIZE, costs, heard)
            for n in range(num_replicas)
        }
        for name, replica in self.replicas.items():
            # What is never removed may become more than there are blocks.
            capacity = 1 << 40 if policy == "no removals" else num_blocks
            self.router.join(ReplicaInfo(name, KIND, capacity))
            self.router.restore(name, replica.log.snapshot(Load()))
        self.random = Random(1)
        self.lag = 0.0 if policy == "exact" else LAG
        self.sent: dict[str, int] = dict.fromkeys(self.replicas, 0)
        self.expected = 0
        self.choose_seconds = 0.0

    def _events(self, now: float, replica: SimReplica, events: Events) -> None:
        if self.policy == "no removals":
            events = without_removals(events)
        self.later.at(now + self.lag, lambda: self.router.apply(replica.name, events))

    def _first(self, now: float, request: SimRequest) -> None:
        self.later.at(now + self.lag, lambda: self._begun(request))

    def _begun(self, request: SimRequest) -> None:
        if request.ticket is not None:
            self.router.begun(request.ticket, len(request.tokens), request.cached)

    def _end(self, now: float, request: SimRequest) -> None:
        if request.ticket is not None:
            self.later.at(now + self.lag, lambda: self.router.end(request.ticket))

    def send(self, number: int, arrival: Arrival) -> tuple[SimRequest, int]:
        """Where a request goes, and what waits there already."""
        for replica in self.replicas.values():
            replica.until(arrival.time)
        self.later.until(arrival.time)
        request = SimRequest(
            number, arrival.time, arrival.tokens, float(arrival.output), arrival.session
        )
        replica = self.replicas[POLICIES[self.policy](self, request)]
        queued = replica.queued
        replica.take(request)
        self.sent[replica.name] += 1
        return request, queued

    def finish(self) -> None:
        """Let all come to their ends."""
        for replica in self.replicas.values():
            replica.until(float("inf"))
        self.later.until(float("inf"))


def without_removals(events: Events) -> Events:
    """As a router without eviction events sees it: evicted blocks count as cached."""
    kinds = bytes(1 for _ in events.kinds)
    return Events(events.epoch, events.first, kinds, events.hashes, events.load)


def round_robin(simulation: Simulation, request: SimRequest) -> str:
    """In turn."""
    return f"{request.number % len(simulation.replicas)}"


def least_load(simulation: Simulation, request: SimRequest) -> str:
    """Fewest requests that run or wait."""
    replicas = simulation.replicas.values()
    return min(
        replicas, key=lambda replica: (len(replica.waiting) + len(replica.running), replica.now)
    ).name


def sticky(simulation: Simulation, request: SimRequest) -> str:
    """Always the same for a session."""
    return f"{Random(request.session).randrange(len(simulation.replicas))}"


def ours(simulation: Simulation, request: SimRequest) -> str:
    """`PrefixRouter`."""
    start = time.perf_counter()
    choice = simulation.router.choose(request.tokens)
    simulation.choose_seconds += time.perf_counter() - start
    request.ticket = simulation.router.begin(choice)
    simulation.expected += choice.num_hits * BLOCK_SIZE
    return choice.replica


def exact(simulation: Simulation, request: SimRequest) -> str:
    """The replica that computes the prompt first, by a look into every cache and queue."""

    def wait(replica: SimReplica) -> tuple[int, int]:
        missing = len(request.tokens) - replica.hits(request.tokens)
        return replica.queued + missing, len(replica.running)

    return min(simulation.replicas.values(), key=wait).name


POLICIES: dict[str, Callable[[Simulation, SimRequest], str]] = {
    "round robin": round_robin,
    "least load": least_load,
    "sticky": sticky,
    "no removals": ours,
    "ours": ours,
    "exact": exact,
}


def endless(arrivals: list[Arrival]) -> float:
    """Share of prompt tokens that one cache without an end would have."""
    known: set[tuple[int, bytes]] = set()
    hits = 0
    for arrival in arrivals:
        parent, going = 0, True
        for start in range(0, len(arrival.tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            key = (parent, arrival.tokens[start : start + BLOCK_SIZE].tobytes())
            parent = hash(key)
            going = going and key in known
            hits += BLOCK_SIZE * going
            known.add(key)
    return hits / sum(len(arrival.tokens) for arrival in arrivals)


def simulate(
    policy: str,
    arrivals: list[Arrival],
    num_replicas: int,
    num_blocks: int,
    costs: Costs,
    weight: float = RUNNING_WEIGHT,
) -> dict[str, Any]:
    """The figures of one run; `weight` is the router's `running_weight`."""
    start = time.perf_counter()
    simulation = Simulation(policy, num_replicas, num_blocks, costs, weight)
    sent = [simulation.send(number, arrival) for number, arrival in enumerate(arrivals)]
    simulation.finish()
    requests = [request for request, _ in sent]
    prompt = sum(len(request.tokens) for request in requests)
    waits = np.array([request.first - request.arrival for request in requests])
    queued = np.array([tokens for _, tokens in sent])
    end = max(replica.now for replica in simulation.replicas.values())
    counts = np.array(list(simulation.sent.values()))
    figures: dict[str, Any] = {
        "hit_rate": sum(request.cached for request in requests) / prompt,
        "queued_p50": float(np.quantile(queued, 0.5)),
        "queued_p99": float(np.quantile(queued, 0.99)),
        "first_token_mean": float(waits.mean()),
        "first_token_p99": float(np.quantile(waits, 0.99)),
        "busy": sum(replica.busy for replica in simulation.replicas.values())
        / (num_replicas * end),
        "imbalance": float(counts.max() / counts.mean()),
        "seconds": time.perf_counter() - start,
    }
    if simulation.choose_seconds:
        figures["choose_us"] = simulation.choose_seconds / len(requests) * 1e6
        figures["expected_rate"] = simulation.expected / prompt
    return figures


def works(arguments: argparse.Namespace) -> Iterator[tuple[str, list[Arrival], int]]:
    """What is simulated: its name, requests, blocks of a replica."""
    if "conversation" in arguments.work:
        arrivals = conversation(arguments.data, arguments.most)
        yield "conversation", arrivals, arguments.blocks
    if "questions" in arguments.work:
        yield "questions", questions(arguments.data, None), arguments.blocks // 32


def main() -> None:
    """Simulate, print, and write down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--replicas", type=int, nargs="+", default=[16])
    parser.add_argument("--work", nargs="+", default=["conversation", "questions"])
    parser.add_argument("--policy", nargs="+", default=list(POLICIES))
    parser.add_argument("--blocks", type=int, default=32_768, help="of a replica")
    parser.add_argument("--load", type=float, default=0.9, help="of the work without a cache")
    parser.add_argument("--weight", type=float, nargs="+", default=[RUNNING_WEIGHT])
    parser.add_argument("--most", type=int, help="requests of the trace")
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    written = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    costs = Costs(**written["costs"])
    for name, arrivals, num_blocks in works(arguments):
        bound = endless(arrivals)
        for num_replicas in arguments.replicas:
            factor = stretched(arrivals, costs, num_replicas, arguments.load)
            scaled = [
                Arrival(arrival.time * factor, arrival.tokens, arrival.output, arrival.session)
                for arrival in arrivals
            ]
            for policy in arguments.policy:
                for weight in arguments.weight:
                    figures = simulate(policy, scaled, num_replicas, num_blocks, costs, weight)
                    figures |= {"bound": bound, "num_blocks": num_blocks, "load": arguments.load}
                    key = f"{name}, {num_replicas} replicas"
                    who = policy if weight == RUNNING_WEIGHT else f"{policy}, {weight}"
                    written.setdefault(key, {})[who] = figures
                    shown = {figure: round(value, 4) for figure, value in figures.items()}
                    print(key, who, shown, flush=True)
                    arguments.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
