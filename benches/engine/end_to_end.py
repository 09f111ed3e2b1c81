"""Whole generations on the CPU: this engine, transformers `generate` and vLLM, in one run.

    .venv/bin/python -m benches.engine.end_to_end           # 20 to 25 minutes on two cores
    .venv/bin/python -m benches.engine.end_to_end --only "32 x (32" --engines pyengine,vllm32
    .venv/bin/python -m benches.engine.end_to_end --show    # the tables of the last run again

from the root of the repository. SmolLM2-135M-Instruct, the end of sequence ignored; prompts of
random tokens and greedy unless a row says otherwise: `text` are passages of this repository's
pages, tokenized and answered with text, `sampled` is temperature 1 with top-p 0.9. Prompts are new
ones each round and the same for all.

Every engine is a separate process (`serve.py`) and they take turns, in a different order each
round; a ratio is the median of the ratios of the same rounds. First everything in float32, then
in bfloat16; transformers in float32 only, 8-bit weights (`int8`, `int8-compiled`) in bfloat16 only.
What is compiled is compiled anew: the start is a first
start. `pyengine` and `compiled` are this engine without and with `compile=True`; `vllm` is vLLM
with the blocks that it chooses, `vllm32` with `block_size=32`, both bound to all cores
(`VLLM_CPU_OMP_THREADS_BIND`: left to itself it keeps one of two cores free). vLLM is looked for in
`.venv-peers` (`benches/peers/env.py` makes it). `default` is this engine with the embedded model's
own file (Q4_1). `llama.cpp` and `mistral.rs` answer the one request and the prompts from that file;
they are looked for in `.venv-llama` and `.venv-mistral`. `serve.py` says how to build llama.cpp for
a machine that hides AMX.

    python -m venv .venv-llama && .venv-llama/bin/pip install llama-cpp-python
    python -m venv .venv-mistral && .venv-mistral/bin/pip install mistralrs

An engine that gives another number of tokens than was asked for is named, and has no figure.

What is not there, a line says. `--avx2` holds every engine but llama.cpp to AVX2, by the switches
of torch, oneDNN, MKL and this engine, and vLLM to its kernels for AVX2.

Tables in markdown go to standard output: tokens per second, ratios, goals, and a
summary; `--docs` writes them into docs/benchmarks/engine.md and index.md, between this machine's
marks.
The seconds are in `benches/results/end-to-end-MACHINE.json` as soon as they are known. `--append`
keeps what that file holds and measures the asked rows, engines and dtypes again.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter, sleep
from typing import Any

from benches.engine.child import (
    LLAMA_PYTHON,
    MISTRAL_PYTHON,
    PEERS,
    ROOT,
    VLLM_SETTINGS,
    Child,
    say,
)
from benches.engine.float_model import float_folder
from benches.engine.page import has_place, publish
from benches.engine.serve import AVX2, ENGINES, GenerateRequest
from benches.engine.works import VOCABULARY, WORKS, Work
from benches.peers.report import heading, libraries, machine, results_file, results_name
from pyengine.models.source import embedded_gguf

INDEX = ROOT / "docs/benchmarks/index.md"
NAMES = tuple(ENGINES)
OURS, COMPILED, DEFAULT, INT8, INT8_COMPILED, TRANSFORMERS = NAMES[:6]
VLLM, VLLM32, LLAMA, MISTRAL = NAMES[6:]
TITLES = {
    OURS: "pyengine",
    COMPILED: "`compile=True`",
    DEFAULT: "`LLM()`, Q4_1",
    INT8: "`int8`",
    INT8_COMPILED: "`int8`, `compile=True`",
    TRANSFORMERS: "transformers `generate`",
    VLLM: "vLLM 0.32, blocks of 128",
    VLLM32: "vLLM 0.32, `block_size=32`",
    LLAMA: "llama.cpp, Q4_1",
    MISTRAL: "mistral.rs, Q4_1",
}
DTYPES = ("float32", "bfloat16")
NOT_MEASURED = {
    (TRANSFORMERS, "bfloat16"),
    *((name, "float32") for name in (DEFAULT, INT8, INT8_COMPILED, LLAMA, MISTRAL)),
}
OF_FILES = (DEFAULT, LLAMA, MISTRAL)
"""Engines that load the embedded file."""
FEW_WORKS = {LLAMA: (WORKS[0], WORKS[4]), MISTRAL: (WORKS[0], WORKS[4])}
"""The works of engines that do not answer all of them."""
PYTHONS = {VLLM: PEERS, VLLM32: PEERS, LLAMA: LLAMA_PYTHON, MISTRAL: MISTRAL_PYTHON}
"""Where this environment does not have the engine."""
START = "start to first token"
VLLM_SPINS_SECONDS = 1.2
"""Seconds for which vLLM's workers poll for work on a core; the next engine waits for that."""


