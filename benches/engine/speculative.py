"""Speculation on real text, on the CPU: with drafts and without, beside vLLM's and transformers'.

    .venv/bin/python -m benches.engine.speculative [--batch 1,8,32] [--rounds 3]

from the root of the repository, with the archive `bbh_text.tar.gz` in `PYENGINE_TRACES`. The
embedded model answers, and ends where it ends: a model that loops would flatter a drafter.

- `copying`: functions of this repository, to be written again with a comment; greedy.
- `examples`: questions of BIG-Bench-Hard behind three worked examples; greedy.
- `prose`: stories and explanations, temperature 0.8 with a seed for each.
- `forms`: profiles of people as lists of fields, whose form `suffix` knows after a round; greedy.
- `forms again`: the same requests a second time, as a suite that is run again sends them.

Every round has other prompts. Ours and transformers are in one process; vLLM with n-grams and
without is looked for in `.venv-peers` (`benches/peers/env.py` makes it). They take turns in an
order that changes, and a ratio is the median of those of the same rounds. Decoding is what is
timed: prompts are computed before, and are in the cache; of transformers' `generate`, which takes
one request at a time here, the time that it takes for a single token is subtracted. A table in
markdown goes to standard output, the figures to `benches/results/speculative-MACHINE.json`.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch

from benches.engine.child import ROOT
from benches.engine.end_to_end import VLLM32, Engine
from benches.engine.serve import GenerateRequest
from benches.peers.report import libraries, machine, results_file, results_name
from benches.peers.traces import bbh_tasks
from pyengine import LLM, SamplingParams

PLAIN, NGRAM, SUFFIX = "without", "ngram", "suffix"
LOOKUP, GENERATE = "transformers, look-up", "transformers"
VLLM, VLLM_NGRAM = "vLLM", "vLLM, ngram"
DRAFTS = 7
NAMES = [
    *("Ada", "Bruno", "Chen", "Dana", "Emil", "Farah", "Goran"),
    *("Abara", "Brandt", "Costa", "Dahl", "Egger", "Fischer", "Gruber"),
]
JOBS = ["a baker", "a pilot", "a nurse", "a carpenter", "a teacher", "a diver"]
TOPICS = [
    *("a lighthouse keeper", "two sisters and a boat", "why the sky is blue", "a winter market"),
    *("how bread is made", "an old violin", "a letter that came too late", "what tides are"),
]


@dataclass(frozen=True)
class Work:
    """Prompts as token ids, and how they are answered."""

    name: str
    prompts: list[list[int]]
    params: SamplingParams


@dataclass(frozen=True)
class Figure:
    """One engine on one work, once."""

    work: str
    batch: int
    engine: str
    seconds: float
    tokens: int
    per_step: float | None
    """Tokens per decode that had drafts; 1 without any, None if not reported."""

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def chat(llm: LLM, text: str) -> list[int]:
    """A conversation that asks for this."""
    return llm.apply_chat_template([{"role": "user", "content": text}])


def functions() -> list[str]:
    """Functions of this repository of 300 to 900 characters."""
    sources: list[str] = []
    for path in sorted((ROOT / "pyengine").rglob("*.py")):
        sources += re.findall(r"^def [^\n]+:\n(?:    [^\n]*\n|\n)+", path.read_text(), re.MULTILINE)
    return [match.strip() for match in sources if 300 <= len(match) <= 900]


def questions(first: int, count: int) -> list[str]:
    """So many questions, of one task after the other, behind their worked examples."""
    tasks = bbh_tasks()
    return [
        task.prompt(task.questions[at // len(tasks)]) + " Let's think step by step.\n"
        for at in range(first, first + count)
        for task in [tasks[at % len(tasks)]]
    ]


def works(llm: LLM, number: int, count: int, max_tokens: int) -> list[Work]:
    """`count` prompts of each kind, others in every round."""
    greedy = SamplingParams(temperature=0, max_tokens=max_tokens)
    drawn = SamplingParams(temperature=0.8, max_tokens=max_tokens)
    places = range(number * count, (number + 1) * count)
    shuffled = Random(1).sample(functions(), len(functions()))
    copy = "Write this Python function again, with a comment before it and nothing else changed:"
    form = "as a list of the fields Name, Profession, City, Favourite food, Motto and Summary."
    people = [f"{NAMES[at % 7]} {NAMES[at // 7 % 7 + 7]}, {JOBS[at % len(JOBS)]}" for at in places]
    profiles = [chat(llm, f"Make up a profile of {person}, {form}") for person in people]
    return [
        Work(
            "copying",
            [chat(llm, f"{copy}\n\n{shuffled[at % len(shuffled)]}") for at in places],
            greedy,
        ),
        Work(
            "examples",
            [llm.tokenizer.encode(text)[-1500:] for text in questions(places.start, count)],
            replace(greedy, stop=["\n\nQ:"]),
        ),
        Work(
            "prose",
            [chat(llm, f"Tell me about {TOPICS[at % len(TOPICS)]} ({at}).") for at in places],
            drawn,
        ),
        Work("forms", profiles, greedy),
        Work("forms again", profiles, greedy),
    ]


def ours(llm: LLM, name: str, batch: int, work: Work) -> Figure:
    """All prompts of a work, `batch` at a time, each of them in the cache."""
    seconds, tokens, before = 0.0, 0, llm.stats()
    for first in range(0, len(work.prompts), batch):
        prompts = work.prompts[first : first + batch]
        params = [replace(work.params, seed=first + at) for at in range(len(prompts))]
        first_token = SamplingParams(temperature=0, max_tokens=1, speculate=False)
        llm.generate(prompts, first_token, use_tqdm=False)
        start = perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds += perf_counter() - start
        tokens += sum(len(output.outputs[0].token_ids) for output in outputs)
    after = llm.stats()
    accepted = after.counters["accepted_draft_tokens"] - before.counters["accepted_draft_tokens"]
    decodes = after.num_drafts - before.num_drafts
    per_step = 1 + accepted / decodes if decodes else 1.0
    return Figure(work.name, batch, name, seconds, tokens, per_step)


def theirs(model: Any, name: str, options: Mapping[str, Any], work: Work) -> Figure:
    """transformers' `generate`, one prompt after the other."""
    seconds, tokens = 0.0, 0
    sampled = work.params.temperature > 0
    if sampled:
        options = {**options, "temperature": work.params.temperature}
    for prompt in work.prompts:
        for times, length in ((-1, 1), (1, work.params.max_tokens)):
            torch.manual_seed(0)
            start = perf_counter()
            with torch.inference_mode():
                output = model.generate(
                    torch.tensor([prompt]), do_sample=sampled, max_new_tokens=length, **options
                )
            seconds += times * (perf_counter() - start)
        tokens += output.shape[1] - len(prompt)
    return Figure(work.name, 1, name, seconds, tokens, None)


