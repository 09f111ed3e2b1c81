"""Offline use: a model, prompts, answers. Names and defaults as vLLM users know them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from time import monotonic
from typing import Any

from tqdm import tqdm

from pyengine.cache import TraceError
from pyengine.core.errors import ConfigurationError
from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams
from pyengine.core.settings import EngineSettings, takes_settings
from pyengine.engine.builder import build_engine
from pyengine.engine.engine import EngineStats, Prompt
from pyengine.engine.prompts import (
    Message,
    PromptLike,
    as_conversations,
    as_list,
    match_params,
    parse_prompt,
    render_chat,
)


class LLM:
    """A model, its KV cache and the engine that runs them.

    `LLM(model, **settings)`: `model` is a hub id, a local folder, a GGUF file, or None for the
    embedded default; `help(LLM.__init__)` lists the settings. The KV pool holds `num_blocks`
    blocks of `block_size` tokens, or what `kv_cache_memory` bytes pay for, or by default a share
    of the free memory. With `layer_groups`, layers whose attention slides give back the blocks
    behind their window: a block is one of a group of layers then, and a sequence takes blocks for
    each group; without it one block holds all layers and none is given back.

    With a `tensor_parallel_size` above 1 the model is divided over as many processes, this one
    among them: on CUDA one device each, on the CPU a share of the cores each. The others end with
    `close`, at the end of a `with` block, with this object, or with the interpreter; there can be
    one such LLM at a time.

    Raises `ConfigurationError` for settings that cannot be served or that are unknown, and
    `ModelLoadError` for a model that cannot be loaded. If one of several processes ends, this and
    every later call raises `EngineDeadError`.
    """

    @takes_settings
    def __init__(self, settings: EngineSettings) -> None:
        parts = build_engine(settings)
        self.model_path: Path = parts.loaded.path
        self.tokenizer: Any = parts.loaded.tokenizer
        self._manager = parts.manager
        self._engine = parts.engine
        self._team = parts.team
        self._description = parts.description
        self._ids = count()

    def close(self) -> None:
        """End the processes that the model is divided over; in one process there are none."""
        if self._team is not None:
            self._team.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def generate(
        self,
        prompts: PromptLike | Sequence[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Continue every prompt; results in the order of the prompts.

        A prompt is text, a list of token ids, or `{"prompt_token_ids": ...}`. One set of
        sampling parameters serves all, or one each. Raises `InvalidRequestError` if any of them
        cannot be served: then none was run.
        """
        parsed = [parse_prompt(prompt, self.tokenizer) for prompt in as_list(prompts)]
        return self._run(parsed, sampling_params, use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, by the model's chat template."""
        parsed = [
            Prompt(
                token_ids=render_chat(
                    conversation, self.tokenizer, add_generation_prompt=add_generation_prompt
                )
            )
            for conversation in as_conversations(messages)
        ]
        return self._run(parsed, sampling_params, use_tqdm)

    def stream(
        self, prompt: PromptLike, sampling_params: SamplingParams | None = None
    ) -> Iterator[RequestOutput]:
        """Continue one prompt; every item holds the text so far, the last one is finished.

        A request that cannot be served is refused at once. Leaving the loop early ends it.
        """
        parsed = parse_prompt(prompt, self.tokenizer)
        params = match_params(sampling_params, 1)
        self._engine.check(parsed, params[0])
        return self._stream(parsed, params)

    def _stream(self, prompt: Prompt, params: list[SamplingParams]) -> Iterator[RequestOutput]:
        with self._submitted([prompt], params):
            while self._engine.has_work:
                result = self._engine.step()
                yield from result.finished or map(self._engine.output, result.progressed)

    def apply_chat_template(self, messages: Sequence[Message]) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer."""
        return render_chat(messages, self.tokenizer, add_generation_prompt=True)

    def stats(self) -> EngineStats:
        """The block manager's ledger and counters, and what the scheduler is at."""
        return self._engine.stats()

    @contextmanager
    def recording(self, path: str | Path) -> Iterator[None]:
        """Record what the block manager does meanwhile, for `pyengine trace replay`.

        Only before the first request. Raises `ConfigurationError` after it, or if the file cannot
        be written.
        """
        with _writing(path):
            self._manager.record(path)
        try:
            yield
        finally:
            with _writing(path):
                self._manager.stop_recording()

    def describe(self) -> dict[str, object]:
        """Versions, device, attention backend and why, and the size of the KV pool."""
        return dict(self._description)

    def _run(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        params = match_params(sampling_params, len(prompts))
        for prompt, one in zip(prompts, params, strict=True):
            self._engine.check(prompt, one)
        done: dict[str, RequestOutput] = {}
        with self._submitted(prompts, params) as ids, _Progress(len(ids), use_tqdm) as progress:
            while self._engine.has_work:
                result = self._engine.step()
                done.update((output.request_id, output) for output in result.finished)
                progress.update(result.num_new_tokens, result.finished)
        return [done[request_id] for request_id in ids]

    @contextmanager
    def _submitted(
        self, prompts: list[Prompt], params: list[SamplingParams]
    ) -> Iterator[list[str]]:
        """Queue requests; whatever happens (Ctrl-C too), none is left behind."""
        ids: list[str] = []
        try:
            for prompt, one in zip(prompts, params, strict=True):
                ids.append(str(next(self._ids)))
                self._engine.add_request(ids[-1], prompt, one)
            yield ids
        finally:
            self._engine.abort(ids)


@contextmanager
def _writing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (TraceError, OSError) as error:
        raise ConfigurationError(f"cannot record into {path}: {error}") from error


class _Progress:
    """The bar of `generate`: prompts done, tokens per second, share of prompt tokens cached."""

    def __init__(self, num_prompts: int, use_tqdm: bool) -> None:
        self._bar = tqdm(total=num_prompts, disable=not use_tqdm, unit="prompt", dynamic_ncols=True)
        self._start = monotonic()
        self._new = self._cached = self._prompt = 0

    def __enter__(self) -> "_Progress":
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()

    def update(self, new_tokens: int, finished: list[RequestOutput]) -> None:
        """Take the outcome of one step."""
        self._new += new_tokens
        self._cached += sum(output.num_cached_tokens for output in finished)
        self._prompt += sum(len(output.prompt_token_ids) for output in finished)
        if self._bar.disable:
            return
        rate = self._new / max(monotonic() - self._start, 1e-9)
        share = self._cached / max(self._prompt, 1)
        self._bar.set_postfix_str(f"{rate:.1f} tok/s, {share:.0%} cached", refresh=False)
        self._bar.update(len(finished))
