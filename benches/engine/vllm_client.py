"""vLLM's benchmark client in a separate process, which `serving.py` asks to call a server.

    .venv-peers/bin/python -m benches.engine.vllm_client

A line of standard input is a list of the client's options, `--dataset-path` being a JSON file of
texts; the answer is a line with what it measured: times in milliseconds, rates by the second. The
client is imported once, which takes half a minute. It would want pandas to read the texts itself.
"""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

KEPT = (
    "completed",
    "failed",
    "duration",
    "total_output_tokens",
    "request_throughput",
    "output_throughput",
    "median_ttft_ms",
    "p99_ttft_ms",
    "median_itl_ms",
    "p99_itl_ms",
)


def samples(args: Any, tokenizer: Any) -> list[Any]:
    """All texts, in their order."""
    from vllm.benchmarks.datasets import SampleRequest

    return [
        SampleRequest(
            prompt=text,
            prompt_len=len(tokenizer.encode(text)),
            expected_output_len=args.custom_output_len,
        )
        for text in json.loads(Path(args.dataset_path).read_text())
    ]


def main() -> None:
    """Call until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # its reports go to standard error
    from vllm.benchmarks import serve

    serve.get_samples = samples
    parser = argparse.ArgumentParser()
    serve.add_cli_args(parser)
    for line in sys.stdin:
        result = serve.main(parser.parse_args(json.loads(line)))
        answers.write(json.dumps({name: result[name] for name in KEPT}) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