def peer(engine: Engine, name: str, batch: int, work: Work) -> Figure:
    """vLLM, as `ours`; one seed for a batch."""
    seconds, tokens, params = 0.0, 0, work.params
    for first in range(0, len(work.prompts), batch):
        prompts = work.prompts[first : first + batch]
        engine.generate(GenerateRequest(prompts, 1))
        answer = engine.generate(
            GenerateRequest(
                prompts,
                params.max_tokens or 0,
                temperature=params.temperature,
                stops=True,
                stop=tuple(params.stop),
                seed=first,
            )
        )
        seconds += answer["seconds"]
        tokens += sum(map(len, answer["tokens"]))
    return Figure(work.name, batch, name, seconds, tokens, None)


def peers(dtype: str, caches: Path) -> dict[str, Engine]:
    """vLLM without drafts and with n-grams; what refuses is said on standard error."""
    ngram = {"method": "ngram", "num_speculative_tokens": DRAFTS, "prompt_lookup_max": 4}
    wanted: dict[str, dict[str, Any]] = {
        VLLM: {},
        VLLM_NGRAM: {"speculative_config": {**ngram, "prompt_lookup_min": 2}},
    }
    engines = {}
    for name, options in wanted.items():
        try:
            engines[name] = Engine(VLLM32, dtype, caches, options)
        except RuntimeError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return engines