GOALS: dict[str, tuple[float, float]] = {  # ours, the better of two, against the faster vLLM
    WORKS[0].name: (1.05, 1.0),
    WORKS[1].name: (1.05, 1.0),
    WORKS[4].name: (1.05, 1.0),
    WORKS[5].name: (1.25, 1.1),
    WORKS[6].name: (1.5, 1.3),
    WORKS[7].name: (1.6, 1.5),
}
"""Least ratio in float32 and in bfloat16."""
INT8_GOAL = 1.8
"""Of 32 rows in 8-bit integers against ours in float32, the better of ours in both."""
LLAMA_GOAL = 1.0
"""Of one row in 8-bit integers, the better of ours, against llama.cpp."""


def model_of(name: str) -> Path:
    """The file or folder of the embedded model that the engine loads."""
    return embedded_gguf() if name in OF_FILES else float_folder()


class Engine(Child):
    """A process that generates. Raises `RuntimeError` if it does not come up."""

    def __init__(
        self,
        name: str,
        dtype: str,
        caches: Path,
        options: dict[str, Any] | None = None,
        model: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`options` are further ones of the engine; `model` replaces the one of `model_of`."""
        self.name, self.is_alive = name, True
        python = PYTHONS.get(name, Path(sys.executable))
        if not python.exists():
            raise RuntimeError(f"{python} is missing; see the head of this file")
        start = perf_counter()
        arguments = [name, str(model or model_of(name)), dtype, json.dumps(options or {})]
        super().__init__(
            [str(python), "-m", "benches.engine.serve", *arguments],
            TORCHINDUCTOR_CACHE_DIR=str(caches / "inductor"),
            VLLM_CACHE_ROOT=str(caches / "vllm"),
            **(environment or {}),
        )
        ready = self.answer()
        self.start_seconds = perf_counter() - start
        self.described = {"version": ready["ready"], **ready["settings"]}
        if name in (VLLM, VLLM32):
            variable = "VLLM_CPU_OMP_THREADS_BIND"
            self.described["cores"] = os.environ.get(variable, VLLM_SETTINGS[variable])

    def failed(self) -> RuntimeError:
        """See `Child.failed`; the message names the engine."""
        self.is_alive = False
        return RuntimeError(f"{self.name} {super().failed()}")

    def generate(self, request: GenerateRequest) -> dict[str, Any]:
        """`seconds`, `tokens`, and how many `characters` of text.

        Raises `RuntimeError` if the process has ended, or the answers are of another kind or
        length than requested.
        """
        answer: dict[str, Any] = self.ask(asdict(request))
        if self.name in (VLLM, VLLM32):
            sleep(VLLM_SPINS_SECONDS)
        if bool(answer["characters"]) != (request.is_text or bool(request.stop)):
            raise RuntimeError(f"{self.name} gave {answer['characters']} characters of text")
        check_tokens(self.name, request, answer["tokens"])
        return answer


def check_tokens(name: str, request: GenerateRequest, tokens: list[list[int]]) -> None:
    """Raise `RuntimeError` if engine `name` gave another number of tokens than was asked for."""
    if len(tokens) != len(request.prompts):
        raise RuntimeError(f"{name} gave {len(tokens)} answers to {len(request.prompts)} prompts")
    lengths = sorted(map(len, tokens))
    is_right = lengths[-1] <= request.max_tokens
    if not request.stops:
        is_right &= lengths[0] == request.max_tokens
    if not is_right:
        raise RuntimeError(
            f"{name} gave answers of {lengths[0]} to {lengths[-1]} tokens, "
            f"{request.max_tokens} were asked for"
        )


class Record:
    """The results, in a file that is written again after each of them.

    `seconds[dtype][work][engine]` has an entry for each round.
    """

    def __init__(self, path: Path, *, keep: bool) -> None:
        self.path = path
        self.seconds: dict[str, dict[str, dict[str, list[float]]]] = {}
        self.same: dict[str, dict[str, dict[str, int]]] = {}
        """Likewise, how many sequences had the same tokens as the first engine's."""
        self.about: dict[str, Any] = {
            "machine": machine(),
            "libraries": libraries(),
            "engines": {},
            "missing": {},
        }
        if keep and path.exists():
            content = json.loads(path.read_text())
            self.seconds, self.same = content.pop("seconds"), content.pop("same_tokens")
            self.about = content

    def begin(self, dtype: str, work: str, engine: str) -> None:
        """Forget what was known of this."""
        self.seconds.setdefault(dtype, {}).setdefault(work, {})[engine] = []
        self.same.setdefault(dtype, {}).setdefault(work, {}).pop(engine, None)

    def add(self, dtype: str, work: str, engine: str, seconds: float) -> None:
        """One more round."""
        self.seconds[dtype][work][engine].append(seconds)
        self.write()

    def compare(self, dtype: str, work: str, tokens: dict[str, list[list[int]]]) -> None:
        """Count the sequences that are the first engine's, round by round."""
        reference, same = next(iter(tokens.values())), self.same[dtype][work]
        for name, sequences in tokens.items():
            equal = sum(a == b for a, b in zip(sequences, reference, strict=True))
            same[name] = same.get(name, 0) + equal

    def write(self) -> None:
        """All of it; a run that is cut off leaves a whole file."""
        content = {**self.about, "seconds": self.seconds, "same_tokens": self.same}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(content, indent=1) + "\n")
        part.replace(self.path)

    def ratio(self, dtype: str, work: str, ours: str, theirs: str) -> float | None:
        """How many times as fast: the median of the rounds that both have."""
        seconds = self.seconds.get(dtype, {}).get(work, {})
        pairs = list(zip(seconds.get(theirs, []), seconds.get(ours, []), strict=False))
        return median([a / b for a, b in pairs]) if pairs else None

    def best_ratio(self, dtype: str, work: str, theirs: str) -> float | None:
        """The better of ours."""
        ratios = [self.ratio(dtype, work, ours, theirs) for ours in (OURS, COMPILED)]
        return max(filter(None, ratios), default=None)

    def rounds(self, *engines: str) -> set[int]:
        """How many rounds the works have, of these engines."""
        return {
            len(seconds)
            for works in self.seconds.values()
            for work, by_engine in works.items()
            for engine, seconds in by_engine.items()
            if work != START and engine in engines and seconds
        }

    def best(self, dtype: str, work: str, engines: tuple[str, ...]) -> float | None:
        """The least of the medians of these engines, in seconds."""
        seconds = self.seconds.get(dtype, {}).get(work, {})
        return min((median(seconds[name]) for name in engines if seconds.get(name)), default=None)

    def rate(self, dtype: str, work: Work | None, engine: str) -> str:
        """Tokens per second, or the seconds to the first; empty where nothing was measured."""
        seconds = self.seconds.get(dtype, {}).get(work.name if work else START, {}).get(engine)
        if not seconds:
            return ""
        if work is None:
            return f"{median(seconds):.1f} s"
        rate = work.tokens / median(seconds)
        return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def start(names: list[str], dtype: str, caches: Path, record: Record) -> list[Engine]:
    """The engines that come up, one after the other; the record has why the others do not."""
    engines = []
    for name in names:
        say(f"{dtype}: starting {name}")
        try:
            engine = Engine(name, dtype, caches)
        except RuntimeError as error:
            record.about["missing"][f"{name}, {dtype}"] = str(error)
            continue
        engines.append(engine)
        record.about["missing"].pop(f"{name}, {dtype}", None)
        record.about["engines"].setdefault(name, {})[dtype] = engine.described
        record.begin(dtype, START, name)
        record.add(dtype, START, name, engine.start_seconds)
    return engines


