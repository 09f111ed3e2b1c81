"""Log-probabilities with bfloat16, 8-bit weights or an 8-bit KV cache, on BIG-Bench-Hard text.

    .venv/bin/python -m benches.engine.logprobs [--tasks 8] [--tokens 512]

from the root of the repository, with the archive `bbh_text.tar.gz` in `PYENGINE_TRACES`. The
embedded model reads the worked examples of some tasks; for each token of them, its log-probability
is compared with that in float32. A table in markdown goes to standard output.
"""

import argparse
import os
import tarfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from pyengine import LLM, SamplingParams

TRACES = Path(os.environ.get("PYENGINE_TRACES", Path(__file__).parents[3] / "shared/data/traces"))
MODES: dict[str, tuple[str, Literal["int8"] | None, str]] = {
    "float32": ("float32", None, "auto"),
    "bfloat16": ("bfloat16", None, "auto"),
    "float32, int8": ("float32", "int8", "auto"),
    "bfloat16, int8": ("bfloat16", "int8", "auto"),
    "float32, KV cache in int8": ("float32", None, "int8"),
    "bfloat16, KV cache in int8": ("bfloat16", None, "int8"),
}


def texts(count: int) -> list[str]:
    """The worked examples of so many tasks, in the order of their names."""
    with tarfile.open(TRACES / "bbh_text.tar.gz") as archive:
        names = [name for name in archive.getnames() if "cot-prompts/" in name]
        found = [archive.extractfile(name) for name in sorted(names) if name.endswith(".txt")]
        whole = [match.read().decode() for match in found if match is not None]
    return [item.split("-----\n", 1)[-1].strip() for item in whole[:count]]


def logprobs(mode: str, prompts: list[str], tokens: int) -> npt.NDArray[np.float64]:
    """Of every token but the first of each text."""
    dtype, quantization, kv = MODES[mode]
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, truncate_prompt_tokens=tokens
    )
    settings: dict[str, Any] = {"quantization": quantization, "kv_cache_dtype": kv}
    with LLM(device="cpu", dtype=dtype, num_blocks=256, **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found = []
    for output in outputs:
        pairs = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        found += [each[token].logprob for token, each in pairs if each is not None]
    return np.array(found)


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=8, help="texts (8)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each, from its end")
    options = parser.parse_args()
    prompts = texts(options.tasks)
    exact = logprobs("float32", prompts, options.tokens)
    print(f"{len(exact)} tokens, in float32 {exact.mean():.4f} each\n")
    print("| against float32 | mean difference | mean of its size | 99 of 100 below | worst |")
    print("|---|---:|---:|---:|---:|")
    for mode in list(MODES)[1:]:
        found = logprobs(mode, prompts, options.tokens) - exact
        size = np.abs(found)
        figures = (found.mean(), size.mean(), np.quantile(size, 0.99), size.max())
        print(f"| {mode} | {' | '.join(f'{figure:.4f}' for figure in figures)} |", flush=True)


if __name__ == "__main__":
    main()
