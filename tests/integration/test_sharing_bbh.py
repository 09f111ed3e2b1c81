"""All prompts of BIG-Bench-Hard at once, grouped by task: what the same step would do twice.

Only the scheduler and the block manager run: every step is taken as computed. Without sharing
inside a step more than a quarter of the computed blocks are duplicates; with it none is stored or
computed.
"""

import json
import tarfile

import numpy as np
import numpy.typing as npt
import pytest

from pyengine.kv_cache import BlockManager, Stats
from pyengine.models.loader import tokenizer_of
from pyengine.models.source import resolve_source
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.integration.test_tokens_bbh import ARCHIVE, read
from tests.support.requests import make_sequence

pytestmark = pytest.mark.slow

BLOCK = 16
NUM_BLOCKS = 500_000  # nothing is evicted
LIMITS = SchedulerLimits(max_num_batched_tokens=16_384, max_num_seqs=512)
Tokens = npt.NDArray[np.int64]


@pytest.fixture(scope="module")
def prompts() -> list[Tokens]:
    """Every question behind the three examples of its task, task by task."""
    if not ARCHIVE.is_file():
        pytest.skip(f"{ARCHIVE} is not there; PYENGINE_TRACES names another folder")
    texts: list[str] = []
    with tarfile.open(ARCHIVE) as archive:
        names = [member.name for member in archive.getmembers()]
        for name in sorted(name for name in names if name.startswith("cot-prompts/")):
            if not name.endswith(".txt"):
                continue
            task = name.removeprefix("cot-prompts/").removesuffix(".txt")
            head = read(archive, name).split("-----\n", 1)[-1].strip()
            examples = json.loads(read(archive, f"bbh/{task}.json"))["examples"]
            texts += [f"{head}\n\nQ: {example['input']}\nA:" for example in examples]
    tokenizer = tokenizer_of(resolve_source(None))
    return [np.array(tokenizer.encode(text)) for text in texts]


def run(prompts: list[Tokens], *, in_flight_sharing: bool) -> Stats:
    """One token for every prompt."""
    manager = BlockManager(NUM_BLOCKS, BLOCK, in_flight_sharing=in_flight_sharing)
    scheduler = Scheduler(manager, LIMITS)
    for number, tokens in enumerate(prompts):
        scheduler.add(make_sequence(str(number), tokens))
    while (step := scheduler.schedule()) is not None:
        sampling = step.sampling_sequences
        step.plan.copies()
        scheduler.commit(step, [0] * len(sampling))
        scheduler.finish(sampling)
    manager.check()
    assert manager.stats().evicted_blocks == 0
    return manager.stats()


def distinct_blocks(prompts: list[Tokens]) -> int:
    """Full blocks that differ, with everything before them."""
    seen = set()
    for tokens in prompts:
        prefix = 0
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            prefix = hash((prefix, tokens[start : start + BLOCK].tobytes()))
            seen.add(prefix)
    return len(seen)


def test_no_block_is_stored_or_computed_twice(prompts: list[Tokens]) -> None:
    distinct = distinct_blocks(prompts)
    shared = run(prompts, in_flight_sharing=True)
    merged = run(prompts, in_flight_sharing=False)
    tokens = sum(len(tokens) for tokens in prompts)
    computed = merged.registered_blocks + merged.merged_blocks
    print(f"\n{len(prompts):,} prompts, {tokens:,} tokens, {distinct:,} distinct full blocks")
    print(
        f"with sharing: {shared.registered_blocks:,} blocks computed, "
        f"{shared.merged_blocks} merged, {shared.in_flight_blocks:,} shared in flight, "
        f"{shared.computed_tokens:,} tokens computed"
    )
    print(
        f"without: {computed:,} blocks computed, {merged.merged_blocks:,} of them duplicates "
        f"({merged.merged_blocks / computed:.1%}), {merged.computed_tokens:,} tokens computed"
    )
    assert (shared.registered_blocks, shared.merged_blocks) == (distinct, 0)
    assert shared.collisions == 0
    assert merged.registered_blocks == distinct
    assert merged.merged_blocks / computed > 0.2