def answering(engines: list[Engine], work: Work) -> list[Engine]:
    """The engines that answer a work."""
    return [engine for engine in engines if work in FEW_WORKS.get(engine.name, WORKS)]


def measure(
    engines: list[Engine],
    work: Work,
    rounds: int,
    dtype: str,
    record: Record,
    vocab_size: int = VOCABULARY,
) -> None:
    """Rounds of one work: a warming call each, then all engines in turn.

    One that fails has no more rounds of it, and the record says why.
    """
    random = Random(f"{work.name}")
    for engine in engines:
        record.begin(dtype, work.name, engine.name)
    order = [engine for engine in engines if engine.is_alive]
    for turn in range(-1, rounds):  # -1: shapes that it has not seen yet, memory not touched yet
        request, tokens = work.request(random, vocab_size), {}
        if turn < 0:
            request = replace(request, max_tokens=min(work.max_tokens, 4))
        for engine in list(order):
            if work.is_slow and engine.name == TRANSFORMERS and turn != 0:
                continue
            try:
                answer = engine.generate(request)
            except RuntimeError as error:
                record.about["missing"][f"{work.name}, {engine.name}, {dtype}"] = str(error)
                order.remove(engine)
                continue
            if turn >= 0:
                tokens[engine.name] = answer["tokens"]
                record.add(dtype, work.name, engine.name, answer["seconds"])
            say(f"{dtype}: {work.name}: {engine.name} {answer['seconds']:.2f} s")
        if tokens and work.kind != "sampled":
            record.compare(dtype, work.name, tokens)
        order = order[1:] + order[:1]


