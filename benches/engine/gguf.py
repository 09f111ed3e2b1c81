"""GGUF files in their own bits: this engine and llama.cpp, the same file, all cores, in turns.

    .venv/bin/python -m benches.engine.gguf FILE [FILE ...] [--rounds 3] [--sequences 32]
    .venv/bin/python -m benches.engine.gguf FILE --make --sequences 8

Greedy, random tokens, the end of sequence ignored. Every engine is a process of its own. llama.cpp
decodes all sequences of a work in one batch (`llama_batch.py`), as its server does with as many
slots; it is looked for in `.venv-llama` (see `end_to_end.py`) or at `LLAMA_PYTHON`. `--make` writes
a file of random weights in the shape of a 7B model first, Q4_K, 3.8 GB. Works of more than
`--sequences` sequences are left out: llama.cpp takes memory for all of them.

Prints a table in markdown: the seconds from the start of the process to the first token, with the
file and the programs in the page cache; tokens per second (of the prompt where a work has one token
of output); the peak of the resident memory, of the file and this engine's KV pool together. Ratios
are those of medians.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from benches.engine.works import Work
from benches.peers.report import machine
from pyengine.models.gguf_header import read_header

ROOT = Path(__file__).parents[2]
LLAMA_PYTHON = os.environ.get("LLAMA_PYTHON", str(ROOT / ".venv-llama/bin/python"))
KV_BYTES = 1 << 30
WORKS = (
    Work(1, 0, 32, 64),
    Work(1, 0, 512, 1),
    Work(8, 0, 32, 64),
    Work(32, 0, 32, 64),
    Work(32, 512, 16, 32),
)
ENGINES = ("pyengine", "llama.cpp")


class Engine:
    """A process that generates."""

    def __init__(self, name: str, path: Path, sequences: int) -> None:
        commands = {
            "pyengine": [sys.executable, "-m", "benches.engine.gguf", "--serve", str(path)],
            "llama.cpp": [
                *(LLAMA_PYTHON, "-m", "benches.engine.llama_batch"),
                *(str(path), str(sequences)),
            ],
        }
        begin = perf_counter()
        self._process = subprocess.Popen(
            commands[name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.generate([[5, 6, 7]], 1)
        self.start_seconds = perf_counter() - begin

    def generate(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """`seconds` and `tokens`."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def peak_bytes(self) -> int:
        """The largest resident memory so far."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        (peak,) = [line.split()[1] for line in lines if line.startswith("VmHWM")]
        return int(peak) * 1024

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def serve(path: str, dtype: str) -> None:
    """Answer line by line, as `llama_batch.py` does."""
    from pyengine import LLM, SamplingParams

    llm = LLM(path, device="cpu", dtype=dtype, kv_cache_memory=KV_BYTES)
    assert llm.describe()["quantization"] != "none", "the file was converted"
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
        begin = perf_counter()
        outputs = llm.generate(asked["prompts"], params, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        print(json.dumps({"seconds": perf_counter() - begin, "tokens": tokens}), flush=True)


def start_seconds(path: Path, rounds: int, sequences: int) -> list[float]:
    """From the start of each engine's process to its first token; the first start is not timed."""
    seconds = {name: list[float]() for name in ENGINES}
    for turn in range(-1, rounds):
        for name in ENGINES:
            engine = Engine(name, path, sequences)
            engine.close()
            if turn >= 0:
                seconds[name].append(engine.start_seconds)
    return [median(seconds[name]) for name in ENGINES]


