"""vLLM's `KVCacheManager` behind the protocol of rust/kv-conformance: `make conformance`.

It answers a line for each line, in the environment of `make bench`. With `--promise deduplicates`,
it makes a promise that vLLM does not make, and the suite shows the difference.
"""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
sys.path.insert(0, str(Path(__file__).parents[2]))

from vllm.v1.request import Request, RequestStatus

from benches.peers.adapters.vllm import PARAMETERS, make_hasher, make_manager

PROMISES = "reuses_live_prefixes"
"""Equal blocks that two requests compute at the same time stay apart: block tables change only at
their end. There are no forks: n > 1 makes requests that share the blocks of the prompt."""


class Adapter:
    """A pool with one group of full attention layers.

    The calls are those of `kv_conformance::BlockManager`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.manager = make_manager(num_blocks, block_size)
        self.hasher = make_hasher(block_size)
        self.requests: dict[int, Request] = {}
        self.step: list[tuple[Request, int]] = []
        """Planned requests, and how many tokens they will have computed."""

    def add(self, id: int, namespace: int, *tokens: int) -> None:
        """A namespace is a `cache_salt`."""
        self.requests[id] = Request(
            str(id),
            list(tokens),
            PARAMETERS,
            None,
            cache_salt=str(namespace),
            block_hasher=self.hasher,
        )

    def prefill(self, id: int, max_tokens: int) -> tuple[int, ...] | None:
        """As the scheduler does for a waiting request, or for the next chunk of a running one."""
        request = self.requests[id]
        before = request.num_computed_tokens
        blocks, cached = None, 0
        if before == 0:
            blocks, cached, _ = self.manager.get_computed_blocks(request)
        new = min(max_tokens, request.num_tokens - before - cached)
        if self.manager.allocate_slots(request, new, cached, blocks) is None:
            return None
        request.status = RequestStatus.RUNNING
        self.step.append((request, before + cached + new))
        return cached, new

    def decode(self, id: int) -> tuple[int, ...] | None:
        """One more token of a running request."""
        request = self.requests[id]
        if self.manager.allocate_slots(request, 1) is None:
            return None
        self.step.append((request, request.num_computed_tokens + 1))
        return ()

    def copies(self) -> tuple[int, ...]:
        """There are none: partly filled blocks are not shared."""
        return ()

    def commit(self, *sampled: int) -> None:
        """Moves the counts, as the scheduler does; blocks were cached when they were allocated."""
        for request, computed in self.step:
            request.num_computed_tokens = computed
        self.step = []
        for id, token in zip(sampled[::2], sampled[1::2], strict=True):
            self.requests[id].append_output_token_ids(token)

    def append(self, id: int, *tokens: int) -> None:
        """Known tokens."""
        self.requests[id].append_output_token_ids(list(tokens))

    def preempt(self, id: int) -> None:
        """As the scheduler does."""
        request = self.requests[id]
        self.manager.free(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0

    def free(self, id: int) -> None:
        """Ends a request."""
        self.manager.free(self.requests.pop(id))

    def table(self, id: int) -> list[int]:
        """Without the null block, blocks are numbered from 0."""
        (blocks,) = self.manager.get_block_ids(str(id))
        return [block - 1 for block in blocks]

    def num_computed(self, id: int) -> tuple[int, ...]:
        """Tokens computed by committed steps."""
        return (self.requests[id].num_computed_tokens,)

    def available(self) -> tuple[int, ...]:
        """Free blocks, cached ones among them."""
        return (self.manager.block_pool.get_num_free_blocks(),)


def main() -> None:
    """Answer calls until there are no more."""
    parser = argparse.ArgumentParser(description="vLLM's KVCacheManager for kv-conformance.")
    parser.add_argument(
        "--promise", action="append", default=[], help="one that vLLM does not make"
    )
    promises = " ".join([PROMISES, *parser.parse_args().promise])
    adapter = Adapter(1, 1)
    for line in sys.stdin:
        call, *words = line.split()
        numbers = [int(word) for word in words]
        try:
            if call == "new":
                adapter = Adapter(*numbers)
                answer = promises
            else:
                method: Callable[..., list[int] | tuple[int, ...] | None] = getattr(adapter, call)
                answered = method(*numbers)
                refused = answered is None and call in ("prefill", "decode")
                answer = "-" if refused else " ".join(map(str, answered or ()))
        except Exception as error:  # the suite shows it as a difference
            text = " ".join(str(error).split())
            answer = f"error {type(error).__name__}: {text}"
        print(answer, flush=True)


if __name__ == "__main__":
    main()
