"""Embeddings of texts with a common instruction: this engine and transformers, in turns.

    .venv/bin/python -m benches.engine.embeddings [--texts 512] [--pooling last] [--batch SIZE]

from the root of the repository. The texts are token ids: an instruction of 128 tokens, then 20 to
60 that differ. Both have the embedded model's weights in float32 and the same threads.
transformers embeds batches of texts sorted by length, without a cache, in the batch size that is
fastest for a part of the texts, and does not compute logits. The engine starts each round with an
empty cache.

Seconds on the clock, and on the processor, which a busy machine does not change much. The exit
status is 1 if the embeddings differ by more than 1e-4.
"""

import argparse
import sys
from time import perf_counter, process_time
from typing import Any

import numpy as np
import numpy.typing as npt

from benches.engine.float_model import float_folder
from pyengine.cpu.threads import usable_threads
from pyengine.llm import LLM
from pyengine.pooling_params import PoolingParams

SHARED, OWN, VOCABULARY = 128, (20, 60), 49_152
SIZES = (8, 16, 32, 64)
PART = 64
"""Texts that choose the batch size."""
Vectors = npt.NDArray[np.float32]


def made_texts(count: int) -> list[list[int]]:
    """Token ids with a common beginning."""
    rng = np.random.default_rng(0)
    shared = rng.integers(1000, VOCABULARY, SHARED).tolist()
    lengths = rng.integers(OWN[0], OWN[1] + 1, count)
    return [shared + rng.integers(1000, VOCABULARY, length).tolist() for length in lengths]


def by_transformers(model: Any, texts: list[list[int]], pooling: str, size: int) -> Vectors:
    """Normalised embeddings by batches of so many texts."""
    import torch

    order = sorted(range(len(texts)), key=lambda at: len(texts[at]))
    vectors: dict[int, Any] = {}
    with torch.inference_mode():
        for begin in range(0, len(order), size):
            batch = order[begin : begin + size]
            lengths = torch.tensor([len(texts[at]) for at in batch])
            longest = int(lengths.max())
            ids = torch.zeros(len(batch), longest, dtype=torch.int64)
            for row, at in enumerate(batch):
                ids[row, : len(texts[at])] = torch.tensor(texts[at])
            mask = torch.arange(longest)[None] < lengths[:, None]
            states = model(ids, attention_mask=mask, use_cache=False).last_hidden_state
            if pooling == "last":
                pooled = states[torch.arange(len(batch)), lengths - 1]
            else:
                pooled = (states * mask[..., None]).sum(1) / lengths[:, None]
            pooled = torch.nn.functional.normalize(pooled, dim=-1).numpy()
            vectors.update(zip(batch, pooled, strict=True))
    return np.array([vectors[at] for at in range(len(texts))])


def by_engine(llm: LLM, texts: list[list[int]], pooling: Any) -> tuple[Vectors, float]:
    """The same embeddings, and the share of tokens that were cached."""
    outputs = llm.embed(texts, PoolingParams(pooling=pooling), use_tqdm=False)
    cached = sum([output.num_cached_tokens for output in outputs])
    vectors = np.array([output.outputs.embedding for output in outputs], dtype=np.float32)
    return vectors, cached / sum(map(len, texts))


def timed(work: Any) -> tuple[Any, float, float]:
    """A result, and the seconds that it took on the clock and on the processor."""
    clock, processor = perf_counter(), process_time()
    result = work()
    return result, perf_counter() - clock, process_time() - processor


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=512)
    parser.add_argument("--pooling", choices=("last", "mean"), default="last")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--batch", type=int, help="transformers' batch size; else it is searched")
    arguments = parser.parse_args()
    import torch
    from transformers import AutoModel

    texts, pooling = made_texts(arguments.texts), arguments.pooling
    threads = usable_threads()
    torch.set_num_threads(threads)
    model = AutoModel.from_pretrained(float_folder(), dtype=torch.float32).eval()
    part = texts[:PART]
    sizes = SIZES if arguments.batch is None else (arguments.batch,)
    times = {size: timed(lambda: by_transformers(model, part, pooling, size))[1] for size in sizes}  # noqa: B023
    size = min(times, key=times.__getitem__)
    print(f"{len(texts)} texts, {threads} threads; batches of {size} by {times}", flush=True)
    worst, ratios = 0.0, []
    for _ in range(arguments.rounds):
        wanted, clock, processor = timed(lambda: by_transformers(model, texts, pooling, size))
        with LLM(float_folder(), dtype="float32", num_blocks=4096, num_threads=threads) as llm:
            by_engine(llm, [text[SHARED:] for text in part], pooling)  # warm, with other prompts
            result, own_clock, own_processor = timed(lambda: by_engine(llm, texts, pooling))
        vectors, cached = result
        worst = max(worst, float(np.abs(vectors - wanted).max()))
        ratios.append(clock / own_clock)
        print(
            f"transformers {clock:.1f} s ({processor:.1f} s of processor), this engine "
            f"{own_clock:.1f} s ({own_processor:.1f} s), {cached:.0%} cached: "
            f"{clock / own_clock:.2f} x ({processor / own_processor:.2f} x)"
        )
    print(f"{pooling}: {np.median(ratios):.2f} x, largest difference {worst:.1e}")
    return int(worst > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
