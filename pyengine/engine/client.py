"""The base of `LLM` and `AsyncEngine`: a model, an engine, requests from prompts."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Never, Self
from weakref import finalize

from pyengine.config import EngineSettings
from pyengine.engine.adapters import AdapterRegistry, LoadedLoRA, with_adapter
from pyengine.engine.builder import build_engine
from pyengine.engine.changes import Change, Outcome, checked_mode
from pyengine.engine.explain import explain_prompt
from pyengine.engine.loop import EngineLoop, refuse_engine_in_fork
from pyengine.engine.pooler import Pooler
from pyengine.engine.stats import EngineObserver, EngineStats
from pyengine.engine.weights import ASLEEP, NewWeights
from pyengine.errors import ConfigurationError, EngineClosedError, InvalidRequestError, copy_error
from pyengine.kv_cache import TraceError
from pyengine.models.adapters import Adapter
from pyengine.outputs import CacheExplanation
from pyengine.request.beam_search import BeamSearch
from pyengine.request.cache_hints import CacheHints, KeptPrefix
from pyengine.request.chat_template import ChatOptions, Message, render_chat
from pyengine.request.lora import LoRARequest
from pyengine.request.prompts import Prompt, PromptLike, parse_prompt
from pyengine.request.request import Request, RequestOptions
from pyengine.sampling_params import BeamSearchParams, SamplingParams, StructuredOutputs
from pyengine.utils.openmp import release_threads
from pyengine.utils.packaging import package_version
from pyengine.utils.validation import is_real, shown


class PromptPin:
    """A pin on the cached prefix of a prompt, in whole blocks, until its time is over.

    `release` ends it early, as leaving a `with` block does. It goes on without this object.
    """

    def __init__(self, kept: KeptPrefix, release: Callable[[], object]) -> None:
        self._kept = kept
        self._release = release
        self.num_tokens = kept.num_tokens
        """Tokens of the prefix."""
        self.num_blocks = len(kept.blocks)
        """Blocks that it keeps."""

    @property
    def seconds_left(self) -> float:
        """Seconds until its end; 0 after it."""
        return 0.0 if self._kept.pin.is_released else max(0.0, self._kept.end - monotonic())

    def release(self) -> None:
        """End the pin before the next step. May be called more than once, from any thread."""
        self._release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.release()

    def __repr__(self) -> str:
        return f"PromptPin(num_tokens={self.num_tokens}, seconds_left={self.seconds_left:.0f})"


class EngineClientBase:
    """A model, its KV cache and an engine that several callers share."""

    def __init__(self, settings: EngineSettings, *, populate: bool = False) -> None:
        refuse_engine_in_fork()
        parts = build_engine(settings, populate=populate)
        release_threads()  # another thread runs the steps
        self.model_path: Path = parts.loaded.path
        self.tokenizer: Any = parts.loaded.tokenizer
        self._manager = parts.manager
        self._engine = parts.engine
        self._input_processor = parts.input_processor
        self.pooler = Pooler(parts.loaded.pooling, parts.loaded.hidden_size, parts.input_processor)
        """Makes requests for embeddings, classes and scores, and their results."""
        self._pins = parts.pins
        self._offloader = parts.offloader
        self._verifier = parts.verifier
        self._weights = parts.weights
        self._adapters = parts.adapters
        self._worker_group = parts.worker_group
        kill = None if parts.worker_group is None else parts.worker_group.kill
        self._engine_loop = EngineLoop(parts.engine, parts.threads, kill, parts.inbox)
        finalize(self, self._engine_loop.end).atexit = False  # `EngineLoop` has its own
        self._description = parts.description
        self._default_params = parts.default_params

    def __reduce__(self) -> Never:
        raise TypeError(
            f"{type(self).__name__} cannot be pickled or copied: it holds a model and its KV "
            "cache; make one in each process, and send prompts and outputs"
        )

    def apply_chat_template(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The token ids of a conversation, ready for the assistant's answer. See `LLM.chat`."""
        options = ChatOptions(
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template=chat_template,
            variables=chat_template_kwargs,
        )
        return render_chat(messages, self.tokenizer, options)

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of requests without any: those of the model, by default."""
        return self._default_params

    def prepare_structured_outputs(self) -> None:
        """Do the setup for `structured_outputs`, a second or two that the first request waits for.

        Any thread may call it. That blocks Python in other threads, steps included: call it before
        requests run. A second process needs as long once more, which blocks nothing. Raises
        `InvalidRequestError` if `llguidance` or a tokenizer is missing.
        """
        self._input_processor.grammars.prepare()

    def compile_structured_outputs(
        self, structured_outputs: StructuredOutputs, tenant: bytes = b""
    ) -> Future[Any]:
        """Compile a grammar before a request needs it, without blocking a thread.

        Grammars of different tenants are compiled in turns. Raises `QueueFullError` if too many of
        this tenant wait. If the grammar cannot be served, the future has an `InvalidRequestError`.
        """
        return self._input_processor.grammars.compile(structured_outputs, tenant)

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Read a LoRA adapter from its folder and register it, for requests from now on.

        An adapter of this name is replaced; requests that have begun keep it. Prefixes are cached
        by content: a folder with other numbers shares nothing with the one before, and two names of
        the same numbers share everything. Any thread may call it. Returns True.

        Raises `AdapterError` for an adapter that is missing, damaged, of another model or of a kind
        that is not served, and `ConfigurationError` without `enable_lora`.
        """
        self._registry.add(_checked(lora_request))
        return True

    def remove_lora(self, lora_name: str) -> bool:
        """Unload a LoRA adapter; requests that have begun keep it. False if there is none."""
        return self._registry.remove(lora_name)

    def list_loras(self) -> list[LoadedLoRA]:
        """The LoRA adapters that are loaded, in the order of their loading."""
        return [] if self._adapters is None else list(self._adapters.list())

    @property
    def _registry(self) -> AdapterRegistry:
        self._engine_loop.refuse_fork()
        if self._adapters is None:
            raise ConfigurationError("LoRA adapters need an engine with enable_lora=True")
        return self._adapters

    def _adapter(self, lora_request: LoRARequest | None) -> Adapter | None:
        """The adapter of a request, which is loaded if it is not."""
        if lora_request is None:
            return None
        return self._registry.get(_checked(lora_request))

    @property
    def max_pinned_blocks(self) -> int:
        """The most blocks that all pins of callers keep."""
        return self._pins.limit

    def _beam_search(self, prompt: Prompt, params: BeamSearchParams) -> BeamSearch:
        """The search from a prompt."""
        limits = self._input_processor.limits
        return BeamSearch(prompt, params, limits.eos_token_ids, limits.max_model_len)

    def _pin_request(
        self, prompt: Prompt, ttl: float, lora_request: LoRARequest | None = None
    ) -> Request:
        """A request that computes a prompt and pins it. Raises `InvalidRequestError`."""
        if not is_real(ttl) or not 0 < ttl < inf:
            raise InvalidRequestError(f"ttl={ttl!r}: it must be a number of seconds above 0")
        params = SamplingParams(max_tokens=0)
        hints = CacheHints(pins=((len(prompt.token_ids), float(ttl)),))
        return self._input_processor.request(
            None,
            prompt,
            params,
            RequestOptions(cache_hints=hints, adapter=self._adapter(lora_request)),
        )

    def _pin_of(self, request: Request) -> PromptPin:
        """The pin that a finished request has made, or its refusal."""
        if request.result.pin_error is not None:
            raise copy_error(request.result.pin_error)
        if not request.result.pins:
            raise EngineClosedError("the request was aborted before its prompt was computed")
        (kept,) = request.result.pins
        release = partial(self._pins.release, kept)
        return PromptPin(kept, partial(self._engine_loop.enqueue, release))

    def stats(self) -> EngineStats:
        """The block manager's usage and counters, and the number of requests that run and wait."""
        self._engine_loop.refuse_fork()
        return self._engine.stats()

    def explain(
        self, prompt: PromptLike, *, lora_request: LoRARequest | None = None
    ) -> CacheExplanation:
        """The tokens of a prompt that a request would reuse now, and why it would compute others.

        It changes no cached block. Any thread may call it. Raises `InvalidRequestError`.
        """
        self._engine_loop.refuse_fork()
        parsed = parse_prompt(prompt, self.tokenizer)
        adapter = self._adapter(lora_request)
        if adapter is not None:
            parsed = with_adapter(parsed, adapter)
        return explain_prompt(self._manager, parsed, self.tokenizer, self._offloader)

    @property
    def weights_version(self) -> int:
        """The number of updates of the weights so far."""
        return self._engine.weights_version

    @property
    def is_sleeping(self) -> bool:
        """True if the weights or the KV pool are not in memory."""
        return bool(self._engine.asleep)

    def _update_weights(self, weights: NewWeights, mode: object) -> Outcome:
        """Stage new weights; the outcome is that of putting them in place."""
        self._engine_loop.check()
        return self._weights.update(weights, checked_mode(mode), self._send_change)

    def _sleep(self, level: object, mode: object) -> Outcome:
        self._engine_loop.check()
        if level not in ASLEEP or isinstance(level, bool):
            raise InvalidRequestError(f"level={shown(level)}: it must be 1 or 2")
        own = checked_mode(mode, but=("keep",))
        return self._weights.sleep(level, own, self._send_change)

    def _wake_up(self, tags: Sequence[str] | None, weights: NewWeights | None) -> Outcome:
        self._engine_loop.check()
        known = ASLEEP[2]
        wanted = known if tags is None else frozenset(tags)
        if not wanted <= known or isinstance(tags, str):
            raise InvalidRequestError(f"tags={shown(tags)}: give some of {sorted(known)}")
        return self._weights.wake_up(wanted, weights, self._send_change)

    def _reset_prefix_cache(self) -> Outcome:
        self._engine_loop.check()
        return self._weights.reset_prefix_cache(self._send_change)

    def _send_change(self, change: Change) -> None:
        self._engine_loop.enqueue(partial(self._engine.change, change))

    def observe(self, observer: EngineObserver) -> None:
        """Call `observer` for every request and step from now on, in the engine's thread."""
        self._engine.observe(observer)

    @contextmanager
    def recording(self, path: str | Path) -> Iterator[None]:
        """Record the block manager's operations inside the block, for `pyengine trace replay`.

        Start before the first request. Raises `ConfigurationError` after it, or if the file cannot
        be written.
        """
        verifier = self._verifier
        if verifier is not None:
            verifier.stop_recording()
        with _writing(path):
            self._manager.record(path)
        if verifier is not None:
            verifier.recording = path
        try:
            yield
        finally:
            if verifier is not None:
                verifier.recording = None
            with _writing(path):
                self._manager.stop_recording()

    def describe(self) -> dict[str, object]:
        """Versions, device, attention backend and its reason, sampling defaults, pool size."""
        return {"pyengine": package_version(), **self._description}

    def close(self) -> None:
        """Abort all requests, and end the engine's thread and the processes of a divided model.

        May be called more than once; later requests raise `EngineClosedError`.
        """
        self._engine_loop.close()
        if self._verifier is not None:
            self._verifier.stop_recording()
        if self._worker_group is not None:
            self._worker_group.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def _checked(lora_request: Any) -> LoRARequest:
    if not isinstance(lora_request, LoRARequest):
        raise InvalidRequestError(
            f"lora_request={shown(lora_request)}: it must be a LoRARequest(name, path), or None"
        )
    return lora_request


@contextmanager
def _writing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except (TraceError, OSError) as error:
        raise ConfigurationError(f"cannot record into {path}: {error}") from error