def table(path: Path, rounds: int, sequences: int) -> Iterator[str]:
    """The rows of one file."""
    num_bytes = path.stat().st_size
    yield f"\n| {path.name}, {num_bytes / 1e6:.0f} MB | pyengine | llama.cpp | ratio |"
    yield "|---|---:|---:|---:|"
    starts = start_seconds(path, rounds, sequences)
    cells = " | ".join(f"{start:.2f} s" for start in starts)
    yield f"| start to first token | {cells} | {starts[0] / starts[1]:.2f} |"
    engines = {name: Engine(name, path, sequences) for name in ENGINES}
    vocab_size = next(
        tensor.shape[0]
        for tensor in read_header(path).tensors
        if tensor.name == "token_embd.weight"
    )
    for work in WORKS:
        if work.count > sequences:
            continue
        random, seconds = Random(work.name), {name: list[float]() for name in ENGINES}
        for turn in range(-1, rounds):
            shared = [random.randrange(3, vocab_size) for _ in range(work.shared)]
            prompts = [
                [*shared, *(random.randrange(3, vocab_size) for _ in range(work.own))]
                for _ in range(work.count)
            ]
            for name in ENGINES if turn % 2 else reversed(ENGINES):
                found = engines[name].generate(prompts, work.max_tokens)
                assert {len(tokens) for tokens in found["tokens"]} == {work.max_tokens}
                if turn >= 0:
                    seconds[name].append(found["seconds"])
        rates = [work.tokens / median(seconds[name]) for name in ENGINES]
        cells = " | ".join(f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}" for rate in rates)
        yield f"| {work.name} | {cells} | {rates[0] / rates[1]:.2f} |"
    peaks = [engine.peak_bytes() for engine in engines.values()]
    cells = " | ".join(f"{peak / 1e6:,.0f} MB" for peak in peaks)
    yield f"| peak memory | {cells} | {peaks[0] / peaks[1]:.2f} |"
    yield f"| of the file and a pool of 1 GiB | {peaks[0] / (num_bytes + KV_BYTES):.2f} | | |"
    for engine in engines.values():
        engine.close()


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The sizes of a llama; those of 7B models unless given."""

    hidden: int = 4096
    inner: int = 11008
    layers: int = 32
    heads: int = 32
    kv_heads: int = 32
    context: int = 4096


def make_random(path: Path, shape: Shape) -> None:
    """Write a llama of this shape, of random blocks in Q4_K; norms are 1."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    hidden, inner, layers, vocab_size = shape.hidden, shape.inner, shape.layers, 32000
    kv_size = hidden // shape.heads * shape.kv_heads
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(shape.context)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(["t", "0", *(f"t{number}" for number in range(vocab_size - 2))])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["t 0"])
    shapes = {"token_embd": (vocab_size, hidden), "output": (vocab_size, hidden)}
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_{name}": (kv_size if name in ("k", "v") else hidden, hidden)
            for name in ("q", "k", "v", "output")
        }
        shapes |= {f"blk.{layer}.ffn_{name}": (inner, hidden) for name in ("gate", "up")}
        shapes |= {f"blk.{layer}.ffn_down": (hidden, inner)}
    norms = [
        "output_norm",
        *(f"blk.{at}.{kind}_norm" for at in range(layers) for kind in ("attn", "ffn")),
    ]
    kind, num_bytes = GGMLQuantizationType.Q4_K, 144
    sizes = {name: rows * columns // 256 * num_bytes for name, (rows, columns) in shapes.items()}
    for name, (rows, columns) in shapes.items():
        packed = (rows, columns // 256 * num_bytes)
        writer.add_tensor_info(f"{name}.weight", packed, np.dtype(np.uint8), sizes[name], kind)
    for name in norms:
        writer.add_tensor_info(f"{name}.weight", (hidden,), np.dtype(np.float32), 4 * hidden)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(0)
    for size in sizes.values():
        blocks = random.integers(0, 256, (size // num_bytes, num_bytes), dtype=np.uint8)
        scales = (1e-5 * (1 + random.random((len(blocks), 2)))).astype("<f2")
        blocks[:, :4] = scales.view(np.uint8).reshape(-1, 4)
        writer.write_tensor_data(blocks)
    for _ in norms:
        writer.write_tensor_data(np.ones(hidden, np.float32))
    writer.close()


def main() -> None:
    """Measure, or serve."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=32, help="the most at a time (32)")
    parser.add_argument("--dtype", default="auto", help="of rows, in this engine")
    parser.add_argument("--serve", action="store_true", help="for this script itself")
    parser.add_argument("--make", action="store_true", help="write the first file before")
    parser.add_argument("--layers", type=int, default=32, help="of the file that is made (32)")
    options = parser.parse_args()
    if options.make:
        make_random(options.files[0], Shape(layers=options.layers))
    if options.serve:
        serve(str(options.files[0]), options.dtype)
        return
    print(json.dumps(machine()))
    for path in options.files:
        for row in table(path, options.rounds, options.sequences):
            print(row, flush=True)


if __name__ == "__main__":
    main()
