"""`make cluster`: two replicas of the embedded model behind the router, under a load that shares.

Prompts are families: a long beginning that a family has in common, then a different question each.
The last line says how the requests were divided, and how many of their tokens were cached.
"""

import argparse
import asyncio
import subprocess
import sys
import time
from collections import Counter
from random import Random
from typing import Any

import httpx2

SERVE = "from pyengine.cli import main; main()"


async def load(
    address: str, families: int, per_family: int, prefix: int, at_once: int
) -> dict[str, Any]:
    """Send them all in a random order, so many at once; what the answers say."""
    random = Random(0)
    begins = [[random.randrange(1000, 40_000) for _ in range(prefix)] for _ in range(families)]
    order = [family for family in range(families) for _ in range(per_family)]
    random.shuffle(order)
    gate = asyncio.Semaphore(at_once)
    seen: Counter[str] = Counter()

    async with httpx2.AsyncClient(timeout=600) as client:

        async def ask(family: int) -> None:
            own = [random.randrange(1000, 40_000) for _ in range(24)]
            body = {"prompt": begins[family] + own, "max_tokens": 16, "temperature": 0}
            async with gate:
                answer = await client.post(f"{address}/v1/completions", json=body)
            answer.raise_for_status()
            usage = answer.json()["usage"]
            seen["prompt"] += usage["prompt_tokens"]
            seen["cached"] += usage["prompt_tokens_details"]["cached_tokens"]

        start = time.monotonic()
        await asyncio.gather(*map(ask, order))
        seconds = time.monotonic() - start
        text = (await client.get(f"{address}/metrics")).text
    routed = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith("pyengine:router_replica_routed{")
    ]
    return {
        "requests": len(order),
        "seconds": seconds,
        "cached": seen["cached"] / seen["prompt"],
        "largest": max(routed) / sum(routed),
    }


async def until_healthy(address: str, server: "subprocess.Popen[bytes]") -> None:
    """Raises if it ends before."""
    async with httpx2.AsyncClient() as client:
        while server.poll() is None:
            try:
                if (await client.get(f"{address}/health")).status_code == 200:
                    return
            except httpx2.TransportError:
                await asyncio.sleep(0.3)
    raise SystemExit(f"the server has ended with status {server.returncode}")


def main() -> None:
    """Start, load, say, end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--families", type=int, default=8)
    parser.add_argument("--each", type=int, default=20)
    parser.add_argument("--prefix", type=int, default=1024, help="tokens")
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--num-blocks", type=int, default=420, help="of 16 tokens, each replica's")
    parser.add_argument("--port", type=int, default=8372)
    arguments = parser.parse_args()
    options = {
        "--replicas": arguments.replicas,
        "--port": arguments.port,
        "--num-blocks": arguments.num_blocks,
        "--block-size": 16,
        "--log-format": "none",
    }
    words = [f"{word}" for pair in options.items() for word in pair]
    server = subprocess.Popen([sys.executable, "-c", SERVE, "serve", *words])
    address = f"http://127.0.0.1:{arguments.port}"
    try:
        asyncio.run(until_healthy(address, server))
        figures = asyncio.run(
            load(
                address,
                arguments.families,
                arguments.each,
                arguments.prefix,
                arguments.at_once,
            )
        )
    finally:
        server.terminate()
        server.wait(120)
    print(
        f"{figures['requests']} requests in {figures['seconds']:.0f} s; {figures['cached']:.0%} of "
        f"the prompt tokens were cached; the busiest replica had {figures['largest']:.0%} of the "
        "requests"
    )


if __name__ == "__main__":
    main()
