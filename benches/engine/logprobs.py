"""Log-probabilities in fewer bits against those in float32, on BIG-Bench-Hard text.

    .venv/bin/python -m benches.engine.logprobs [FILE] [--tasks 8] [--tokens 384]

from the root of the repository, with the archive `bbh_text.tar.gz` in `PYENGINE_TRACES`. A model
reads the worked examples of some tasks; for each token of them, its log-probability is compared
with that in float32. The model is the embedded one, or that of a GGUF file, dequantised.

Of the embedded model, files in other formats are made by llama.cpp's quantiser, which is looked for
in `.venv-llama` (see `end_to_end.py`) or at `LLAMA_PYTHON`. Rows with a format in their name are
files whose weights are kept in it. A table in markdown goes to standard output.
"""

import argparse
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from benches.engine.child import LLAMA_PYTHON
from benches.peers.traces import bbh_tasks
from pyengine import LLM, SamplingParams
from pyengine.models.source import embedded_gguf

FORMATS = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q4_K_M": 15, "Q6_K": 18}
"""llama.cpp's numbers of the mixtures that a file is quantised to."""
QUANTISE = """
import ctypes, sys
import llama_cpp
silent = llama_cpp.llama_log_callback(lambda *given: None)
llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype, settings.allow_requantize = int(sys.argv[3]), True
source, target = sys.argv[1].encode(), sys.argv[2].encode()
sys.exit(llama_cpp.llama_model_quantize(source, target, ctypes.byref(settings)))
"""


@dataclass(frozen=True)
class Mode:
    """How a model is loaded."""

    label: str
    dtype: str
    model: Path | None = None
    settings: dict[str, Any] = field(default_factory=dict)


def float_modes(model: Path | None) -> Iterator[Mode]:
    """The model with float weights, and with those rounded here; float32 comes first."""
    for label, settings in (
        ("", {}),
        ("int8", {"quantization": "int8"}),
        ("int4", {"quantization": "int4"}),
        ("KV cache in int8", {"kv_cache_dtype": "int8"}),
    ):
        for dtype in ("float32", "bfloat16"):
            name = f"{dtype}, {label}" if label else dtype
            yield Mode(name, dtype, model, {"quantization": "none"} | settings)


def file_modes(files: dict[str, Path]) -> Iterator[Mode]:
    """The files, each in its formats."""
    for label, path in files.items():
        for dtype in ("float32", "bfloat16"):
            yield Mode(f"{dtype}, {label}", dtype, path)


def made_files(folder: Path) -> dict[str, Path]:
    """The embedded model in each format. In Q4_1 it is in the wheel."""
    source = embedded_gguf()
    files = {}
    for name, number in FORMATS.items():
        files[name] = source if name == "Q4_1" else folder / f"{name}.gguf"
        if name != "Q4_1":
            command = [
                str(LLAMA_PYTHON),
                "-c",
                QUANTISE,
                str(source),
                str(files[name]),
                str(number),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return files


def logprobs(mode: Mode, prompts: list[str], tokens: int) -> tuple[npt.NDArray[np.float64], str]:
    """Of every token but the first of each text; and the formats of the weights."""
    params = SamplingParams(
        temperature=0, max_tokens=1, prompt_logprobs=0, truncate_prompt_tokens=tokens
    )
    with LLM(mode.model, device="cpu", dtype=mode.dtype, num_blocks=256, **mode.settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
        formats = str(llm.describe()["quantization"])
    values = []
    for output in outputs:
        pairs = zip(output.prompt_token_ids[1:], (output.prompt_logprobs or [])[1:], strict=True)
        values += [entry[token].logprob for token, entry in pairs if entry is not None]
    return np.array(values), formats


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", nargs="?", type=Path, help="a GGUF file (the embedded model)")
    parser.add_argument("--tasks", type=int, default=8, help="texts (8)")
    parser.add_argument("--tokens", type=int, default=384, help="tokens of each, from its end")
    options = parser.parse_args()
    prompts = [task.examples for task in bbh_tasks()[: options.tasks]]
    with tempfile.TemporaryDirectory(prefix="pyengine-") as folder:
        path = options.file
        files = {path.stem: path} if path else made_files(Path(folder))
        modes = [*float_modes(path), *file_modes(files)]
        exact, _ = logprobs(modes[0], prompts, options.tokens)
        print(f"{len(exact)} tokens, in float32 {exact.mean():.4f} each\n")
        print("| against float32 | weights | mean | mean of its size | 99 of 100 below | worst |")
        print("|---|---|---:|---:|---:|---:|")
        for mode in modes[1:]:
            values, formats = logprobs(mode, prompts, options.tokens)
            difference = values - exact
            size = np.abs(difference)
            figures = (difference.mean(), size.mean(), np.quantile(size, 0.99), size.max())
            cells = " | ".join(f"{figure:.4f}" for figure in figures)
            print(f"| {mode.label} | {formats} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