def tables(record: Record) -> Iterator[str]:
    """Rates by dtype, ratios to vLLM and transformers, goals; in markdown."""
    about = record.about["machine"]
    yield heading(about, record.rounds(*(name for name in TITLES if name != TRANSFORMERS)))
    for dtype, works in record.seconds.items():
        engines = [
            name for name in TITLES if any(name in by_engine for by_engine in works.values())
        ]
        yield f"\n| {dtype}, tokens per second | {' | '.join(TITLES[name] for name in engines)} |"
        yield "|---|" + "---:|" * len(engines)
        rows: list[Work | None] = [None, *(work for work in WORKS if work.name in works)]
        for work in rows:
            cells = [record.rate(dtype, work, name) for name in engines]
            yield f"| {work.name if work else START} | {' | '.join(cells)} |"
    yield from goals(record)
    yield from default_goals(record)
    yield from int8_goals(record)
    for name, reason in record.about["missing"].items():
        yield f"\n{name}: missing ({reason})"
    for described in record.about["engines"].get(LLAMA, {}).values():
        if "build" in described:
            layouts = "" if described.get("layouts", True) else "; weights as the file has them"
            yield f"\nllama.cpp {described['version']}, built with: {described['build']}{layouts}"


def goals(record: Record) -> Iterator[str]:
    """Work by work: times as fast as the others, in each dtype, and what is wanted."""
    yield (
        "\n| the better of ours, times as fast as | transformers | vLLM | vLLM, 32 "
        "| goal, against the faster vLLM |"
    )
    yield "|---|---:|---:|---:|---:|"
    for at, dtype in enumerate(DTYPES):
        for work in WORKS:
            best = [record.best_ratio(dtype, work.name, p) for p in (TRANSFORMERS, VLLM, VLLM32)]
            if not any(best):
                continue
            cells = [f"{ratio:.2f}" if ratio else "" for ratio in best]
            goal, ratios = "", [ratio for ratio in best[1:] if ratio]
            if (minimum := GOALS.get(work.name)) and ratios:
                goal = f"{minimum[at]:.2f}, {'met' if min(ratios) >= minimum[at] else 'not met'}"
            yield f"| {work.name}, {dtype} | {' | '.join(cells)} | {goal} |"


def default_goals(record: Record) -> Iterator[str]:
    """The default, in 4 bits, against ours in bfloat16 and against the engines of such files."""
    peers = (OURS, LLAMA, MISTRAL)
    rows = []
    for work in WORKS:
        ratios = [record.ratio("bfloat16", work.name, DEFAULT, peer) for peer in peers]
        if any(ratios):
            cells = [f"{ratio:.2f}" if ratio else "" for ratio in ratios]
            rows.append(f"| {work.name} | {' | '.join(cells)} |")
    if rows:
        yield "\n| `LLM()`, Q4_1, times as fast as | ours in bfloat16 | llama.cpp | mistral.rs |"
        yield "|---|---:|---:|---:|"
        yield from rows


