"""Two real engines in one process, one of them made by a thread, and the interpreter's end.

`python -m tests.support.engines_at_the_end FOLDER SIZE` prints their answers, and ends in the
middle of a stream of each; SIZE is `tensor_parallel_size` of the first one.
"""

import sys
import threading
from typing import Any

from pyengine import LLM, SamplingParams
from pyengine.async_engine import AsyncEngine

PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20)
PROMPTS = [[3, 4, 5], [3, 4, 5, 6], [9]]
SETTINGS: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 64}


def answers(llm: LLM) -> list[list[int]]:
    outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


def main(folder: str, size: int) -> None:
    first = LLM(folder, **SETTINGS, tensor_parallel_size=size)
    expected = answers(first)
    made: list[LLM] = []

    def make() -> None:
        made.append(LLM(folder, **SETTINGS, speculation="suffix"))
        found.append(answers(made[0]))

    found: list[list[list[int]]] = []
    maker = threading.Thread(target=make)
    maker.start()
    for _ in range(5):
        found.append(answers(first))
    maker.join()
    found += [answers(made[0]), answers(first)]
    asynchronous = AsyncEngine(folder, **SETTINGS)
    streams = [llm.stream([3, 4, 5], PARAMS) for llm in (first, made[0])]
    for stream in streams:
        next(stream)
    globals().update(kept=(first, made, streams, asynchronous))
    print([tokens == expected for tokens in found], flush=True)
    sys.exit(7)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
