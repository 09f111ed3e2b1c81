"""The same prompts in many ways: alone, batched, chunked, cached, preempted. Every bit must agree.

    python -m benches.engine.same_bits [--prompts 1000] [--model FILE] [--dtype float32]
    PYENGINE_CPU_ISA=avx2 python -m benches.engine.same_bits --write FILE
    PYENGINE_CPU_ISA=avx512 python -m benches.engine.same_bits --against FILE

from the root of the repository. The first way, which the others are compared with, is one prompt at
a time by one thread. The first five ways run all prompts, the others a fifth. Tokens, their
log-probabilities, those of the most probable tokens and of prompts, and all ranks are compared.
Prompts are random tokens, most of them short; some share a beginning, some repeat themselves. A
third of the answers is greedy, the others are sampled, with seeds.

Prints a table in markdown, with the count that proves that a way was taken, for example preempted
requests. Every draft is computed, whether or not steps of this machine are fast enough for it. The
exit status is 1 if anything differs or a way was not taken. The embedded model in 4 bits takes
about a quarter of an hour on two cores, in float32 or bfloat16 half an hour.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, Literal
from unittest.mock import patch

from benches.peers.report import machine
from pyengine import LLM, SamplingParams
from pyengine.engine import builder
from pyengine.outputs import Logprob, RequestOutput
from pyengine.speculation.policy import Curve, StepCosts

SHARE = 5
MAX_TOKENS = 6
VOCABULARY = 49_000
SHARED, LONGEST = 290, 320
"""Tokens that several prompts begin with, more than are attended to in one part; the longest prompt
and answer."""
SAMPLED: Sequence[dict[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 40},
    {"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    {"temperature": 1.0, "min_p": 0.05},
    {"temperature": 1.3, "presence_penalty": 0.5},
    {"temperature": 0.0, "logit_bias": {5: 1.5}, "min_tokens": 2},
    {"temperature": 0.9, "top_k": 50, "top_p": 0.95},
)
FREE_DRAFTS = StepCosts(Curve([1, 2], [1.0, 1.0]))
"""Costs by which every draft gains."""
Count = Callable[[LLM, "list[RequestOutput]"], int]


def _cached(_: LLM, outputs: list[RequestOutput]) -> int:
    return sum(output.num_cached_tokens for output in outputs)


def _restored(_: LLM, outputs: list[RequestOutput]) -> int:
    return sum(output.num_restored_tokens for output in outputs)


def _counter(name: str) -> Count:
    return lambda llm, _: llm.stats().counters[name]


@dataclass(frozen=True)
class Way:
    """One way to answer prompts.

    `before` is what runs first: nothing, all prompts in the same engine, or all of them in an
    engine that keeps its cache in a folder, from which a second one restores it. `count` counts
    what proves that the way was taken, `counted` names it.
    """

    name: str
    settings: dict[str, Any]
    is_main: bool = False
    is_alone: bool = False
    before: Literal["nothing", "same engine", "other engine"] = "nothing"
    counted: str = ""
    count: Count = field(default=lambda llm, _: llm.stats().num_new_tokens)


TWO = {"num_threads": 2}
WAYS = (
    Way("alone, 1 thread", {"num_threads": 1}, is_main=True, is_alone=True),
    Way("alone, 2 threads", TWO, is_main=True, is_alone=True),
    Way("24 at once, 1 thread", {"num_threads": 1, "max_num_seqs": 24}, is_main=True),
    Way("256 at once, 2 threads", TWO, is_main=True),
    Way(
        "chunks of 24 tokens, 2 threads",
        {**TWO, "max_num_seqs": 9, "max_num_batched_tokens": 24},
        is_main=True,
    ),
    Way("24 at once, 3 threads", {"num_threads": 3, "max_num_seqs": 24}),
    Way(
        "from the cache",
        {**TWO, "max_num_seqs": 24},
        before="same engine",
        counted="cached tokens",
        count=_cached,
    ),
    Way(
        "restored from a folder",
        {**TWO, "max_num_seqs": 24},
        before="other engine",
        counted="restored tokens",
        count=_restored,
    ),
    Way("no cache, blocks of 32", {**TWO, "enable_prefix_caching": False, "block_size": 32}),
    Way(
        "merged late, blocks of 4",
        {**TWO, "in_flight_sharing": False, "partial_reuse": False, "block_size": 4},
        counted="merged blocks",
        count=_counter("merged_blocks"),
    ),
    Way(
        "preempted",
        {**TWO, "num_blocks": 24, "max_model_len": LONGEST, "layer_groups": False},
        counted="preemptions",
        count=lambda llm, _: llm.stats().num_preemptions,
    ),
    Way(
        "drafts",
        {**TWO, "max_num_seqs": 24, "speculation": "suffix"},
        before="same engine",
        counted="accepted drafts",
        count=_counter("accepted_draft_tokens"),
    ),
    Way("planned ahead", {**TWO, "async_scheduling": True}),
)


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and its log-probabilities with ids and ranks, prompt first."""

    tokens: list[int]
    places: list[tuple[int, int]]
    numbers: list[float]

    @classmethod
    def of(cls, output: RequestOutput) -> "Answer":
        """All that a request returned."""
        (completion,) = output.outputs
        several: list[dict[int, Logprob] | None] = list(output.prompt_logprobs or [])
        several += completion.logprobs or []
        entries = [item for entry in several if entry is not None for item in entry.items()]
        places = [(token, logprob.rank) for token, logprob in entries]
        numbers = [logprob.logprob for _, logprob in entries]
        return cls(completion.token_ids, places, [*numbers, completion.cumulative_logprob or 0.0])


