"""GGUF files in their own bits: this engine and llama.cpp, the same file, all cores, in turns.

    .venv/bin/python -m benches.engine.gguf FILE [FILE ...] [--rounds 3]

Greedy, random tokens, the end of sequence ignored. Every engine is a process of its own. llama.cpp
decodes all sequences of a work in one batch (`llama_batch.py`), as its server does with as many
slots; it is looked for in `.venv-llama` (see `end_to_end.py`). `--make` writes a file of random
weights in the shape of a 7B model first, Q4_K, 3.8 GB. Prints a table in markdown: tokens
per second (of the prompt where a work has one token of output), the ratio of the medians, the
seconds from the start of the process to the first token, and the peak of the resident memory.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any

from benches.engine.works import Work
from benches.peers.report import machine
from pyengine.models.gguf_header import read_header

ROOT = Path(__file__).parents[2]
LLAMA_PYTHON = ROOT / ".venv-llama/bin/python"
SEQUENCES = 32
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

    def __init__(self, name: str, path: Path) -> None:
        commands = {
            "pyengine": [sys.executable, "-m", "benches.engine.gguf", "--serve", str(path)],
            "llama.cpp": [
                *(str(LLAMA_PYTHON), "-m", "benches.engine.llama_batch"),
                *(str(path), str(SEQUENCES)),
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
    for line in sys.stdin:
        asked = json.loads(line)
        params = SamplingParams(temperature=0, max_tokens=asked["max_tokens"], ignore_eos=True)
        begin = perf_counter()
        outputs = llm.generate(asked["prompts"], params, use_tqdm=False)
        tokens = [output.outputs[0].token_ids for output in outputs]
        print(json.dumps({"seconds": perf_counter() - begin, "tokens": tokens}), flush=True)


def table(path: Path, rounds: int) -> list[str]:
    """The rows of one file."""
    engines = {name: Engine(name, path) for name in ENGINES}
    rows = [
        f"\n| {path.name}, {path.stat().st_size / 1e6:.0f} MB | pyengine | llama.cpp | ratio |",
        "|---|---:|---:|---:|",
    ]
    vocab_size = next(
        tensor.shape[0]
        for tensor in read_header(path).tensors
        if tensor.name == "token_embd.weight"
    )
    for work in WORKS:
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
        cells = " | ".join(f"{rate:,.0f}" for rate in rates)
        rows.append(f"| {work.name} | {cells} | {rates[0] / rates[1]:.2f} |")
        print(rows[-1], file=sys.stderr, flush=True)
    starts = [engine.start_seconds for engine in engines.values()]
    cells = " | ".join(f"{start:.2f} s" for start in starts)
    rows.append(f"| start to first token | {cells} | {starts[0] / starts[1]:.2f} |")
    peaks = [engine.peak_bytes() for engine in engines.values()]
    cells = " | ".join(f"{peak / 1e6:,.0f} MB" for peak in peaks)
    rows.append(f"| peak memory | {cells} | {peaks[0] / peaks[1]:.2f} |")
    for engine in engines.values():
        engine.close()
    return rows


def make_random(path: Path) -> None:
    """Write a llama of the shape of 7B models, of random blocks in Q4_K; norms are 1."""
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter

    hidden, inner, layers, vocab_size = 4096, 11008, 32, 32000
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(layers)
    writer.add_context_length(4096)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(32)
    writer.add_head_count_kv(32)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(vocab_size)])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(["t 0"])
    shapes = {"token_embd": (vocab_size, hidden), "output": (vocab_size, hidden)}
    for layer in range(layers):
        shapes |= {
            f"blk.{layer}.attn_{name}": (hidden, hidden) for name in ("q", "k", "v", "output")
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
    parser.add_argument("--dtype", default="auto", help="of rows, in this engine")
    parser.add_argument("--serve", action="store_true", help="for this script itself")
    parser.add_argument("--make", action="store_true", help="write the first file before")
    options = parser.parse_args()
    if options.make:
        make_random(options.files[0])
    if options.serve:
        serve(str(options.files[0]), options.dtype)
        return
    print(json.dumps(machine()))
    for path in options.files:
        print("\n".join(table(path, options.rounds)), flush=True)


if __name__ == "__main__":
    main()
