"""Many callers on an event loop: one thread owns the engine, each caller reads its own outputs."""

import asyncio
import math
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from functools import partial
from threading import Lock
from time import monotonic
from typing import TypeVar

from pyengine.config import EngineSettings, takes_settings
from pyengine.engine.changes import ChangeMode, Outcome
from pyengine.engine.client import EngineClientBase, PromptPin
from pyengine.engine.input_processor import refuse_submitted, refuse_taken
from pyengine.engine.model_limits import ModelLimits
from pyengine.engine.output_stream import OutputStream
from pyengine.engine.stats import EngineView, TenantLoad
from pyengine.engine.weights import NewWeights
from pyengine.errors import (
    EngineClosedError,
    InvalidRequestError,
    QueueFullError,
    TenantQueueFullError,
    copy_error,
)
from pyengine.outputs import (
    BeamSearchOutput,
    ClassificationRequestOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringRequestOutput,
)
from pyengine.pooling_params import PoolingParams
from pyengine.request.beam_search import first_logprobs, step_params
from pyengine.request.cache_hints import NO_HINTS, CacheHints
from pyengine.request.lora import LoRARequest
from pyengine.request.prompts import (
    PromptLike,
    StrippedThinking,
    as_list,
    match_params,
    parse_prompt,
    salted,
)
from pyengine.request.request import Request, RequestOptions
from pyengine.sampling_params import BeamSearchParams, SamplingParams
from pyengine.utils.validation import is_real

T = TypeVar("T")
_NO_OPTIONS = RequestOptions()