def int8_goals(record: Record) -> Iterator[str]:
    """8-bit weights against ours without: the medians, as they are not of the same rounds."""
    rows, plain, small = [], (OURS, COMPILED), (INT8, INT8_COMPILED)
    for work in WORKS:
        seconds = record.best("bfloat16", work.name, small)
        others = [record.best(dtype, work.name, plain) for dtype in DTYPES]
        if seconds is None or others[0] is None:
            continue
        ratio, goal = others[0] / seconds, ""
        if work is WORKS[1]:
            goal = f"{INT8_GOAL:.2f}, {'met' if ratio >= INT8_GOAL else 'not met'}"
        cells = [f"{other / seconds:.2f}" if other else "" for other in others]
        rows.append(f"| {work.name} | {' | '.join(cells)} | {goal} |")
    if rows:
        yield (
            "\n| 8-bit weights, times as fast as ours | in float32 | in bfloat16 "
            "| goal, against float32 |"
        )
        yield "|---|---:|---:|---:|"
        yield from rows
    title = WORKS[0].name
    ratios = [record.ratio("bfloat16", title, name, LLAMA) for name in (INT8, INT8_COMPILED)]
    if best := max(filter(None, ratios), default=None):
        yield "\n| 8-bit weights, times as fast as llama.cpp with its 4-bit file | | goal |"
        yield "|---|---:|---:|"
        met = "met" if best >= LLAMA_GOAL else "not met"
        yield f"| {title} | {best:.2f} | {LLAMA_GOAL:.2f}, {met} |"


def summary(record: Record) -> Iterator[str]:
    """For the index page: the better of ours against the better of vLLM's, and transformers."""
    about = heading(record.about["machine"], record.rounds(OURS, COMPILED, VLLM, VLLM32))
    yield (
        f"| {about}; times as fast as | vLLM 0.32, float32 | vLLM 0.32, bfloat16 "
        "| transformers, float32 |"
    )
    yield "|---|---:|---:|---:|"
    for work in WORKS:
        cells = []
        for dtype, peers in (
            ("float32", (VLLM, VLLM32)),
            ("bfloat16", (VLLM, VLLM32)),
            ("float32", (TRANSFORMERS,)),
        ):
            ratios = filter(None, [record.best_ratio(dtype, work.name, peer) for peer in peers])
            lowest = min(ratios, default=None)
            cells.append(f"{lowest:.2f}" if lowest else "")
        if any(cells):
            yield f"| {work.name} | {' | '.join(cells)} |"


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="one round, without what is shared")
    parser.add_argument("--only", default="", help="works whose name contains this")
    parser.add_argument("--rounds", type=int, default=2, help="rounds per work (2)")
    parser.add_argument("--engines", default=",".join(NAMES), help=f"of {', '.join(NAMES)}")
    parser.add_argument("--dtype", default=",".join(DTYPES), help="float32, bfloat16 or both")
    parser.add_argument("--results", help="name of file and place (end-to-end-MACHINE)")
    parser.add_argument("--append", action="store_true", help="keep what the JSON file holds")
    parser.add_argument("--avx2", action="store_true", help="hold the engines to AVX2")
    parser.add_argument("--docs", action="store_true", help="write the tables into the docs")
    parser.add_argument("--show", action="store_true", help="print its tables, measure nothing")
    options = parser.parse_args()
    options.engines, options.dtype = options.engines.split(","), options.dtype.split(",")
    for given, known in ((options.engines, NAMES), (options.dtype, DTYPES)):
        if unknown := set(given) - set(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    return options


def run(options: argparse.Namespace, record: Record) -> None:
    """Measure what was asked for, dtype by dtype."""
    works = [work for work in WORKS if options.only in work.name]
    works = [work for work in works if not (options.quick and work.is_slow)]
    for dtype in options.dtype:
        wanted = [name for name in options.engines if (name, dtype) not in NOT_MEASURED]
        with TemporaryDirectory(prefix="end-to-end-") as caches, ExitStack() as stack:
            engines = start(wanted, dtype, Path(caches), record)
            for engine in engines:
                stack.enter_context(engine)
            for work in works:
                rounds = 1 if options.quick else options.rounds
                measure(answering(engines, work), work, rounds, dtype, record)


def main() -> None:
    """Run, print, write."""
    options = parse()
    if options.avx2:
        os.environ.update(AVX2, PYENGINE_CPU_ISA="avx2")
    name = options.results or results_name("end-to-end")
    target = results_file(name)
    record = Record(target, keep=options.append or options.show)
    if not options.show:
        run(options, record)
        record.write()
        say(str(target.relative_to(ROOT)))
    publish(name, tables(record), write=options.docs)
    in_index = has_place(name, INDEX)  # it has the table of one machine
    publish(name, summary(record), write=options.docs and in_index, page=INDEX)


if __name__ == "__main__":
    main()
