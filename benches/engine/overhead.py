"""The time of a step of the engine outside the model, by part.

    .venv/bin/python -m benches.engine.overhead [--quick] [--only TEXT] [--as before]
    .venv/bin/python -m benches.engine.overhead --show

from the root of the repository, on one thread. The model is a stub that gives random logits, made
beforehand; everything else is the real engine (`service.py`). Requests decode for ever, unless a
row says otherwise. The pool (65,536 blocks of 16) is full of other prompts, so that every new block
evicts one. Prompts have 512 tokens and some, so that a sixteenth of the requests takes a block in
each step.

- `greedy`: the vocabulary has 128 tokens, so that what is timed is the engine and not the search
  for the largest of 49,152 logits, which is memory traffic that any engine has. Nobody wants text.
- `text`: with a tokenizer of 128 of SmolLM2's tokens, whole words. Answers of 256 tokens, whose
  text is read at the end: that is in the time, shared among the steps. `read`: each request's new
  output is read after each step, as by a streaming reader.
- `top-p`: temperature 1 and top-p 0.9; `top-k`: temperature 1 and top-k 50.
- `arrivals`: text, read; four requests a step come and go on average, in Poisson's way, with 512
  tokens in and 64 out on average. Taking them in is timed too.
- with 49,152 and 151,936 tokens: as above, the text with SmolLM2's tokenizer as it is. `largest` is
  reading the logits and nothing else, the floor of these rows.

Further: accepting a prompt of 8,192 token ids, and aborting one of 50,000 waiting requests.

Microseconds, medians of rounds in which all take turns. A time is the processor's, which a busy
machine does not change much; the clock's is beside it in the file,
`benches/results/engine-overhead-MACHINE.json`. That file keeps columns: `--as NAME` fills one of
them ("now"), the table shows them all, and `--docs` puts it into docs/benchmarks/engine.md.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from time import perf_counter_ns, process_time_ns
from typing import Any

import numpy as np

from benches.engine.float_model import float_folder
from benches.engine.page import publish
from benches.engine.service import Ids, Service, Size, prepared_logits
from benches.peers.report import heading, libraries, machine, results_file, results_name
from benches.peers.sampling import Effort, Spread, Stream, interleave
from pyengine.cpu.threads import compute_alone
from pyengine.sampling_params import RequestOutputKind, SamplingParams

ROOT = Path(__file__).parents[2]
BLOCK, PROMPT, LONG = 16, 512, 8192
STEPS_PER_START, STEPS_PER_OPERATION = 256, 16
SIZES = (1, 32, 256, 1024)
RUNNING = 256
SMALL, SMOLLM2, QWEN = 128, 49_152, 151_936
WAITING = 50_000
ARRIVALS, MEAN_OUTPUT = 4, 64
PARTS = ("schedule", "fill", "sample", "commit", "outputs")
GREEDY: dict[str, Any] = {"temperature": 0}
TOP_P: dict[str, Any] = {"temperature": 1, "top_p": 0.9}
TOP_K: dict[str, Any] = {"temperature": 1, "top_k": 50}
DELTAS: dict[str, Any] = {"output_kind": RequestOutputKind.DELTA}
GOALS = {
    f"greedy, {RUNNING} running": 120,
    f"greedy, text, {RUNNING} running": 250,
    f"accept {LONG:,} from an array": 100,
    f"abort one of {WAITING:,}": 10,
}


def prompts(count: int, length: int, vocab_size: int, seed: int = 0) -> list[Ids]:
    """Arrays of random ids, none of them alike."""
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab_size, length + at % BLOCK) for at in range(count)]


@cache
def tokenizer(vocab_size: int) -> Any:
    """SmolLM2's, or one of so many of its words."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    whole: Any = AutoTokenizer.from_pretrained(float_folder())
    if vocab_size == SMOLLM2:
        return whole
    words = [word for word in whole.convert_ids_to_tokens(range(300, 5000)) if word[0] == "Ġ"]
    small = Tokenizer(models.BPE({word: at for at, word in enumerate(words[:vocab_size])}, []))
    small.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=small)


