"""Costs of the router: a choice, a step's events, the memory of its index.

python -m benches.cluster.router_costs
"""

import json
from time import perf_counter
from typing import Any

import numpy as np

from benches.cluster.simulate import RESULTS
from pyengine.cluster.messages import CacheFormat, Events, ReplicaInfo, Snapshot
from pyengine.cluster.prefix_router import PrefixRouter

KIND = CacheFormat("model", 16, 0)
NUM_REPLICAS = 16
TOKENS = 8192
CONTENTS = 10_000_000
BATCH = 1000
ROUNDS = 300


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/status") as lines:
        [kib] = [line.split()[1] for line in lines if line.startswith("VmRSS")]
    return int(kib) * 1024


def names(random: np.random.Generator, count: int) -> bytes:
    """Events of blocks that no replica has yet."""
    return random.bytes(16 * count)


def spread(seconds: list[float]) -> dict[str, float]:
    """Microseconds."""
    micros = np.array(seconds) * 1e6
    return {name: float(np.quantile(micros, at)) for name, at in (("median", 0.5), ("p99", 0.99))}


def main() -> None:
    """Measure, print, write down."""
    random = np.random.default_rng(0)
    before = resident()
    router = PrefixRouter(KIND)
    share = CONTENTS // NUM_REPLICAS
    for number in range(NUM_REPLICAS):
        router.join(ReplicaInfo(f"{number}", KIND, share + 10 * ROUNDS * BATCH))
        held = names(random, share)
        router.restore(f"{number}", Snapshot("epoch", 0, held))
        del held
    assert router.num_hashes == CONTENTS
    figures: dict[str, Any] = {"contents": router.num_hashes, "bytes": resident() - before}

    applied, ends = [], dict.fromkeys(range(NUM_REPLICAS), 0)
    for number in range(ROUNDS):
        replica = number % NUM_REPLICAS
        batch = Events("epoch", ends[replica], b"\1" * BATCH, names(random, BATCH))
        start = perf_counter()
        router.apply(f"{replica}", batch)
        applied.append(perf_counter() - start)
        gone = Events("epoch", batch.end, b"\0" * BATCH, batch.hashes)
        start = perf_counter()
        router.apply(f"{replica}", gone)
        applied.append(perf_counter() - start)
        ends[replica] = gone.end
    figures["apply_1000_us"] = spread(applied)

    for kind in ("list", "array"):
        chosen = []
        for number in range(ROUNDS):
            tokens: Any = random.integers(0, 50_000, TOKENS, dtype=np.int64)
            known = router._index.block_hashes(tokens)
            replica = number % NUM_REPLICAS
            count = len(known) // 16
            router.apply(f"{replica}", Events("epoch", ends[replica], b"\1" * count, known))
            ends[replica] += count
            tokens = tokens.tolist() if kind == "list" else tokens
            start = perf_counter()
            choice = router.choose(tokens)
            chosen.append(perf_counter() - start)
            assert choice.num_hits == count
        figures[f"choose_8192_{kind}_us"] = spread(chosen)
    print(json.dumps(figures, indent=1))
    written = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    RESULTS.write_text(json.dumps({**written, "router": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
