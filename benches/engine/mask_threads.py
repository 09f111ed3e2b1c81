"""Filling the masks of many rows of one grammar: one thread, two, and llguidance's own two.

    .venv/bin/python -m benches.engine.mask_threads [--rounds 25]
    .venv/bin/python -m benches.engine.mask_threads --show

from the root of the repository, on a machine that does nothing else. The vocabulary is that of the
embedded model. A round accepts a token in each row, then fills the masks of all rows; ways take
turns. A figure is the median time of a filling in milliseconds.

Results: `benches/results/mask-threads-MACHINE.json`; `--docs` puts the table into
docs/benchmarks/engine.md, between this machine's marks.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import Any

import torch
from llguidance import LLExecutor
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par

from benches.engine.page import publish
from benches.peers.report import heading, machine, results_file, results_name
from pyengine import LLM, StructuredOutputs
from pyengine.sampling.grammar import Grammars
from pyengine.sampling.token_masks import MaskFiller, TokenMatcher

CITY = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 99}, "country": {"type": "string"}},
    "required": ["city", "country"],
    "additionalProperties": False,
}
SUMS = r"""start: expr
expr: NAME | expr "+" expr | "(" expr ")" | NUMBER
NAME: /[a-z_][a-z0-9_]{0,99}/
NUMBER: /[0-9]+(\.[0-9]+)?/
"""
GRAMMARS: dict[str, tuple[StructuredOutputs, str]] = {
    "JSON schema, in a string": (StructuredOutputs(json=CITY), '{"city": "To'),
    "regular expression": (
        StructuredOutputs(regex=r"([a-z]{3,99} ){2,9}(x|yy|[0-9]{2,7})*"),
        "abc de",
    ),
    "Lark": (StructuredOutputs(grammar=SUMS), "(abc+d"),
}
"""Each with the text that all rows have accepted."""
NEXT = "a"
"""The token of each round."""
ROWS = (32, 64, 256)
WAYS = ("one thread", "two threads", "llguidance's two")
WARM_UP = 3


def matchers(grammars: Grammars, form: StructuredOutputs, count: int) -> list[TokenMatcher]:
    """Matchers of a grammar that has all of its bases."""
    early: list[TokenMatcher] = []
    while len({matcher.base for matcher in early}) < torch.get_num_threads():
        early.append(grammars.matcher(form))
    early.clear()
    return [grammars.matcher(form) for _ in range(count)]


class Bench:
    """The engine's vocabulary, and grammars for one thread and for two."""

    def __init__(self) -> None:
        self.llm = LLM(num_blocks=64)
        limits = self.llm._input_processor.limits
        self.vocab_size = limits.vocab_size
        self._grammars: dict[int, Grammars] = {}
        for threads in (1, 2):
            torch.set_num_threads(threads)
            self._grammars[threads] = Grammars(
                self.llm.get_tokenizer(), limits.vocab_size, limits.eos_token_ids
            )

    def measure(self, name: str, count: int, rounds: int) -> dict[str, float]:
        """Milliseconds of a filling of so many rows, by way."""
        form, text = GRAMMARS[name]
        [token] = self.llm.encode(NEXT, add_special_tokens=False)
        ways = {way: self._way(way, form, count) for way in WAYS}
        for rows, _ in ways.values():
            for row in rows:
                for accepted in self.llm.encode(text, add_special_tokens=False):
                    row.append(accepted)
        times: dict[str, list[float]] = {way: [] for way in WAYS}
        for _ in range(rounds + WARM_UP):
            for way, (rows, fill) in ways.items():
                for row in rows:
                    row.append(token)
                start = perf_counter()
                fill()
                times[way].append(1e3 * (perf_counter() - start))
                assert not any(row.error for row in rows)
        return {way: median(each[WARM_UP:]) for way, each in times.items()}

    def _way(
        self, way: str, form: StructuredOutputs, count: int
    ) -> tuple[list[TokenMatcher], Callable[[], object]]:
        """Rows, and what fills their masks."""
        threads = 2 if way == "two threads" else 1
        torch.set_num_threads(threads)
        rows = matchers(self._grammars[threads], form, count)
        if way == "llguidance's two":
            executor, masks = LLExecutor(2), allocate_token_bitmask(count, self.vocab_size)
            pairs = [(row._matcher, at) for at, row in enumerate(rows)]
            return rows, lambda: fill_next_token_bitmask_par(executor, pairs, masks)
        filler, num_words = MaskFiller(), -(-self.vocab_size // 32)

        def fill() -> None:
            torch.set_num_threads(threads)
            filler.fill(rows, num_words).result()

        return rows, fill


def table(content: dict[str, Any]) -> Iterator[str]:
    """In markdown: milliseconds, and the share of one thread's time that two threads take."""
    yield heading(content["machine"], [content["rounds"]])
    yield f"\n| milliseconds | rows | {' | '.join(WAYS)} | two threads / one |"
    yield "|---|---:|" + "---:|" * (len(WAYS) + 1)
    for name, by_rows in content["milliseconds"].items():
        for count, times in by_rows.items():
            cells = " | ".join(f"{times[way]:.1f}" for way in WAYS)
            ratio = times["two threads"] / times["one thread"]
            yield f"| {name} | {count} | {cells} | {ratio:.2f} |"


def main() -> None:
    """Measure, or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--show", action="store_true", help="the table of the last run")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    args = parser.parse_args()
    name = results_name("mask-threads")
    path = results_file(name)
    if args.show:
        content = json.loads(path.read_text())
    else:
        about, bench = machine(), Bench()
        results: dict[str, dict[str, dict[str, float]]] = {}
        for grammar in GRAMMARS:
            for count in ROWS:
                found = bench.measure(grammar, count, args.rounds)
                results.setdefault(grammar, {})[str(count)] = found
                print(grammar, count, found, file=sys.stderr)
        content = {"machine": about, "rounds": args.rounds, "milliseconds": results}
        path.write_text(json.dumps(content, indent=1) + "\n")
    publish(name, table(content), write=args.docs)


if __name__ == "__main__":
    main()
