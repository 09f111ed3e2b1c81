"""The time of vLLM's Scheduler with its own manager, with an early return in it, and with ours.

    .venv-peers/bin/python -m benches.integrations.scheduler            # two minutes
    .venv-peers/bin/python -m benches.integrations.scheduler --quick    # does it run

from the root of the repository. The model is a stub that takes no time; the Scheduler is vLLM's
with its settings for a GPU (blocks of 16, chunked prefill, prefix caching). The early return is an
idea of vLLM's pull request 29206: a running request that needs and fills no block makes no call.

Decode: so many requests run, with prompts of 512 tokens; medians of steps, in microseconds.
`allocate_slots` is timed in separate steps, as the clock costs time. Long prompts: 90,000 tokens,
of which the first 96 % are cached; from the request's arrival (with its hashes, if they are needed)
to the end of the `schedule()` that admits it; medians, in milliseconds. The request before it has
ended by then. `nothing` is a manager that finds and allocates no blocks: its figures are vLLM's own
work, a floor.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from benches.peers.report import machine
from tests.peers.world import Settings, hasher, make_request, make_scheduler, managers

STOCK, EARLY, OURS, NOTHING = "stock", "early return", "ours", "nothing"
BLOCK = 16
LONG_GOAL = 20


def early_return() -> type:
    """vLLM's manager with the early return."""
    own: Any = managers()[0]

    class Early(own):  # type: ignore[misc]
        def __init__(self, *args: Any, **settings: Any) -> None:
            super().__init__(*args, **settings)
            [self._layers] = self.coordinator.single_type_managers

        def allocate_slots(self, request: Any, num_new_tokens: int, *args: Any, **more: Any) -> Any:
            blocks = self._layers.req_to_blocks.get(request.request_id)
            if blocks and not args and "new_computed_blocks" not in more:
                end = request.num_computed_tokens + num_new_tokens
                slots = end + more.get("num_lookahead_tokens", 0)
                full = self._layers.num_cached_block.get(request.request_id, 0) + 1
                if slots <= len(blocks) * BLOCK and end < full * BLOCK:
                    return self.empty_kv_cache_blocks
            return super().allocate_slots(request, num_new_tokens, *args, **more)

    return Early


def nothing() -> type:
    """vLLM's manager, that does nothing."""
    own: Any = managers()[0]

    class Nothing(own):  # type: ignore[misc]
        def get_computed_blocks(self, request: Any) -> Any:
            return self.empty_kv_cache_blocks, 0, 0

        def allocate_slots(self, *args: Any, **more: Any) -> Any:
            return self.empty_kv_cache_blocks

    return Nothing


def settings_of(arm: str, **more: Any) -> Settings:
    """A Scheduler with one of the managers."""
    make = {EARLY: early_return, NOTHING: nothing}.get(arm)
    own = make() if make else None
    return Settings(ours=arm == OURS, own=own, block_size=BLOCK, **more)


def outputs_of(step: Any) -> Any:
    """The stub: every request gets a token, whichever."""
    from vllm.v1.outputs import ModelRunnerOutput

    ids = list(step.num_scheduled_tokens)
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={name: index for index, name in enumerate(ids)},
        sampled_token_ids=[[7]] * len(ids),
        pooler_output=[],
    )


