"""The first token of a long prompt in vLLM, whose connector stores KV in a folder.

    .venv-peers/bin/python -m benches.engine.vllm_state MODEL FOLDER DTYPE SEED...

Called by `stored.py`, twice: the first process computes and stores, the second one loads. The
connector is `ExampleConnector`, the only one of vLLM 0.32 that keeps KV on a disk and runs on CPUs:
`OffloadingConnector` refuses them. It stores what the first step computes, so that step takes a
whole prompt.
"""

import json
import sys
from time import monotonic

from benches.engine.llama_state import LONG, WARM, tokens


def main() -> None:
    """Print the seconds to the first token, prompt by prompt."""
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    model, folder, dtype, *seeds = sys.argv[1:]
    llm = LLM(
        model,
        dtype=dtype,
        max_model_len=8192,
        max_num_batched_tokens=8192,
        max_num_seqs=8,
        kv_cache_memory_bytes=2 << 30,
        kv_transfer_config=KVTransferConfig(
            kv_connector="ExampleConnector",
            kv_role="kv_both",
            kv_connector_extra_config={"shared_storage_path": folder},
        ),
    )
    params = SamplingParams(temperature=0, max_tokens=1)

    def first_token(seed: int, count: int) -> float:
        prompt = {"prompt_token_ids": tokens(seed, count)}
        begin = monotonic()
        llm.generate([prompt], params, use_tqdm=False)
        return monotonic() - begin

    first_token(WARM, 600)
    print(json.dumps({"seconds": [first_token(seed, LONG) for seed in map(int, seeds)]}))


if __name__ == "__main__":
    main()