def rows(rounds: Sequence[Sequence[Figure]]) -> list[str]:
    """Tokens per second of each engine and how often that of the first, in one line per engine."""
    lines = []
    for column in zip(*rounds, strict=True):
        figure = column[0]
        pairs = zip(column, rounds, strict=True)
        ratio = median(turn.rate / first[0].rate for turn, first in pairs)
        counts = [turn.per_step for turn in column if turn.per_step is not None]
        per_step = f"{median(counts):.2f}" if counts else ""
        rate = median(turn.rate for turn in column)
        case = f"{figure.work} | {figure.batch} | {figure.engine}"
        lines.append(f"| {case} | {rate:.1f} | {ratio:.2f} | {per_step} |")
    return lines


def reference(llm: LLM, dtype: str) -> Any:
    """The same model in transformers."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(llm.model_path, dtype=getattr(torch, dtype))
    return model.eval()


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", default="1,8,32", help="requests at once (1,8,32)")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--requests", type=int, default=8, help="requests of a kind, at least (8)")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer (128)")
    parser.add_argument("--dtype", default="bfloat16", help="of the weights (bfloat16)")
    parser.add_argument("--no-transformers", action="store_true", help="this engine alone")
    parser.add_argument("--no-vllm", action="store_true", help="without vLLM")
    options = parser.parse_args()
    with ExitStack() as stack:
        measure(options, stack)


def measure(options: argparse.Namespace, stack: ExitStack) -> None:
    """Run, print, and write the figures down."""
    shared: dict[str, Any] = {"device": "cpu", "dtype": options.dtype, "quantization": "none"}
    shared |= {"num_blocks": 4000, "num_speculative_tokens": DRAFTS}
    drafting: dict[str, Any] = {PLAIN: None, NGRAM: "ngram", SUFFIX: "suffix"}
    llms = {name: LLM(**shared, speculation=item) for name, item in drafting.items()}
    model = None if options.no_transformers else reference(llms[PLAIN], options.dtype)
    caches = Path(stack.enter_context(TemporaryDirectory()))
    others = {} if options.no_vllm else peers(options.dtype, caches)
    for engine in others.values():
        stack.enter_context(engine)
    rounds_of: dict[tuple[int, str], list[list[Figure]]] = {}
    for batch in map(int, options.batch.split(",")):
        engines: dict[str, Callable[[Work], Figure]] = {
            name: partial(ours, llm, name, batch) for name, llm in llms.items()
        }
        if model is not None and batch == 1:
            engines[GENERATE] = partial(theirs, model, GENERATE, {})
            engines[LOOKUP] = partial(theirs, model, LOOKUP, {"prompt_lookup_num_tokens": DRAFTS})
        engines |= {name: partial(peer, item, name, batch) for name, item in others.items()}
        count = max(batch, options.requests)
        for number in range(options.rounds):
            for work in works(llms[PLAIN], number, count, options.max_tokens):
                names = Random(number).sample(list(engines), len(engines))
                by_name = {name: engines[name](work) for name in names}
                column = [by_name[name] for name in engines]
                rounds_of.setdefault((batch, work.name), []).append(column)
                print(f"round {number + 1}: {column}", file=sys.stderr, flush=True)
    print("| work | batch | engine | tok/s | times | tokens per decode with drafts |")
    print("|---|---:|---|---:|---:|---:|")
    for rounds in rounds_of.values():
        print("\n".join(rows(rounds)))
    figures = [
        asdict(item) for rounds in rounds_of.values() for column in rounds for item in column
    ]
    about = {**machine(), **libraries(), "drafts": DRAFTS, "dtype": options.dtype}
    target = results_file(results_name("speculative"))
    target.write_text(json.dumps({"about": about, "figures": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
