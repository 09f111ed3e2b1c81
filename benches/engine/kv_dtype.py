"""Decodes over long contexts with a KV cache in bfloat16 and in int8, in turns, in one process.

    .venv/bin/python -m benches.engine.kv_dtype [--sequences 32] [--context 2048] [--rounds 3]

from the root of the repository, on a machine that does nothing else. The embedded model (4 bits) in
bfloat16; contexts are random tokens, each request its own, and are cached before the clock starts.
A figure is generated tokens per second; the ratio is the median of the rounds' ratios.
"""

import argparse
from random import Random
from statistics import median
from time import perf_counter

from pyengine import LLM, SamplingParams

CACHES = ("auto", "int8")
NEW_TOKENS = 64


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    random = Random(1)
    prompts = [
        {"prompt_token_ids": [random.randrange(1000, 40_000) for _ in range(options.context)]}
        for _ in range(options.sequences)
    ]
    num_blocks = options.sequences * (options.context // 16 + NEW_TOKENS // 16 + 2)
    engines = [
        LLM(
            device="cpu",
            dtype="bfloat16",
            kv_cache_dtype=kv,
            num_blocks=num_blocks,
            block_size=16,
            max_num_seqs=options.sequences,
        )
        for kv in CACHES
    ]
    for llm in engines:
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=1), use_tqdm=False)
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ratios: list[float] = []
    seconds: dict[str, list[float]] = {kv: [] for kv in CACHES}
    for _ in range(options.rounds):
        for kv, llm in zip(CACHES, engines, strict=True):
            start = perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            seconds[kv].append(perf_counter() - start)
            tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        ratios.append(seconds["auto"][-1] / seconds["int8"][-1])
    for kv in CACHES:
        print(f"{kv}: {tokens / median(seconds[kv]):.0f} tokens/s")
    print(f"int8 / auto: {median(ratios):.2f} ({', '.join(f'{each:.2f}' for each in ratios)})")


if __name__ == "__main__":
    main()
