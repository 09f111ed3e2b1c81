"""`pyengine chat`: a conversation whose earlier turns are found in the KV cache."""

import sys
from typing import Annotated

import typer

from pyengine.cli import options as opt
from pyengine.cli.backend import Engine, EngineOptions, factory_of
from pyengine.cli.guard import guarded
from pyengine.cli.prompts import Message
from pyengine.cli.streaming import stream_answer
from pyengine.core.errors import InvalidRequestError
from pyengine.core.sampling_params import SamplingParams

HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer"


def chat(
    context: typer.Context,
    *,
    system: Annotated[str | None, typer.Option(help="A system message to begin with.")] = None,
    model: opt.Model = None,
    max_tokens: opt.MaxTokens = 512,
    temperature: opt.Temperature = 0.0,
    top_p: opt.TopP = 1.0,
    top_k: opt.TopK = 0,
    min_p: opt.MinP = 0.0,
    repetition_penalty: opt.RepetitionPenalty = 1.0,
    stop: opt.Stop = None,
    seed: opt.Seed = 0,
    device: opt.Device = "auto",
    dtype: opt.Dtype = "auto",
    attention_backend: opt.AttentionBackend = "auto",
    compile: opt.Compile = False,
    block_size: opt.BlockSize = None,
    kv_cache_dtype: opt.KvCacheDtype = "auto",
    num_blocks: opt.NumBlocks = None,
    kv_cache_gib: opt.KvCacheGib = None,
    gpu_memory_utilization: opt.GpuMemoryUtilization = 0.9,
    max_model_len: opt.MaxModelLen = None,
    prefix_caching: opt.PrefixCaching = True,
    in_flight_sharing: opt.InFlightSharing = True,
    layer_groups: opt.LayerGroups = True,
    tensor_parallel_size: opt.TensorParallelSize = 1,
) -> None:
    """Talk to the model. Earlier turns are cache hits: each turn says how many tokens were."""
    with guarded():
        params = SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            stop=stop or None,
        )
        engine = factory_of(context)(
            EngineOptions(
                model=model,
                device=device,
                dtype=dtype,
                attention_backend=attention_backend,
                compile=compile,
                block_size=block_size,
                kv_cache_dtype=kv_cache_dtype,
                num_blocks=num_blocks,
                kv_cache_gib=kv_cache_gib,
                gpu_memory_utilization=gpu_memory_utilization,
                max_model_len=max_model_len,
                enable_prefix_caching=prefix_caching,
                in_flight_sharing=in_flight_sharing,
                layer_groups=layer_groups,
                tensor_parallel_size=tensor_parallel_size,
                seed=seed,
            )
        )
        if getattr(engine.tokenizer, "chat_template", None) is None:
            raise InvalidRequestError(
                f"{engine.model_path} has no chat template; `pyengine generate --raw` takes it"
            )
        _converse(engine, params, [{"role": "system", "content": system}] if system else [])


def _converse(engine: Engine, params: SamplingParams, opening: list[Message]) -> None:
    typer.secho(f"{engine.model_path.name}: {HELP}", err=True, dim=True)
    messages = list(opening)
    while (line := _ask()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit":
                break
            case "/reset":
                messages = list(opening)
                typer.secho("a new conversation", err=True, dim=True)
                continue
            case text if text.startswith("/"):
                typer.secho(f"unknown: {text}; {HELP}", err=True, dim=True)
                continue
        messages = _take_turn(engine, params, [*messages, {"role": "user", "content": line}])


def _take_turn(engine: Engine, params: SamplingParams, messages: list[Message]) -> list[Message]:
    """Answer the last message. A refused turn leaves the conversation as it was before it."""
    try:
        prompt = {"prompt_token_ids": engine.apply_chat_template(messages)}
        answer = stream_answer(engine, prompt, params)
    except InvalidRequestError as error:
        typer.echo(f"error: {error}\nthe conversation may be too long: /reset", err=True)
        return messages[:-1]
    note = "stopped · " if answer.interrupted else ""
    typer.secho(f"{note}{answer.figures}", err=True, dim=True)
    return [*messages, {"role": "assistant", "content": answer.text}]


def _ask() -> str | None:
    """The user's next line, or None at the end of the input or on Ctrl-C."""
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  line editing for input()
    try:
        return input("> " if interactive else "")
    except (EOFError, KeyboardInterrupt):
        if interactive:
            typer.echo()
        return None
