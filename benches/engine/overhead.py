"""What a step of the engine costs beside the model, and where it goes.

    .venv/bin/python -m benches.engine.overhead [--quick]
    .venv-peers/bin/python -m benches.engine.overhead       # with vLLM's manager beside it

from the root of the repository. The model is a stub that gives the same random logits in every
step; everything else is the real engine: manager, scheduler, input arrays, sampler, outputs. All
requests decode, nobody wants text. The pool (65,536 blocks of 16) is full of other prompts, so
that every new block evicts one. Prompts have 512 tokens and some, so that a sixteenth of the
requests takes a block in each step.

The vocabulary has 128 tokens, so that what is timed is the engine and not the search for the
largest of 49,152 logits, which is memory traffic that any engine has; that is a row of its own.
vLLM's column is `KVCacheManager` alone: `allocate_slots` and `append_output_token_ids` for every
request of the same step, as `benches/peers` calls it; no scheduler, no sampling, no outputs.

A table goes to standard output, everything to `benches/results/engine-overhead.json`.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from time import perf_counter_ns as clock
from typing import Any

import numpy as np
import torch

from benches.peers.report import libraries, machine
from benches.peers.sampling import Effort, Spread, Stream, interleave
from pyengine.cache import BlockManager
from pyengine.core import SamplingParams
from pyengine.engine import Engine, ModelFacts, Pipeline, Prompt
from pyengine.runner import Forward, InputBuffers, RunnerLimits, StepLogits
from pyengine.scheduler import Scheduler, SchedulerLimits

ROOT = Path(__file__).parents[2]
NUM_BLOCKS, BLOCK, PROMPT = 65_536, 16, 512
STEPS_PER_START, STEPS_PER_OPERATION = 256, 16
SIZES = (1, 32, 256, 1024)
SMALL, SMOLLM2 = 128, 49_152
PARTS = ("schedule", "fill", "sample", "commit", "outputs")
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 1}
GOAL_US = 300
VLLM = "vLLM manager"


class StubRunner:
    """Fills the inputs as the real runner does, and says what it always says."""

    def __init__(self, limits: RunnerLimits, vocab_size: int) -> None:
        self.buffers = InputBuffers(limits, BLOCK, torch.device("cpu"))
        generator = torch.Generator().manual_seed(0)
        self.logits = torch.randn(limits.max_num_seqs, vocab_size, generator=generator)

    def prepare(self, plan: Any, *, extra_rows: Any = None) -> Forward:
        """Logits of a step, without a model."""
        plan.copies()
        count = len(self.buffers.fill(plan).upload().logits_indices)
        return lambda _: StepLogits(self.logits[:count], self.logits[:0])


class Service:
    """An engine with `count` requests that decode for ever, and `waiting` that find no seat."""

    def __init__(self, count: int, vocab_size: int, waiting: int = 0) -> None:
        limits = SchedulerLimits(max_num_batched_tokens=65_536, max_num_seqs=count)
        self.manager = full_pool()
        longest = PROMPT + BLOCK + 2 * STEPS_PER_START
        runner_limits = RunnerLimits(
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_num_seqs=count,
            max_blocks_per_seq=-(-longest // BLOCK),
        )
        self.scheduler = Scheduler(self.manager, limits)
        self.runner = StubRunner(runner_limits, vocab_size)
        facts = ModelFacts(
            vocab_size=vocab_size,
            eos_token_ids=frozenset({2}),
            max_model_len=longest,
            limited_by="the benchmark",
            max_num_seqs=count,
        )
        self.pipeline = Pipeline(self.runner)
        self.engine = Engine(self.manager, self.scheduler, self.pipeline, facts)
        self.count, self.waiting, self.vocab_size = count, waiting, vocab_size
        self.random = Random(0)

    @contextmanager
    def started(self, settings: dict[str, Any]) -> Iterator[None]:
        """The requests in the middle of their answers; none is left behind."""
        params = SamplingParams(max_tokens=None, ignore_eos=True, **settings)
        names = [str(number) for number in range(self.count + self.waiting)]
        for number, name in enumerate(names):
            tokens = self.random.choices(range(self.vocab_size), k=PROMPT + number % BLOCK)
            self.engine.add_request(name, Prompt(token_ids=tokens), params)
        while self.engine.stats().num_running < self.count:
            self.engine.step()
        try:
            yield
        finally:
            self.engine.abort(names)


def full_pool() -> BlockManager:
    """A pool in which every block holds something that nobody uses."""
    manager = BlockManager(NUM_BLOCKS, BLOCK)
    rng = np.random.default_rng(0)
    for _ in range(NUM_BLOCKS * BLOCK // 8192):
        sequence = manager.sequence(rng.integers(0, SMOLLM2, 8192))
        plan = manager.begin_step(8192)
        plan.prefill(sequence, 8192)
        plan.commit([0])
        sequence.free()
    return manager


def steps(service: Service, settings: dict[str, Any]) -> Stream:
    """Nanoseconds of a step: the mean of 16, a block for each request."""
    step = service.engine.step
    while True:
        with service.started(settings):
            for _ in range(STEPS_PER_START // STEPS_PER_OPERATION):
                start = clock()
                for _ in range(STEPS_PER_OPERATION):
                    step()
                yield ((clock() - start) / STEPS_PER_OPERATION,)


def profile(service: Service, settings: dict[str, Any]) -> Stream:
    """The parts of a step in the order of `PARTS`; what a timer costs is in them."""
    spent = dict.fromkeys(PARTS, 0)

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timer(*args: Any, **kwargs: Any) -> Any:
            start = clock()
            try:
                return call(*args, **kwargs)
            finally:
                spent[part] += clock() - start

        return timer

    targets: Any = ((service.scheduler, "schedule"), (service.scheduler, "commit"))
    for target, part in targets:
        setattr(target, part, timed(part, getattr(target, part)))
    runner: Any = service.runner
    sampler: Any = service.pipeline._sampler
    runner.prepare = timed("fill", runner.prepare)
    sampler.launch = timed("sample", sampler.launch)
    while True:
        with service.started(settings):
            for _ in range(STEPS_PER_START // STEPS_PER_OPERATION):
                spent.update(dict.fromkeys(PARTS, 0))
                start = clock()
                for _ in range(STEPS_PER_OPERATION):
                    service.engine.step()
                whole = clock() - start
                spent["outputs"] = whole - sum(spent.values())
                yield tuple(spent[part] / STEPS_PER_OPERATION for part in PARTS)


def search(count: int, vocab_size: int) -> Stream:
    """The largest logit of every row and nothing else: the floor of greedy sampling."""
    logits = torch.randn(count, vocab_size)
    while True:
        start = clock()
        logits.argmax(1).tolist()
        yield (clock() - start,)


def vllm_steps(count: int) -> Stream:
    """vLLM's manager, the same step."""
    from benches.peers.adapters.vllm import Vllm

    rng = np.random.default_rng(0)
    manager = Vllm(NUM_BLOCKS, BLOCK)
    for _ in range(NUM_BLOCKS * BLOCK // 8192):
        manager.cold(manager.prompt(rng.integers(0, SMOLLM2, 8192)))
    while True:
        lengths = [PROMPT + number % BLOCK for number in range(count)]
        manager.start([manager.prompt(rng.integers(0, SMOLLM2, length)) for length in lengths])
        for _ in range(STEPS_PER_START // STEPS_PER_OPERATION):
            tokens = [manager.sampled(rng.integers(0, SMOLLM2, count)) for _ in range(16)]
            start = clock()
            for sampled in tokens:
                manager.plan()
                manager.commit(sampled)
            yield ((clock() - start) / STEPS_PER_OPERATION,)
        manager.stop()


def streams(count: int, *, with_vllm: bool) -> dict[str, Stream]:
    """Everything that takes turns at one batch size."""
    found = {
        "greedy": steps(Service(count, SMALL), GREEDY),
        "greedy, others waiting": steps(Service(count, SMALL, waiting=64), GREEDY),
        "sampled": steps(Service(count, SMALL), SAMPLED),
        "greedy, parts": profile(Service(count, SMALL), GREEDY),
        "sampled, parts": profile(Service(count, SMALL), SAMPLED),
        "greedy, 49,152 logits": steps(Service(count, SMOLLM2), GREEDY),
        "argmax of 49,152": search(count, SMOLLM2),
    }
    if with_vllm:
        found[VLLM] = vllm_steps(count)
    return found


def missing_vllm() -> str | None:
    """Why vLLM's manager is not there; None if it is."""
    try:
        import benches.peers.adapters.vllm  # noqa: F401
    except Exception as error:  # whatever importing it raises is the reason
        return f"{type(error).__name__}: {error}"
    return None


def figures(rounds: list[tuple[float, ...]]) -> list[dict[str, float]]:
    """Microseconds of each part: median and quartiles."""
    spreads = [Spread.of([ns / 1000 for ns in column]) for column in zip(*rounds, strict=True)]
    return [{"median": s.median, "q1": s.q1, "q3": s.q3} for s in spreads]


def measure(sizes: tuple[int, ...], effort: Effort, *, with_vllm: bool) -> dict[str, Any]:
    """By batch size and row: microseconds of a step, or of its parts."""
    results: dict[str, Any] = {}
    for count in sizes:
        print(f"{count} running", file=sys.stderr)
        rounds = interleave(streams(count, with_vllm=with_vllm), effort, lambda: None)
        results[str(count)] = {name: figures(each) for name, each in rounds.items()}
        if VLLM in rounds:
            pairs = zip(rounds[VLLM], rounds["greedy"], strict=False)
            ratio = Spread.of([theirs[0] / ours[0] for theirs, ours in pairs])
            results[str(count)]["ratio to vLLM"] = [{"median": ratio.median}]
    return results


def table(results: dict[str, Any], missing: str | None) -> Iterator[str]:
    """Two tables in markdown: whole steps, and their parts."""
    sizes = list(results)
    yield "| us per step | " + " | ".join(f"{size} running" for size in sizes) + " |"
    yield "|---|" + "---|" * len(sizes)
    for name in results[sizes[0]]:
        if not name.endswith("parts"):
            cells = [f"{results[size][name][0]['median']:,.1f}" for size in sizes]
            yield f"| {name} | " + " | ".join(cells) + " |"
    if missing:
        yield f"\nvLLM's manager: missing ({missing})"
    for name in ("greedy, parts", "sampled, parts"):
        yield f"\n| {name}, us | " + " | ".join(PARTS) + " |"
        yield "|---|" + "---|" * len(PARTS)
        for size in sizes:
            cells = [f"{part['median']:,.1f}" for part in results[size][name]]
            yield f"| {size} running | " + " | ".join(cells) + " |"
    if "256" in results:
        found = results["256"]["greedy"][0]["median"]
        answer = "met" if found <= GOAL_US else "not met"
        yield f"\n256 running, greedy: {found:.0f} us of {GOAL_US}: {answer}"


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds, 1 and 256 running")
    parser.add_argument("--results", default="engine-overhead", help="name of the JSON file")
    options = parser.parse_args()
    missing = missing_vllm()
    effort = Effort(5, 1.0) if options.quick else Effort(15, 3.0)
    sizes = (1, 256) if options.quick else SIZES
    results = measure(sizes, effort, with_vllm=missing is None)
    print("\n".join(table(results, missing)))
    target = ROOT / "benches/results" / f"{options.results}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine(), "libraries": libraries(), "vllm": missing, "us": results}
    target.write_text(json.dumps(record, indent=1) + "\n")
    print(f"\n{target.relative_to(ROOT)}", file=sys.stderr)


if __name__ == "__main__":
    main()
