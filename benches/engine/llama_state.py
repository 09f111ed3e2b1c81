"""The first token of a long prompt in llama.cpp: computed and saved to a file, or loaded from it.

    .venv-llama/bin/python -m benches.engine.llama_state MODEL FOLDER save|load SEED...

Called by `stored.py`. Needs llama-cpp-python alone.
"""

import json
import os
import pickle
import sys
from pathlib import Path
from random import Random
from time import monotonic

LONG = 8000
WARM = 1_000_000
"""The seed of a prompt to get warm with."""


def tokens(seed: int, count: int) -> list[int]:
    """Random tokens of the embedded model."""
    random = Random(seed)
    return [random.randrange(3, 49_000) for _ in range(count)]


def main() -> None:
    """Print the seconds to the first token, prompt by prompt."""
    from llama_cpp import Llama

    model, folder, work, *seeds = sys.argv[1:]
    threads = os.cpu_count()
    llm = Llama(
        model, n_ctx=8192, n_batch=512, n_threads=threads, n_threads_batch=threads, verbose=False
    )
    llm.eval(tokens(WARM, 600))
    seconds = []
    for seed in map(int, seeds):
        prompt, file = tokens(seed, LONG), Path(f"{folder}.{seed}")
        llm.reset()
        begin = monotonic()
        if work == "load":
            llm.load_state(pickle.loads(file.read_bytes()))
            llm.n_tokens -= 1  # its logits are computed again, as ours are
            llm.eval(prompt[-1:])
        else:
            llm.eval(prompt)
        llm.sample(temp=0)
        seconds.append(monotonic() - begin)
        if work != "load":
            file.write_bytes(pickle.dumps(llm.save_state()))
    print(json.dumps({"seconds": seconds}))


if __name__ == "__main__":
    main()
