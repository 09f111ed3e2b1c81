"""Offline use: a model, prompts, answers. Names and defaults are those of vLLM."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import repeat
from queue import SimpleQueue
from time import monotonic
from typing import Any

from pyengine.config import EngineSettings, takes_settings
from pyengine.engine.client import EngineClientBase, PromptPin
from pyengine.engine.output_stream import OutputCollector
from pyengine.engine.stats import EngineStats
from pyengine.errors import InvalidRequestError, RequestFailedError
from pyengine.outputs import RequestOutput
from pyengine.request.chat_template import ChatOptions, Message, as_conversations, render_chat
from pyengine.request.lora import LoRARequest
from pyengine.request.prompts import (
    Prompt,
    PromptLike,
    TokenIds,
    as_list,
    match_params,
    parse_prompt,
    text_from,
    tokens_of,
)
from pyengine.request.request import Request, RequestOptions
from pyengine.request.thinking import stripped_thinking
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from pyengine.utils.progress import progress_bar

Priorities = float | Sequence[float]
LoRARequests = LoRARequest | Sequence[LoRARequest | None] | None


class LLM(EngineClientBase):
    """A model, its KV cache and the engine that runs them.

    In `LLM(model, **settings)`, `model` is a hub id, a local folder, a GGUF file, or None for the
    embedded default; `help(LLM.__init__)` lists the settings. The KV pool has `num_blocks` blocks
    of `block_size` tokens, or as many as `kv_cache_memory` bytes hold. By default it uses a share
    of the free memory. With `layer_groups`, layers with sliding windows free the blocks that no
    later token sees: each block then belongs to a group of layers, and a sequence takes blocks for
    each group. Without it, a block holds all layers and is kept.

    Any thread may call any method at any time. One thread runs the steps, for all callers.

    With a `tensor_parallel_size` above 1, the model is divided over that many processes, including
    this one: on CUDA each has a device, on the CPU a share of the cores. Only one such LLM can run.

    The thread and the processes end with `close`, at the end of a `with` block, with this object,
    or with the interpreter.

    Raises `ConfigurationError` for settings that are unknown or cannot be used, and
    `ModelLoadError` for a model that cannot be loaded. If one of several processes ends, the
    running call and every later one raise `EngineDeadError`.
    """

    @takes_settings
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)

    def generate(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Priorities = 0,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Continue every prompt. Returns complete results in the order of the prompts.

        A prompt is text, token ids (a list or an array), or a mapping with `prompt` or
        `prompt_token_ids` and optionally a `cache_salt`: only prompts with the same salt share
        cached blocks. Give one set of sampling parameters for all prompts or one for each; None
        means `get_default_sampling_params`. Waiting requests with a smaller `priority` run first.
        Results are complete, whatever the `output_kind`. With `enable_lora`, a `lora_request` for
        all prompts, or one or None for each, changes the model for them.

        Raises `InvalidRequestError` if any prompt cannot be served, and `AdapterError` if an
        adapter cannot; then none has run. Raises `RequestFailedError`, which has all outputs, if
        the forward pass failed on any of them.
        """
        parsed = [parse_prompt(prompt, self.tokenizer) for prompt in as_list(prompts)]
        return self._run(self._requests(parsed, sampling_params, priority, lora_request), use_tqdm)

    def generate_iter(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Priorities = 0,
        lora_request: LoRARequests = None,
    ) -> Iterator[RequestOutput]:
        """Continue every prompt. Yields each result as soon as it is complete.

        `RequestOutput.index` is the position of its prompt. A request that fails is a result, too:
        its `error` says why. Leaving the loop early ends the other requests.
        """
        parsed = [parse_prompt(prompt, self.tokenizer) for prompt in as_list(prompts)]
        requests = self._requests(parsed, sampling_params, priority, lora_request)
        return self._read(requests, RequestOutputKind.FINAL_ONLY)

    def chat(  # noqa: PLR0913
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        priority: Priorities = 0,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several, using the model's chat template.

        `tools` are JSON schemas of functions that the model may call. `chat_template` replaces the
        model's own template, and `chat_template_kwargs` are variables for it. With
        `continue_final_message` (and without `add_generation_prompt`), the model continues the
        last message.
        """
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template=chat_template,
            variables=chat_template_kwargs,
        )
        rendered = [
            render_chat(conversation, self.tokenizer, options)
            for conversation in as_conversations(messages)
        ]
        thinking = stripped_thinking(self.tokenizer, options)
        parsed = [Prompt(token_ids=token_ids, thinking=thinking) for token_ids in rendered]
        return self._run(self._requests(parsed, sampling_params, priority, lora_request), use_tqdm)

    def stream(
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        *,
        priority: float = 0,
        lora_request: LoRARequest | None = None,
    ) -> Iterator[RequestOutput]:
        """Continue one prompt. Every item holds all output so far; the last one is finished.

        With `output_kind=RequestOutputKind.DELTA`, an item holds only new output. A request that
        cannot be served is refused at once. Leaving the loop ends it. Read streams in any order.
        """
        parsed = parse_prompt(prompt, self.tokenizer)
        (params,) = match_params(sampling_params, 1, self._default_params)
        options = RequestOptions(priority=priority, adapter=self._adapter(lora_request))
        return self._read([self._input_processor.request(None, parsed, params, options)])

    def pin(
        self, prompt: PromptLike, ttl: float = 300.0, *, lora_request: LoRARequest | None = None
    ) -> PromptPin:
        """Compute a prompt, and keep its full blocks cached for `ttl` seconds.

        All pins together keep at most the share `max_pinned_share` of the KV pool. A pin on the
        same prompt renews the first one. Raises `PinQuotaError`, with the numbers, if the blocks
        are too many, and `InvalidRequestError` if the prompt cannot be served.
        """
        request = self._pin_request(parse_prompt(prompt, self.tokenizer), ttl, lora_request)
        for _ in self._read([request]):
            pass
        return self._pin_of(request)

    def get_tokenizer(self) -> Any:
        """The tokenizer of the model; None for a model without one."""
        return self.tokenizer

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, tokenized as `generate` does.

        Raises `InvalidRequestError` if the model has no tokenizer.
        """
        return tokens_of(text, self.tokenizer, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: TokenIds, *, skip_special_tokens: bool = False) -> str:
        """The text of token ids. Raises `InvalidRequestError` if the model has no tokenizer."""
        return text_from(token_ids, self.tokenizer, skip_special_tokens=skip_special_tokens)

    def stats(self) -> EngineStats:
        """The block manager's usage and counters, and the number of running and waiting requests.

        Waits for the running step, so all requests that were closed have ended.
        """
        self._engine_loop.flush()
        return super().stats()

    def _requests(
        self,
        prompts: list[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: Priorities,
        lora_request: LoRARequests,
    ) -> list[Request]:
        """A request for each prompt, all of them checked."""
        params = match_params(sampling_params, len(prompts), self._default_params)
        values = priority if isinstance(priority, Sequence) else repeat(priority, len(prompts))
        priorities = list(values)
        if len(priorities) != len(prompts):
            raise InvalidRequestError(
                f"{len(priorities)} priorities for {len(prompts)} prompts: give one for all, or "
                "one for each"
            )
        if lora_request is None or isinstance(lora_request, LoRARequest):
            lora_request = [lora_request] * len(prompts)
        given = list(lora_request)
        if len(given) != len(prompts):
            raise InvalidRequestError(
                f"{len(given)} lora_requests for {len(prompts)} prompts: give one for all, or one "
                "or None for each"
            )
        adapters = [self._adapter(each) for each in given]
        make = self._input_processor.request
        return [
            make(None, prompt, param, RequestOptions(priority=priority, adapter=adapter))
            for prompt, param, priority, adapter in zip(
                prompts, params, priorities, adapters, strict=True
            )
        ]

    def _read(
        self, requests: list[Request], kind: RequestOutputKind | None = None
    ) -> Iterator[RequestOutput]:
        """Run requests; their outputs as they come.

        With a `kind` it replaces the kind of all requests, and a failed request has an output, too.
        """
        unread: SimpleQueue[OutputCollector] = SimpleQueue()
        notify = partial(self._engine_loop.notifier.add_unread, unread)
        for index, request in enumerate(requests):
            request.send_to(OutputCollector(kind or request.params.output_kind, notify), index)
        left = len(requests)
        try:
            self._engine_loop.submit(requests)
            while left:
                try:
                    output = self._engine_loop.wait(unread).get()
                except RequestFailedError as error:
                    if kind is None:
                        raise
                    (output,) = error.outputs
                if output is not None:  # else it was read with the one before
                    left -= output.finished
                    yield output
        except KeyboardInterrupt:
            self._engine_loop.interrupt(requests)
            raise
        finally:
            if left:
                self._engine_loop.abort(requests)

    def _run(self, requests: list[Request], use_tqdm: bool) -> list[RequestOutput]:
        """Run requests to their ends, with a progress bar: tokens per second, tokens cached."""
        done: dict[int, RequestOutput] = {}
        start, before = monotonic(), self._engine.num_new_tokens
        num_cached = num_prompt = 0
        bar = progress_bar(len(requests)) if use_tqdm else None
        with nullcontext() if bar is None else bar:
            for output in self._read(requests, RequestOutputKind.FINAL_ONLY):
                done[output.index] = output
                if bar is not None:
                    num_cached += output.num_cached_tokens
                    num_prompt += len(output.prompt_token_ids)
                    rate = (self._engine.num_new_tokens - before) / max(monotonic() - start, 1e-9)
                    share = num_cached / max(num_prompt, 1)
                    bar.set_postfix_str(f"{rate:.1f} tok/s, {share:.0%} cached", refresh=False)
                    bar.update()
        outputs = [done[index] for index in range(len(requests))]
        failed = [output for output in outputs if output.error is not None]
        if failed:
            raise RequestFailedError(
                f"{len(failed)} of {len(outputs)} requests failed, the first at position "
                f"{failed[0].index}: {failed[0].error}; the outputs of all are in this error's "
                "`outputs`",
                outputs,
            )
        return outputs
