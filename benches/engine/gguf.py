"""GGUF files in their own bits: this engine and llama.cpp, the same file, all cores, in turns.

    .venv/bin/python -m benches.engine.gguf FILE [FILE ...] [--rounds 3] [--sequences 32]
    .venv/bin/python -m benches.engine.gguf FILE --make --sequences 8

Greedy, random tokens, the end of sequence ignored. Engines are those of `end_to_end.py`, which says
where llama.cpp is looked for; it decodes all sequences of a work in one batch, as its server does.
`--make` writes a file of random weights in the shape of a 7B model first, Q4_K, 3.8 GB. Works of
more than `--sequences` sequences are left out: llama.cpp takes memory for all of them.

Prints a table in markdown: seconds from the start of the process to the first token, with the
file and the programs in the page cache; tokens per second (of the prompt where a work has one token
of output); the peak of the resident memory, of the file and this engine's KV pool together.
"""

import argparse
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benches.engine.end_to_end import DEFAULT, LLAMA, START, Engine, Record, measure
from benches.engine.works import Work
from benches.peers.report import machine
from pyengine.models.gguf_header import read_header

KV_BYTES = 1 << 30
WORKS = (
    Work(1, 0, 32, 64),
    Work(1, 0, 512, 1),
    Work(8, 0, 32, 64),
    Work(32, 0, 32, 64),
    Work(32, 512, 16, 32),
)
ENGINES = (DEFAULT, LLAMA)
DTYPE = "auto"


def table(path: Path, rounds: int, sequences: int, folder: Path) -> Iterator[str]:
    """The rows of one file."""
    options = {DEFAULT: {"kv_cache_memory": KV_BYTES}, LLAMA: {"sequences": sequences}}
    record = Record(folder / "record.json", keep=False)

    def started(name: str) -> Engine:
        return Engine(name, DTYPE, folder, options[name], path)

    num_bytes = path.stat().st_size
    yield f"\n| {path.name}, {num_bytes / 1e6:.0f} MB | pyengine | llama.cpp | ratio |"
    yield "|---|---:|---:|---:|"
    for name in ENGINES:
        record.begin(DTYPE, START, name)
    for turn in range(-1, rounds):  # -1: to fill the page cache
        for name in ENGINES:
            with started(name) as engine:
                if turn >= 0:
                    record.add(DTYPE, START, name, engine.start_seconds)
    starts = [median(record.seconds[DTYPE][START][name]) for name in ENGINES]
    cells = " | ".join(f"{start:.2f} s" for start in starts)
    yield f"| start to first token | {cells} | {starts[0] / starts[1]:.2f} |"
    vocab_size = next(
        tensor.shape[0]
        for tensor in read_header(path).tensors
        if tensor.name == "token_embd.weight"
    )
    with ExitStack() as stack:
        engines = [stack.enter_context(started(name)) for name in ENGINES]
        for work in WORKS:
            if work.count > sequences:
                continue
            measure(engines, work, rounds, DTYPE, record, vocab_size)
            cells = " | ".join(record.rate(DTYPE, work, name) for name in ENGINES)
            ratio = record.ratio(DTYPE, work.name, *ENGINES) or float("nan")
            yield f"| {work.name} | {cells} | {ratio:.2f} |"
        peaks = [engine.peak_bytes() for engine in engines]
    cells = " | ".join(f"{peak / 1e6:,.0f} MB" for peak in peaks)
    yield f"| peak memory | {cells} | {peaks[0] / peaks[1]:.2f} |"
    yield f"| of the file and a pool of 1 GiB | {peaks[0] / (num_bytes + KV_BYTES):.2f} | | |"


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
    """Print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=32, help="the most at a time (32)")
    parser.add_argument("--make", action="store_true", help="write the first file before")
    parser.add_argument("--layers", type=int, default=32, help="of the file that is made (32)")
    options = parser.parse_args()
    if options.make:
        make_random(options.files[0], Shape(layers=options.layers))
    print(json.dumps(machine()))
    with TemporaryDirectory(prefix="gguf-") as folder:
        for path in options.files:
            for row in table(path.resolve(), options.rounds, options.sequences, Path(folder)):
                print(row, flush=True)


if __name__ == "__main__":
    main()
