"""What a caller of `LLM` pays for the thread that runs the steps: this tree against another one.

    .venv/bin/python -m benches.engine.callers FOLDER [--rounds 9] [--tokens 64]

from the root of the repository. FOLDER is a second tree, with its extension built. Each tree has a
process with the embedded model; they take turns, round by round, each with `generate` of one
prompt, `generate` of 32 prompts, and a `stream` of one. A table in markdown goes to standard
output: medians of tokens per second and the least of them, and the median of the rounds' ratios.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter

ROOT = Path(__file__).parents[2]
WAYS = {"one": 1, "32 at once": 32, "stream": 1}


def serve(num_tokens: int) -> None:
    """Run a way for each line of standard input; print its tokens per second."""
    from pyengine import LLM, SamplingParams

    llm = LLM(num_blocks=2048)
    params = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    for line in sys.stdin:
        way, number = line.rstrip("\n").rsplit(" ", 1)
        prompts = [f"{number}.{row}: the capital of France is" for row in range(WAYS[way])]
        start = perf_counter()
        if way == "stream":
            *_, last = llm.stream(prompts[0], params)
            outputs = [last]
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = perf_counter() - start
        print(sum(len(output.outputs[0].token_ids) for output in outputs) / seconds, flush=True)


class Tree:
    """A process that imports `pyengine` from a folder."""

    def __init__(self, folder: Path, num_tokens: int) -> None:
        code = f"import sys; sys.path[:0] = [{str(folder)!r}]; import pyengine; import runpy; "
        code += f"runpy.run_path({__file__!r})['serve']({num_tokens})"
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=folder,
        )

    def rate(self, way: str, number: int) -> float:
        """Tokens per second."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{way} {number}\n")
        stdin.flush()
        return float(stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="the other tree")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer (64)")
    options = parser.parse_args()
    trees = [Tree(folder.resolve(), options.tokens) for folder in (options.folder, ROOT)]
    print("| | before | least | here | least | here / before |")
    print("|---|---:|---:|---:|---:|---:|")
    for way in WAYS:
        rounds = []
        for number in range(-1, options.rounds):  # the first is to warm up
            order = trees if number % 2 else trees[::-1]
            rates = {tree: tree.rate(way, number) for tree in order}
            rounds.append([rates[tree] for tree in trees])
        before, here = zip(*rounds[1:], strict=True)
        ratio = median([new / old for old, new in rounds[1:]])
        figures = f"{median(before):.1f} | {min(before):.1f} | {median(here):.1f} | {min(here):.1f}"
        print(f"| {way} | {figures} | {ratio:.3f} |", flush=True)
    for tree in trees:
        tree.close()


if __name__ == "__main__":
    main()