class AsyncEngine(EngineClientBase):
    """A model, its KV cache, and a thread that runs the steps for callers on event loops.

    The settings are those of `LLM`. Any number of tasks, on any event loop, may call `generate`.
    Requests and aborts reach the engine between steps. After each step, every event loop is called
    once for all of its readers. A slow reader gets the output since its last item merged into one.
    The engine does not wait for readers, except that steps without overlap give the event loops up
    to 5 ms to deliver outputs.

    The thread ends with `close`, at the end of a `with` block, with the interpreter, or when this
    object and all of its streams have been dropped.
    """

    @takes_settings
    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings, populate=True)  # it serves for long
        self._max_num_waiting = settings.max_num_waiting
        self._lock = Lock()
        """Guards the attributes below."""
        self._live: dict[str, Request] = {}
        """Requests whose readers have not read their ends, by id."""
        self._waiting: defaultdict[bytes, set[Request]] = defaultdict(set)
        """Those of each tenant that no step has computed yet, and some that have begun since."""
        self._is_draining = False
        self._drain_ends: list[float] = []
        """When each call of `drain` that waits ends at the latest."""

    async def generate(  # noqa: PLR0913
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: float = 0,
        deadline: float | None = None,
        tenant: bytes = b"",
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput]:
        """Continue a prompt, given as for `LLM.generate`. Yields items as `LLM.stream` does.

        The request runs in the same steps as all others. `request_id` must not be in use. Smaller
        priorities run first, then earlier arrivals. `deadline` is a time on the clock of
        `time.monotonic`: a request that has not ended by then is aborted, with the finish reason
        "abort" and the stop reason "deadline". Tenants take turns, so none waits for all requests
        of another one, and a priority counts within its `tenant`. `lora_request` is as in
        `LLM.generate`; an adapter is loaded in another thread. Closing the iterator, or
        cancelling the task that reads it, ends the request.

        Raises `InvalidRequestError` for a request that cannot be served, `QueueFullError` if
        `max_num_waiting` requests of the tenant already wait, `EngineClosedError` while the engine
        is drained and after `close`, `RequestFailedError` if the forward pass fails on this
        request, and `EngineDeadError` once the engine has ended.
        """
        make = partial(
            self.request,
            prompt,
            sampling_params,
            request_id,
            cache_salt=cache_salt,
            priority=priority,
            deadline=deadline,
            tenant=tenant,
            lora_request=lora_request,
        )
        # A grammar takes a while to compile, and an adapter to load.
        has_grammar = sampling_params is not None and sampling_params.structured_outputs is not None
        is_slow = has_grammar or lora_request is not None
        request = await asyncio.to_thread(make) if is_slow else make()
        with closing(self.submit([request])) as stream:
            async for item in stream:
                yield item

    async def beam_search(
        self,
        prompt: PromptLike,
        params: BeamSearchParams,
        *,
        cache_salt: str | None = None,
        priority: float = 0,
        tenant: bytes = b"",
    ) -> BeamSearchOutput:
        """Find the most probable continuations of a prompt. See `LLM.beam_search`.

        Raises as `generate` does; a step counts as a request for every beam.
        """
        step = step_params(params, self.model_limits.vocab_size)
        parsed = salted(parse_prompt(prompt, self.tokenizer), cache_salt)
        search = self._beam_search(parsed, params)
        options = RequestOptions(priority=priority, tenant=tenant)
        while beams := search.prompts:
            make = self._input_processor.request
            requests = [make(None, beam, step, options) for beam in beams]
            with closing(self.submit(requests)) as stream:
                outputs = {item.index: item async for item in stream}
            search.advance([first_logprobs(outputs[at]) for at in range(len(beams))])
        return search.output(self.tokenizer)

    async def embed(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        options: RequestOptions = _NO_OPTIONS,
    ) -> EmbeddingRequestOutput:
        """The embedding of a prompt. See `LLM.embed`; raises as `generate`.

        `options` have priority, tenant and deadline. Cancelling the task ends the request.
        """
        parsed = salted(parse_prompt(prompt, self.tokenizer), cache_salt)
        pooling = self.pooler.request("embed", parsed, pooling_params, request_id, options)
        await self._run([pooling.request])
        return self.pooler.embedded(pooling)

    async def classify(
        self,
        prompt: PromptLike,
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        options: RequestOptions = _NO_OPTIONS,
    ) -> ClassificationRequestOutput:
        """The classes of a prompt, as `embed`. See `LLM.classify`."""
        parsed = salted(parse_prompt(prompt, self.tokenizer), cache_salt)
        pooling = self.pooler.request("classify", parsed, pooling_params, request_id, options)
        await self._run([pooling.request])
        return self.pooler.classified(pooling)

    async def score(
        self,
        data_1: PromptLike | Iterable[PromptLike],
        data_2: PromptLike | Iterable[PromptLike],
        pooling_params: PoolingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        options: RequestOptions = _NO_OPTIONS,
    ) -> list[ScoringRequestOutput]:
        """The scores of pairs, as `embed`. See `LLM.score`."""
        first, second = (
            [salted(parse_prompt(prompt, self.tokenizer), cache_salt) for prompt in as_list(data)]
            for data in (data_1, data_2)
        )
        scoring = self.pooler.scoring(first, second, pooling_params, request_id, options)
        await self._run([pooling.request for pooling in scoring.requests])
        return self.pooler.scored(scoring)

    async def _run(self, requests: Sequence[Request]) -> None:
        """Run requests to their ends."""
        with closing(self.submit(requests)) as stream:
            async for _ in stream:
                pass

    async def pin(
        self,
        prompt: PromptLike,
        ttl: float = 300.0,
        *,
        cache_salt: str | None = None,
        lora_request: LoRARequest | None = None,
    ) -> PromptPin:
        """Compute a prompt, and keep its full blocks cached for `ttl` seconds. See `LLM.pin`."""
        parsed = salted(parse_prompt(prompt, self.tokenizer), cache_salt)
        request = self._pin_request(parsed, ttl, lora_request)
        await self._run([request])
        return self._pin_of(request)

    def request(  # noqa: PLR0913
        self,
        prompt: PromptLike,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        cache_salt: str | None = None,
        priority: float = 0,
        deadline: float | None = None,
        tenant: bytes = b"",
        cache_hints: CacheHints = NO_HINTS,
        thinking: StrippedThinking | None = None,
        lora_request: LoRARequest | None = None,
    ) -> Request:
        """Check a request with the parameters of `generate`, for one call of `submit`.

        `cache_hints` are prefixes to pin, `thinking` is what the next turn leaves out.

        Any thread may call it. It tokenizes the prompt. With `structured_outputs` it may take
        seconds: do not call it in the thread of an event loop then. Raises `InvalidRequestError`.
        """
        self._engine_loop.refuse_fork()
        parsed = salted(parse_prompt(prompt, self.tokenizer), cache_salt)
        (params,) = match_params(sampling_params, 1, self._default_params)
        options = RequestOptions(
            priority=priority,
            tenant=tenant,
            deadline=_checked_deadline(deadline),
            cache_hints=cache_hints,
            adapter=self._adapter(lora_request),
        )
        parsed = replace(parsed, thinking=thinking)
        return self._input_processor.request(request_id, parsed, params, options)

    def submit(self, requests: Sequence[Request]) -> OutputStream:
        """Queue requests made by `request`, all or none of them. Returns one stream of their items.

        Close the stream if you do not read it to its end. Raises the errors of `generate`, and
        `InvalidRequestError` for a request that was submitted before. A call that raises an error
        has changed nothing.
        """
        self._engine_loop.refuse_fork()
        with self._lock:
            self._refuse_new()
            refuse_submitted(requests)
            refuse_taken(requests, self._live)
            counts = Counter([request.tenant for request in requests])
            for tenant, count in counts.items():
                self._refuse_too_many(tenant, count)
            stream = OutputStream(requests, self._engine_loop.notifier, self._leave)
            for request in requests:
                request.is_submitted = True
            self._live.update({request.request_id: request for request in requests})
            if self._max_num_waiting is not None:
                for request in requests:
                    self._waiting[request.tenant].add(request)
            self._engine_loop.submit(requests)
        return stream

    def _leave(self, requests: Sequence[Request]) -> None:
        """Forget requests whose caller reads no more."""
        if self._engine_loop.is_elsewhere:
            return
        with self._lock:
            for request in requests:
                if self._live.get(request.request_id) is request:
                    del self._live[request.request_id]
            for request in requests:
                self._forget_waiting(request)
        unfinished = [request for request in requests if request.result.finished_time is None]
        if unfinished:
            self._engine_loop.abort(unfinished)

    def _forget_waiting(self, request: Request) -> None:
        waiting = self._waiting.get(request.tenant)
        if waiting is not None:
            waiting.discard(request)
            if not waiting:
                del self._waiting[request.tenant]

    def check_room(self, tenant: bytes = b"") -> None:
        """Raise the error that `submit` would raise for one more request of a tenant."""
        self._engine_loop.refuse_fork()
        with self._lock:
            self._refuse_new()
            self._refuse_too_many(tenant, 1)

    def load_of(self, tenant: bytes) -> TenantLoad:
        """The numbers of a tenant's sequences that run, and of its requests that wait."""
        self._engine_loop.refuse_fork()
        return TenantLoad(*self._engine.num_of(tenant))

    def _refuse_too_many(self, tenant: bytes, count: int) -> None:
        """Raise if too many requests of a tenant wait. See `InputProcessor._check`."""
        limit = self._max_num_waiting
        known = self._waiting.get(tenant, set())
        if limit is None or len(known) + count <= limit:
            return
        if count > limit:
            raise InvalidRequestError(
                f"{count} requests at once and max_num_waiting={limit}: submit fewer at a time"
            )
        known.difference_update([request for request in known if not self._waits(request)])
        waiting = len(known)
        if waiting + count > limit:
            reason = f"wait and max_num_waiting={limit}: try again later"
            if tenant:
                raise TenantQueueFullError(f"{waiting} requests of this caller {reason}")
            raise QueueFullError(f"{waiting} requests {reason}")

    @staticmethod
    def _waits(request: Request) -> bool:
        """Whether no step has computed anything of a request; not so after a preemption."""
        has_begun = request.progress.scheduled_time is not None or request.sequences[0].is_running
        return not has_begun and request.result.finished_time is None

    def _refuse_new(self) -> None:
        self._engine_loop.check()
        if self._is_draining:
            raise EngineClosedError("the engine takes no more requests: it is being drained")

    async def abort(self, request_id: str) -> bool:
        """Abort a request; its reader gets the output so far, with the finish reason "abort".

        Returns True if such a request was live.
        """
        self._engine_loop.refuse_fork()
        with self._lock:
            request = self._live.get(request_id)
            if request is not None:
                self._forget_waiting(request)
        if request is None or request.result.finished_time is not None:
            return False
        self._engine_loop.abort([request])
        return True

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait for the others. Returns True if all of them finished.

        After `timeout` seconds the remaining requests are aborted, with the finish reason "abort".
        What is queued for `kv_cache_dir` is written in the rest of that time, unless the disk
        writes nothing for 5 seconds. If two calls wait, the shorter timeout is that of both.
        """
        self._engine_loop.refuse_fork()
        with self._lock:
            self._is_draining = True
        end = math.inf if timeout is None else monotonic() + timeout
        self._drain_ends.append(end)
        try:
            while (left := self._unfinished()) and self._engine_loop.death is None:
                if monotonic() >= min(self._drain_ends):
                    self._engine_loop.abort(left)
                    return False
                await asyncio.sleep(min(0.01, max(0.0, end - monotonic())))
            await self._flush()
        finally:
            self._drain_ends.remove(end)
        return True

    async def _flush(self) -> None:
        """Write what is queued for the store, until the first of the calls of `drain` ends."""
        if self._offloader is None:
            return
        flush = self._offloader.begin_flush()
        while flush.poll() is None and monotonic() < min(self._drain_ends):
            await asyncio.sleep(0.01)

    def _unfinished(self) -> list[Request]:
        with self._lock:
            return [
                request for request in self._live.values() if request.result.finished_time is None
            ]

    async def between_steps(self, do: Callable[[], T]) -> T:
        """Call `do` in the engine's thread between two steps, and return its result."""
        self._engine_loop.refuse_fork()
        future: Future[T] = Future()

        def answer() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(do())
                except Exception as error:
                    future.set_exception(error)

        self._engine_loop.enqueue(answer)
        return await asyncio.wrap_future(future)

    async def update_weights(self, weights: NewWeights, *, mode: ChangeMode = "keep") -> int:
        """See `LLM.update_weights`. Given tensors are read until this returns."""
        return await self._changed(partial(self._update_weights, weights, mode))

    async def sleep(self, level: int = 1, *, mode: ChangeMode = "abort") -> None:
        """See `LLM.sleep`."""
        await self._changed(partial(self._sleep, level, mode))

    async def wake_up(
        self, tags: Sequence[str] | None = None, *, weights: NewWeights | None = None
    ) -> None:
        """See `LLM.wake_up`."""
        await self._changed(partial(self._wake_up, tags, weights))

    async def reset_prefix_cache(self) -> None:
        """See `LLM.reset_prefix_cache`."""
        await self._changed(self._reset_prefix_cache)

    async def _changed(self, begin: Callable[[], Outcome]) -> int:
        """Begin a change and wait for it, both in another thread."""
        answer = await asyncio.to_thread(lambda: self._engine_loop.wait(begin()))
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def model_limits(self) -> ModelLimits:
        """The limits for requests."""
        return self._input_processor.limits

    def take_packed_events(self) -> tuple[bytes, bytes]:
        """The cache events since the last call; needs `event_hash_seed`.

        See `BlockManager.take_packed_events`. Call it in the engine's thread, as an observer does.
        """
        return self._manager.take_packed_events()

    def cached_hashes(self) -> list[bytes]:
        """The hashes of all cached blocks. O(cached blocks). See `BlockManager.cached_hashes`."""
        return self._manager.cached_hashes()

    async def view(self, max_requests: int = 1000) -> EngineView:
        """Every block of the pool, and the running and waiting requests, between two steps.

        It waits for the running step. It takes the engine's thread a fraction of a millisecond per
        10,000 blocks, and about a microsecond for each of at most `max_requests` requests.
        """
        return await self.between_steps(lambda: self._engine.view(max_requests))

    def check_health(self) -> None:
        """Raise `EngineDeadError` if the engine can run no more steps."""
        self._engine_loop.refuse_fork()
        if self._engine_loop.death is not None:
            raise copy_error(self._engine_loop.death)

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)


def _checked_deadline(deadline: float | None) -> float | None:
    if deadline is None:
        return None
    if not is_real(deadline) or math.isnan(deadline):
        raise InvalidRequestError(
            f"deadline={deadline!r}: it must be a time of time.monotonic(), in seconds, or None"
        )
    late = monotonic() - float(deadline)
    if late >= 0:
        raise InvalidRequestError(
            f"deadline={deadline!r} was {late:.3f} seconds ago by time.monotonic(): nothing was run"
        )
    return float(deadline)