class Timed:
    """A callable, and the seconds that went into it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.seconds = 0.0

    def __call__(self, *args: Any, **more: Any) -> Any:
        """As the function."""
        start = perf_counter()
        result = self._function(*args, **more)
        self.seconds += perf_counter() - start
        return result


def decode(arm: str, running: int, steps: int, folder: Path) -> dict[str, float]:
    """Microseconds of a step in which everybody decodes."""
    chance = random.Random(running)
    settings = settings_of(
        arm,
        num_blocks=running * 64 + 2,
        max_num_seqs=running,
        budget=max(running * 2, 65536),
        max_model_len=2048,
    )
    scheduler, hashes = make_scheduler(settings, folder), hasher(BLOCK, arm == OURS)
    for number in range(running):
        prompt = [chance.randrange(50_000) for _ in range(chance.randint(496, 512))]
        scheduler.add_request(make_request(f"r{number}", prompt, hashes, max_tokens=1000))
    while scheduler.waiting or any(request.is_prefill_chunk for request in scheduler.running):
        step = scheduler.schedule()
        scheduler.update_from_output(step, outputs_of(step))
    times: dict[str, list[float]] = {"schedule": [], "update_from_output": []}
    for _ in range(steps):
        start = perf_counter()
        step = scheduler.schedule()
        scheduled = perf_counter()
        result = outputs_of(step)
        updating = perf_counter()
        scheduler.update_from_output(step, result)
        times["schedule"].append(scheduled - start)
        times["update_from_output"].append(perf_counter() - updating)
    assert len(step.num_scheduled_tokens) == running
    manager, shares = scheduler.kv_cache_manager, []
    timed = manager.allocate_slots = Timed(manager.allocate_slots)
    for _ in range(steps):
        timed.seconds = 0.0
        step = scheduler.schedule()
        shares.append(timed.seconds)
        scheduler.update_from_output(step, outputs_of(step))
    times["allocate_slots"] = shares
    return {name: median(values) * 1e6 for name, values in times.items()}


def long_prompts(arm: str, rounds: int, folder: Path, length: int = 90_000) -> dict[str, float]:
    """Milliseconds from the arrival of a long prompt to its schedule, and tokens of it found."""
    chance = random.Random(1)
    settings = settings_of(
        arm, num_blocks=4 * length // BLOCK, budget=131_072, max_model_len=131_072
    )
    scheduler, hashes = make_scheduler(settings, folder), hasher(BLOCK, arm in (OURS, NOTHING))
    common = [chance.randrange(50_000) for _ in range(length * 96 // 100)]
    times, hits = [], []
    for number in range(rounds + 1):
        tail = [chance.randrange(50_000) for _ in range(length - len(common))]
        prompt = common + tail
        start = perf_counter()
        request = make_request(f"r{number}", prompt, hashes, max_tokens=1)
        scheduler.add_request(request)
        step = scheduler.schedule()
        times.append(perf_counter() - start)
        hits.append(step.scheduled_new_reqs[0].num_computed_tokens)
        scheduler.update_from_output(step, outputs_of(step))
        scheduler.schedule()
        del request, step  # and the prompt's integers: not in the time of the next one
    return {"milliseconds": median(times[1:]) * 1e3, "found": median(hits[1:])}


def main() -> None:
    """Measure, print tables in markdown, keep the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few steps of few requests")
    parser.add_argument("--only", choices=("decode", "long"), help="one of the two parts")
    parser.add_argument("--rounds", type=int, default=3, help="the arms take turns so often")
    parser.add_argument("--json", type=Path, help="where the figures are kept")
    options = parser.parse_args()
    rounds = 1 if options.quick else options.rounds
    kept: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if options.only != "long":
            sizes, steps = ((16,), 20) if options.quick else ((256, 1024, 3000), 150)
            kept["decode"] = [decodes(running, steps, rounds, folder) for running in sizes]
        if options.only != "decode":
            arms, prompts = (STOCK, OURS, NOTHING), 3 if options.quick else 10
            kept["long prompts"] = in_turn(
                arms, rounds, lambda arm: long_prompts(arm, prompts, folder)
            )
    show(kept)
    if options.json:
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


def decodes(running: int, steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """The figures of a batch, arm by arm."""
    arms = (STOCK, EARLY, OURS)
    figures = in_turn(arms, rounds, lambda arm: decode(arm, running, steps, folder))
    return {"running": running} | figures


def in_turn(
    arms: tuple[str, ...], rounds: int, measure: Callable[[str], dict[str, float]]
) -> dict[str, dict[str, float]]:
    """The arms take turns; the median of the rounds, figure by figure."""
    rounds_of: dict[str, list[dict[str, float]]] = {arm: [] for arm in arms}
    for _ in range(rounds):
        for arm, rows in rounds_of.items():
            rows.append(measure(arm))
    return {arm: best(rows) for arm, rows in rounds_of.items()}


def best(rounds: list[dict[str, float]]) -> dict[str, float]:
    """The median of the rounds, figure by figure."""
    return {name: median(turn[name] for turn in rounds) for name in rounds[0]}


def show(kept: dict[str, Any]) -> None:
    """A table of decodes, and lines on long prompts."""
    if rows := kept.get("decode"):
        heads = (STOCK, EARLY, OURS, "stock / ours", "early / ours")
        print(f"| running | | {' | '.join(heads)} |\n|---:|---|---:|---:|---:|---:|---:|")
        for row in rows:
            for name in ("schedule", "allocate_slots", "update_from_output"):
                stock, early, ours = (row[arm][name] for arm in (STOCK, EARLY, OURS))
                ratios = f"{stock / ours:.2f} | {early / ours:.2f}"
                cells = f"{stock:,.0f} | {early:,.0f} | {ours:,.0f} | {ratios}"
                print(f"| {row['running']:,} | `{name}` | {cells} |")
    if figures := kept.get("long prompts"):
        stock, ours, floor = (figures[arm]["milliseconds"] for arm in (STOCK, OURS, NOTHING))
        verdict = "met" if stock / ours >= LONG_GOAL else "NOT MET"
        print(f"\nlong prompts: {stock:.2f} ms, ours {ours:.2f} ms, without any {floor:.2f} ms")
        print(f"{stock / ours:.1f} times as fast (goal {LONG_GOAL}: {verdict})")
        counts = (figures[arm]["found"] for arm in (STOCK, OURS))
        print("found of 90,000 tokens: {:,.0f}, ours {:,.0f}".format(*counts))


if __name__ == "__main__":
    main()
