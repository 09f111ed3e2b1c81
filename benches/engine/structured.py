"""The cost of constraining answers to a JSON schema, as a share of a decode step.

    .venv/bin/python -m benches.engine.structured [--quick]

from the root of the repository, with the embedded model, greedy. Requests in the middle of long
answers: once free, once kept to a schema, by turns in the same engine. The schema is a long list
of small objects, so white space, keys, strings and numbers are all in it. A time is that of a step,
the mean of 16, by the clock; shares are those of two runs that followed each other.

Further the time to compile a grammar, of schemas that are all different.

A table goes to standard output, everything to `benches/results/structured-MACHINE.json`.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from time import perf_counter_ns as clock
from typing import Any

from benches.peers.report import libraries, machine, results_file, results_name
from benches.peers.sampling import Spread
from pyengine import LLM, SamplingParams, StructuredOutputs
from pyengine.engine.core import Engine
from pyengine.engine.input_processor import InputProcessor
from pyengine.request.prompts import Prompt

SIZES = (1, 32)
PROMPT, STEPS = 64, 16
GOAL = 0.03
"""A share of a step."""
ITEM: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = {"type": "array", "items": ITEM, "minItems": 10_000}


def step_time(
    engine: Engine, processor: InputProcessor, count: int, form: StructuredOutputs | None
) -> float:
    """Milliseconds of a step in which so many requests decode."""
    params = SamplingParams(
        temperature=0, max_tokens=8 * STEPS, ignore_eos=True, structured_outputs=form
    )
    for at in range(count):
        ids = [3 + (at * 31 + place) % 90 for place in range(PROMPT)]
        engine.add(processor.request(f"{at}", Prompt(token_ids=ids), params))
    while any(state.result.first_token_time is None for state in engine.unfinished):
        engine.step()
    for _ in range(4):
        engine.step()
    begin = clock()
    for _ in range(STEPS):
        engine.step()
    took = clock() - begin
    engine.abort(engine.unfinished)
    return took / STEPS / 1e6


def compile_time(processor: InputProcessor, number: int) -> float:
    """Milliseconds for a grammar that was not there before."""
    form = StructuredOutputs(json={**SCHEMA, "title": f"number {number}"})
    begin = clock()
    processor.grammars.matcher(form)
    return (clock() - begin) / 1e6


def measure(
    engine: Engine, processor: InputProcessor, sizes: tuple[int, ...], rounds: int
) -> dict[str, Any]:
    """Milliseconds by row, and what share bound steps take more than free ones."""
    form = StructuredOutputs(json=SCHEMA)
    results: dict[str, Any] = {}
    processor.grammars.prepare()
    for count in sizes:
        step_time(engine, processor, count, form)  # to warm up
        free: list[float] = []
        bound: list[float] = []
        for at in range(rounds):
            turn = [(free, None), (bound, form)]
            for times, asked in turn if at % 2 else reversed(turn):
                times.append(step_time(engine, processor, count, asked))
        more = [item / other - 1 for item, other in zip(bound, free, strict=True)]
        results[f"{count} rows"] = {
            "free": asdict(Spread.of(free)),
            "bound": asdict(Spread.of(bound)),
            "more": asdict(Spread.of(more)),
        }
    compiled = [compile_time(processor, number) for number in range(8 * rounds)]
    results["compile"] = {"bound": asdict(Spread.of(compiled))}
    return results


def table(results: dict[str, Any]) -> Iterator[str]:
    """In markdown: milliseconds, and the share with its quartiles."""
    yield "| | free ms | kept to a schema ms | more | goal |"
    yield "|---|---:|---:|---:|---:|"
    for name, row in results.items():
        free = f"{row['free']['median']:.2f}" if "free" in row else ""
        more = row.get("more")
        share = f"{more['median']:.1%} ({more['q1']:.1%} to {more['q3']:.1%})" if more else ""
        goal = f"{GOAL:.0%}" if more else ""
        yield f"| {name} | {free} | {row['bound']['median']:.2f} | {share} | {goal} |"


def main() -> None:
    """Run, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="three rounds; nothing is written")
    quick = parser.parse_args().quick
    llm = LLM(max_num_seqs=max(SIZES), max_model_len=1024, num_blocks=2048)
    results = measure(llm._engine, llm._input_processor, SIZES, 3 if quick else 30)
    print("\n".join(table(results)))
    if not quick:
        content = {"machine": machine(), "libraries": libraries(), "results": results}
        results_file(results_name("structured")).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