@dataclass(frozen=True)
class Comparison:
    """The answers of a way against those of the first one."""

    name: str
    answers: int
    tokens: int
    """Answers with other tokens."""
    logprobs: int
    """Answers with the same tokens and other log-probabilities, in any bit, or other ranks."""
    largest: float
    """The largest difference of two log-probabilities of the same token."""
    seconds: float
    counted: str = ""

    @property
    def is_same(self) -> bool:
        """True if no bit differs, and the way was taken."""
        return not (self.tokens or self.logprobs or self.counted.startswith("0 "))


@dataclass(frozen=True)
class Requests:
    """Prompts and the parameters of each."""

    prompts: list[list[int]]
    params: list[SamplingParams]

    def first(self, count: int) -> "Requests":
        """The first so many."""
        return Requests(self.prompts[:count], self.params[:count])


def requests(count: int, vocabulary: int = VOCABULARY, seed: int = 0) -> Requests:
    """Random prompts of 1 to `SHARED + 9` tokens with ids from 3 on, the same ones each time."""
    random = Random(seed)
    shared = random.choices(range(3, vocabulary), k=SHARED)
    prompts, params = [], []
    for number in range(count):
        own = random.choices(range(3, vocabulary), k=random.randint(1, 24))
        if number % 200 == 1:
            own = random.choices(range(3, vocabulary), k=SHARED)
        elif number % 40 in (7, 27):
            own = shared[: random.choice((SHARED, 130, 33))] + own[:9]
        elif number % 10 == 4:
            own = own[:5] * 6
        prompts.append(own)
        params.append(
            SamplingParams(
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                seed=number,
                detokenize=False,
                logprobs=(0, 3, 20)[number % 3],
                prompt_logprobs=(None, None, 0, None, 2)[number // 3 % 5],
                **SAMPLED[number % len(SAMPLED)],
            )
        )
    return Requests(prompts, params)


def answers(way: Way, model: dict[str, Any], requests: Requests) -> tuple[list[Answer], int]:
    """Every request's answer in one way, and what the way counts."""

    def run(llm: LLM) -> list[RequestOutput]:
        if not way.is_alone:
            return llm.generate(requests.prompts, requests.params, use_tqdm=False)
        pairs = zip(requests.prompts, requests.params, strict=True)
        return [llm.generate(prompt, params, use_tqdm=False)[0] for prompt, params in pairs]

    settings = {"device": "cpu", **model, **way.settings}
    costs = patch.object(builder, "measured_costs", lambda *_: FREE_DRAFTS)
    with costs, TemporaryDirectory(prefix="pyengine-") as folder:
        if way.before == "other engine":
            settings["kv_cache_dir"] = folder
            with LLM(**settings) as llm:
                run(llm)
                run(llm)  # short prompts are stored once they are used again
        with LLM(**settings) as llm:
            if way.before == "same engine":
                run(llm)
            outputs = run(llm)
            return [Answer.of(output) for output in outputs], way.count(llm, outputs)


def compare(name: str, actual: Sequence[Answer], expected: Sequence[Answer]) -> Comparison:
    """Compare the answers of two ways; NaN equals nothing."""
    tokens = logprobs = 0
    largest = 0.0
    for answer, other in zip(actual, expected, strict=True):
        if answer.tokens != other.tokens:
            tokens += 1
        elif answer.places != other.places or answer.numbers != other.numbers:
            logprobs += 1
        if answer.places == other.places:
            pairs = zip(answer.numbers, other.numbers, strict=True)
            largest = max([largest, *(abs(number - own) for number, own in pairs)])
    return Comparison(name, len(actual), tokens, logprobs, largest, 0.0)


def run_ways(
    model: dict[str, Any], requests: Requests, ways: Sequence[Way] = WAYS, share: int = SHARE
) -> Iterator[tuple[Comparison, list[Answer]]]:
    """Answer in all ways; compare with the first one, which runs all requests."""
    expected: list[Answer] = []
    for way in ways:
        some = requests if way.is_main else requests.first(-(-len(requests.prompts) // share))
        start = monotonic()
        actual, count = answers(way, model, some)
        expected = expected or actual
        result = compare(way.name, actual, expected[: len(actual)])
        counted = f"{count} {way.counted}" if way.counted else ""
        fields = (result.tokens, result.logprobs, result.largest, monotonic() - start, counted)
        yield Comparison(way.name, len(actual), *fields), actual


def lines(about: dict[str, Any], comparisons: Iterator[Comparison]) -> Iterator[str]:
    """The table, line by line."""
    yield ", ".join(f"{name} {value}" for name, value in about.items())
    yield ""
    yield "| way | answers | other tokens | other log-probabilities | largest | seconds | |"
    yield "|---|---:|---:|---:|---:|---:|---|"
    for item in comparisons:
        yield (
            f"| {item.name} | {item.answers:,} | {item.tokens} | {item.logprobs} | "
            f"{item.largest:.1e} | {item.seconds:.0f} | {item.counted} |"
        )


def main() -> int:
    """Run all ways and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--prompts", type=int, default=1000, help="their number (1000)")
    parser.add_argument("--model", help="folder or GGUF file (the embedded model)")
    parser.add_argument("--dtype", default="auto", help="as the setting (auto)")
    parser.add_argument("--quantization", help="as the setting")
    parser.add_argument("--kv-cache-dtype", default="auto", help="as the setting (auto)")
    parser.add_argument("--write", type=Path, help="keep the answers of the first way in this file")
    parser.add_argument("--against", type=Path, help="compare with the answers in this file")
    options = parser.parse_args()
    names = ("model", "dtype", "quantization", "kv_cache_dtype")
    model = {name: getattr(options, name) for name in names}
    comparisons: list[Comparison] = []
    wanted = requests(options.prompts)

    def each() -> Iterator[Comparison]:
        first: list[Answer] = []
        for result, actual in run_ways(model, wanted):
            comparisons.append(result)
            yield result
            first = first or actual
        if options.write:
            kept = [(answer.tokens, answer.places, answer.numbers) for answer in first]
            options.write.write_text(json.dumps(kept))
        if options.against:
            others = [
                Answer(tokens, [(token, rank) for token, rank in places], numbers)
                for tokens, places, numbers in json.loads(options.against.read_text())
            ]
            comparisons.append(compare(f"against {options.against.name}", first, others))
            yield comparisons[-1]

    about = {**machine(), **{name: value for name, value in model.items() if value}}
    for line in lines(about, each()):
        print(line, flush=True)
    return 0 if all(item.is_same for item in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