class Clocks:
    """Nanoseconds since it was made: of the clock, and of this process on a processor."""

    def __init__(self) -> None:
        self._start = perf_counter_ns(), process_time_ns()

    def read(self, operations: int = 1) -> tuple[float, float]:
        """For each of so many operations."""
        wall, processor = self._start
        now = process_time_ns()
        return (perf_counter_ns() - wall) / operations, (now - processor) / operations


def started(
    service: Service,
    requests: list[Ids],
    running: int,
    settings: dict[str, Any],
    *,
    reads: bool = False,
) -> None:
    """Requests in the middle of their answers; those beyond `running` wait."""
    params = SamplingParams(max_tokens=None, ignore_eos=True, **settings)
    for number, prompt in enumerate(requests):
        service.take_in(str(number), prompt, params, streams=reads)
    while service.num_running < running:
        service.step()


@dataclass(frozen=True, kw_only=True)
class How:
    """`waiting` requests more than slots; steps of an operation; whether updates are read.

    With `is_whole` an operation is a whole answer, and what is done at its end is shared among its
    steps.
    """

    waiting: int = 0
    steps: int = STEPS_PER_OPERATION
    reads: bool = False
    is_whole: bool = False


def steps(count: int, vocab_size: int, settings: dict[str, Any], how: How) -> Stream:
    """A step: the mean of some, as a rule a block for each request."""
    text = tokenizer(vocab_size) if settings.get("detokenize") else None
    longest = PROMPT + BLOCK + 2 * STEPS_PER_START
    service = Service(Size(count=count, longest=longest, vocab_size=vocab_size, tokenizer=text))
    settings = {"detokenize": False, **settings}
    number = STEPS_PER_START if how.is_whole else how.steps
    for seed in range(1_000_000):
        requests = prompts(count + how.waiting, PROMPT, vocab_size, seed)
        started(service, requests, count, settings, reads=how.reads)
        for _ in range(1 if how.is_whole else STEPS_PER_START // STEPS_PER_OPERATION):
            clocks = Clocks()
            for _ in range(number):
                service.step()
            if how.is_whole:
                service.look_at(map(str, range(count)))
            yield clocks.read(number)
        service.abort(map(str, range(len(requests))))


def parts(count: int, settings: dict[str, Any]) -> Stream:
    """The parts of a step in the order of `PARTS`; what a timer costs is in them."""
    spent = dict.fromkeys(PARTS, 0)

    def timed(part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timer(*args: Any, **kwargs: Any) -> Any:
            start = perf_counter_ns()
            try:
                return call(*args, **kwargs)
            finally:
                spent[part] += perf_counter_ns() - start

        return timer

    text = tokenizer(SMALL) if settings.get("detokenize") else None
    longest = PROMPT + BLOCK + 2 * STEPS_PER_START
    service = Service(Size(count=count, longest=longest, vocab_size=SMALL, tokenizer=text))
    service.parts(timed)
    for seed in range(1_000_000):
        started(service, prompts(count, PROMPT, SMALL, seed), count, settings)
        for _ in range(STEPS_PER_START // STEPS_PER_OPERATION):
            spent.update(dict.fromkeys(PARTS, 0))
            start = perf_counter_ns()
            for _ in range(STEPS_PER_OPERATION):
                service.step()
            spent["outputs"] = perf_counter_ns() - start - sum(spent.values())
            yield tuple(spent[part] / STEPS_PER_OPERATION for part in PARTS)
        service.abort(map(str, range(count)))


def arrivals() -> Stream:
    """A step and what arrives before it, once about `RUNNING` requests are there."""
    longest = PROMPT + BLOCK + 2 * MEAN_OUTPUT
    size = Size(count=2 * RUNNING, longest=longest, vocab_size=SMALL, tokenizer=tokenizer(SMALL))
    service, rng, number = Service(size), np.random.default_rng(0), 0
    while True:
        come = rng.poisson(ARRIVALS, STEPS_PER_OPERATION).tolist()
        requests = prompts(sum(come), PROMPT, SMALL, seed=number)
        params = [
            SamplingParams(**GREEDY, **DELTAS, ignore_eos=True, max_tokens=int(count))
            for count in rng.integers(1, 2 * MEAN_OUTPUT, sum(come))
        ]
        pairs = zip(requests, params, strict=True)
        clocks = Clocks()
        for count in come:
            for _ in range(count):
                service.take_in(str(number), *next(pairs), streams=True)
                number += 1
            service.step()
        times = clocks.read(STEPS_PER_OPERATION)
        if number > 3 * RUNNING:
            yield times


def accepting(as_ids: Callable[[Any], Ids]) -> Stream:
    """A long prompt, from what the caller has to the queue."""
    service = Service(Size(count=1, longest=2 * LONG, vocab_size=SMOLLM2))
    params = SamplingParams(temperature=0, max_tokens=16, detokenize=False)
    for seed in range(1_000_000):
        [prompt] = prompts(1, LONG, SMOLLM2, seed)
        given = as_ids(prompt)
        clocks = Clocks()
        service.take_in("long", given, params)
        yield clocks.read()
        service.abort(["long"])


def aborting() -> Stream:
    """One of those that wait, anywhere in the queue; another one comes for it."""
    service = Service(Size(count=1, longest=PROMPT, vocab_size=SMALL))
    params = SamplingParams(temperature=0, detokenize=False)
    [prompt] = prompts(1, BLOCK, SMALL)
    names = [str(number) for number in range(WAITING)]
    for name in names:
        service.take_in(name, prompt, params)
    rng = np.random.default_rng(0)
    for number in range(WAITING, 2**31):
        at = int(rng.integers(WAITING))
        clocks = Clocks()
        service.abort([names[at]])
        yield clocks.read()
        names[at] = str(number)
        service.take_in(names[at], prompt, params)


def search(vocab_size: int) -> Stream:
    """The largest logit of every row and nothing else: the floor of sampling."""
    logits = prepared_logits(RUNNING, vocab_size)[:RUNNING]
    while True:
        clocks = Clocks()
        logits.max(1).tolist()
        yield clocks.read()


def rows(sizes: tuple[int, ...]) -> dict[str, Callable[[], Stream]]:
    """Everything that is timed, by its name; made when it is asked for."""
    text = {"detokenize": True}
    small: dict[str, tuple[dict[str, Any], How]] = {
        "greedy": (GREEDY, How()),
        "greedy, others waiting": (GREEDY, How(waiting=64)),
        "greedy, text": (GREEDY | text, How(is_whole=True)),
        "greedy, text, read": (GREEDY | text | DELTAS, How(reads=True)),
        "top-p": (TOP_P, How()),
        "top-k": (TOP_K, How()),
    }
    streams: dict[str, Callable[[], Stream]] = {}
    for count in sizes:
        for name, (settings, how) in small.items():
            row = f"{name}, {count} running"
            streams[row] = partial(steps, count, SMALL, settings, how)
    streams[f"arrivals, about {RUNNING} running"] = arrivals
    for vocab_size in (SMOLLM2, QWEN):
        large = {"greedy": GREEDY, "greedy, text": GREEDY | text, "top-p": TOP_P, "top-k": TOP_K}
        for name, settings in large.items():
            if settings.get("detokenize") and vocab_size != SMOLLM2:
                continue
            row = f"{name}, {RUNNING} running, {vocab_size:,} tokens"
            how = How(steps=1, is_whole=name.endswith("text"))
            streams[row] = partial(steps, RUNNING, vocab_size, settings, how)
        streams[f"largest, {RUNNING} rows, {vocab_size:,} tokens"] = partial(search, vocab_size)
    streams[f"accept {LONG:,} from an array"] = partial(accepting, np.asarray)
    streams[f"accept {LONG:,} from a list"] = partial(accepting, np.ndarray.tolist)
    streams[f"abort one of {WAITING:,}"] = aborting
    for name in ("greedy", "greedy, text", "top-p"):
        settings = {"detokenize": False, **small[name][0]}
        streams[f"{name}, {RUNNING} running, parts"] = partial(parts, RUNNING, settings)
    return streams


def figures(rounds: list[tuple[float, ...]], names: tuple[str, ...]) -> dict[str, Any]:
    """Microseconds by name: median and quartiles."""
    columns = zip(names, zip(*rounds, strict=True), strict=True)
    spreads = {name: Spread.of([ns / 1000 for ns in column]) for name, column in columns}
    return {
        name: {
            "median": round(item.median, 2),
            "q1": round(item.q1, 2),
            "q3": round(item.q3, 2),
        }
        for name, item in spreads.items()
    }


def measure(wanted: dict[str, Callable[[], Stream]], effort: Effort) -> dict[str, Any]:
    """By row: microseconds of a step or a call. A few rows at a time: each holds an engine."""
    results: dict[str, Any] = {}
    names = list(wanted)
    for at in range(0, len(names), 6):
        group = {name: wanted[name]() for name in names[at : at + 6]}
        print("; ".join(group), file=sys.stderr, flush=True)
        for name, rounds in interleave(group, effort, lambda: None).items():
            kinds = PARTS if name.endswith("parts") else ("wall", "processor")
            results[name] = figures(rounds, kinds)
    return results


def page(content: dict[str, Any]) -> Iterator[str]:
    """The page of the docs: machines and dates, the tables, and the rows that became slower."""
    for run, column in content.items():
        about = column["machine"]
        yield f"{run}: {heading(about)}, commit {about['commit']}  "
    yield ""
    columns = {run: column["us"] for run, column in content.items()}
    yield from table(columns)
    if len(columns) == 2:
        yield from slower(*columns.values())


def slower(before: dict[str, Any], now: dict[str, Any]) -> Iterator[str]:
    """The rows whose quartiles say that they take longer than before."""
    names = []
    for name, row in now.items():
        old, new = before.get(name, {}).get("processor"), row.get("processor")
        if old and new and new["q1"] > old["q3"]:
            names.append(f"{name} ({new['median'] / old['median'] - 1:+.0%})")
    yield f"\nSlower than before, beyond the quartiles: {'; '.join(names) or 'no row'}."


def table(columns: dict[str, dict[str, Any]]) -> Iterator[str]:
    """Steps and calls, then the parts of steps; in markdown, a column for each run."""
    names = list(dict.fromkeys(name for column in columns.values() for name in column))
    yield "| microseconds of the processor | " + " | ".join(columns) + " | goal |"
    yield "|---|" + "---:|" * (len(columns) + 1)
    for name in names:
        if not name.endswith("parts"):
            cells = [shown(column.get(name, {}).get("processor")) for column in columns.values()]
            yield f"| {name} | {' | '.join(cells)} | {GOALS.get(name, '')} |"
    yield "\n| parts of a step | | " + " | ".join(PARTS) + " |"
    yield "|---|---|" + "---:|" * len(PARTS)
    for name in names:
        for run, column in columns.items():
            if name.endswith("parts") and name in column:
                cells = [shown(column[name][part]) for part in PARTS]
                yield f"| {name.removesuffix(', parts')} | {run} | {' | '.join(cells)} |"


def shown(figure: dict[str, float] | None) -> str:
    """A median."""
    if figure is None:
        return ""
    return f"{figure['median']:,.0f}" if figure["median"] >= 10 else f"{figure['median']:.1f}"


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="5 rounds, 256 running")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--as", dest="column", default="now", help="the column that is filled")
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    parser.add_argument("--show", action="store_true", help="print the file's table")
    parser.add_argument("--results", help="name of file and place (engine-overhead-MACHINE)")
    options = parser.parse_args()
    name = options.results or results_name("engine-overhead")
    target = results_file(name)
    content: dict[str, Any] = json.loads(target.read_text()) if target.exists() else {}
    if not options.show:
        compute_alone()
        effort = Effort(5, 1.0) if options.quick else Effort(15, 3.0)
        wanted = rows((RUNNING,) if options.quick else SIZES)
        figures = measure({n: make for n, make in wanted.items() if options.only in n}, effort)
        column = content.setdefault(options.column, {"us": {}})
        column["us"] |= figures
        column |= {"machine": machine(), "libraries": libraries()}
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(json.dumps(content, indent=1) + "\n")
    publish(name, page(content), write=options.docs)
    print(f"\n{os.path.relpath(target)}", file=sys.stderr)


if __name__ == "__main__":
    main()
