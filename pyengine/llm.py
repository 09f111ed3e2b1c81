"""Offline use: a model, prompts, answers. Names and defaults are those of vLLM."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, repeat
from queue import SimpleQueue
from time import monotonic
from typing import Any

from pyengine.config import EngineSettings, takes_settings
from pyengine.engine.changes import ChangeMode, Outcome
from pyengine.engine.client import EngineClientBase, PromptPin
from pyengine.engine.output_stream import OutputCollector
from pyengine.engine.pooler import PoolingRequest, PoolingTask
from pyengine.engine.stats import EngineStats
from pyengine.engine.weights import NewWeights
from pyengine.errors import InvalidRequestError, RequestFailedError
from pyengine.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pyengine.pooling_params import PoolingParams
from pyengine.request.beam_search import first_logprobs, step_params
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
from pyengine.sampling_params import BeamSearchParams, RequestOutputKind, SamplingParams
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

    def embed(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Priorities = 0,
    ) -> list[EmbeddingRequestOutput]:
        """The embedding of every prompt, in the order of the prompts.

        It is made of the hidden states after the model's last norm, as `PoolingParams` say. Prompts
        are given as for `generate`, and share cached prefixes with all others. Raises as
        `generate`.
        """
        requests = self._pooling_requests("embed", prompts, pooling_params, priority)
        self._run([pooling.request for pooling in requests], use_tqdm)
        return [self.pooler.embedded(pooling) for pooling in requests]

    def classify(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None = None,
        use_tqdm: bool = True,
        *,
        priority: Priorities = 0,
    ) -> list[ClassificationRequestOutput]:
        """The probabilities of the model's labels for every prompt, in the order of the prompts.

        Needs a model with a classifier (`...ForSequenceClassification`). Raises as `generate`.
        """
        requests = self._pooling_requests("classify", prompts, pooling_params, priority)
        self._run([pooling.request for pooling in requests], use_tqdm)
        return [self.pooler.classified(pooling) for pooling in requests]

    def score(
        self,
        data_1: PromptLike | Iterable[PromptLike],
        data_2: PromptLike | Iterable[PromptLike],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        *,
        priority: float = 0,
    ) -> list[ScoringRequestOutput]:
        """The score of each pair: of one text and each of `data_2`, or of texts pair by pair.

        It is the cosine of two embeddings. A model with a classifier of one label reads both texts
        instead, and scores by that label. Raises as `generate`.
        """
        first, second = (
            [parse_prompt(prompt, self.tokenizer) for prompt in as_list(data)]
            for data in (data_1, data_2)
        )
        options = RequestOptions(priority=priority)
        scoring = self.pooler.scoring(first, second, pooling_params, options=options)
        self._run([pooling.request for pooling in scoring.requests], use_tqdm)
        return self.pooler.scored(scoring)

    def beam_search(
        self,
        prompts: PromptLike | Iterable[PromptLike],
        params: BeamSearchParams,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Find the most probable continuations of every prompt, as vLLM does.

        Returns the best sequences of each prompt, best first. Each step is a request of one token
        for every beam; beams share the cached blocks of their common prefix. Raises as `generate`.
        """
        step = step_params(params, self._input_processor.limits.vocab_size)
        searches = [
            self._beam_search(parse_prompt(prompt, self.tokenizer), params)
            for prompt in as_list(prompts)
        ]
        bar = progress_bar(params.max_tokens) if use_tqdm else None
        with nullcontext() if bar is None else bar:
            while any(beams := [search.prompts for search in searches]):
                requests = self._requests(list(chain(*beams)), step, 0, None)
                outputs = iter(self._run(requests, use_tqdm=False))
                for search, prompts_of_step in zip(searches, beams, strict=True):
                    if prompts_of_step:
                        search.advance([first_logprobs(next(outputs)) for _ in prompts_of_step])
                if bar is not None:
                    bar.update()
        return [search.output(self.tokenizer) for search in searches]

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

    def update_weights(self, weights: NewWeights, *, mode: ChangeMode = "keep") -> int:
        """Replace the weights, and return their new version: 1 for the first update.

        `weights` are a folder of the same model, or tensors by name: a mapping or pairs, of torch
        or NumPy, with the names of the model's files. A name that is not given keeps its weights.
        They are laid out while requests run, and put in place between two steps. No request that
        comes later uses KV of earlier weights. Requests that have begun end first ("finish"), are
        aborted ("abort"), go on over the KV that they have ("keep"), or compute it again
        ("recompute"); `CompletionOutput.weights_versions` says which versions answered.

        Raises `WeightUpdateError` if they cannot be used, or another update is under way: the
        engine goes on with the weights that it has.
        """
        return self._changed(self._update_weights(weights, mode))

    def sleep(self, level: int = 1, *, mode: ChangeMode = "abort") -> None:
        """Give memory back to the system: of the KV pool, and at level 2 also of the weights.

        Requests that have begun are aborted, end first ("finish"), or go on after `wake_up`
        ("recompute"). A request that comes while the engine sleeps fails with `EngineAsleepError`.
        """
        self._changed(self._sleep(level, mode))

    def wake_up(
        self, tags: Sequence[str] | None = None, *, weights: NewWeights | None = None
    ) -> None:
        """Bring back what `sleep` has dropped, or only "weights" or "kv_cache".

        Weights are read from their files. Those that an update by name has changed are in none:
        give all `weights` then, as for `update_weights`.
        """
        self._changed(self._wake_up(tags, weights))

    def reset_prefix_cache(self) -> None:
        """Drop all cached blocks: no later request reuses any."""
        self._changed(self._reset_prefix_cache())

    def _changed(self, outcome: Outcome) -> int:
        """Wait for a change."""
        answer = self._engine_loop.wait(outcome)
        if isinstance(answer, Exception):
            raise answer
        return answer

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
            make(None, prompt, param, replace(options, adapter=adapter))
            for prompt, param, options, adapter in zip(
                prompts, params, _options(priority, len(prompts)), adapters, strict=True
            )
        ]

    def _pooling_requests(
        self,
        task: PoolingTask,
        prompts: PromptLike | Iterable[PromptLike],
        pooling_params: PoolingParams | Sequence[PoolingParams] | None,
        priority: Priorities,
    ) -> list[PoolingRequest]:
        """The same for embeddings or classes."""
        parsed = [parse_prompt(prompt, self.tokenizer) for prompt in as_list(prompts)]
        params = match_params(pooling_params, len(parsed), PoolingParams())
        return [
            self.pooler.request(task, prompt, param, options=options)
            for prompt, param, options in zip(
                parsed, params, _options(priority, len(parsed)), strict=True
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


def _options(priority: Priorities, count: int) -> list[RequestOptions]:
    """The options of so many requests, with their priorities."""
    values = priority if isinstance(priority, Sequence) else repeat(priority, count)
    priorities = list(values)
    if len(priorities) != count:
        raise InvalidRequestError(
            f"{len(priorities)} priorities for {count} prompts: give one for all, or one for each"
        )
    return [RequestOptions(priority=priority) for priority in priorities]
