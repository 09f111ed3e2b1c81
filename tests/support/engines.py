"""A whole engine around a fake runner: real manager, scheduler, sampler and loop."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import sleep
from typing import Any

from pyengine.engine.core import Engine
from pyengine.engine.explain import Explainer
from pyengine.engine.input_processor import InputProcessor
from pyengine.engine.model_limits import ModelLimits
from pyengine.engine.parts import EnginePart
from pyengine.engine.pinning import Pinning
from pyengine.executor.executor import Executor
from pyengine.executor.kv_cache_config import longest_sequence
from pyengine.kv_cache import BlockManager
from pyengine.llm import LLM
from pyengine.outputs import RequestOutput
from pyengine.request.prompt_entries import PromptEntryCache
from pyengine.request.prompts import Prompt
from pyengine.request.request import OutputSink, Request, RequestOptions
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.support.fake_runner import VOCAB_SIZE, FakeRunner

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
EOS = 2


@contextmanager
def slow_steps() -> Iterator[None]:
    """Steps take 10 ms longer, so that a long request still runs when a test looks at it."""
    submit = Executor.submit

    def submit_late(self: Executor, *step: Any) -> None:
        sleep(0.01)
        submit(self, *step)

    Executor.submit = submit_late  # type: ignore[method-assign]
    try:
        yield
    finally:
        Executor.submit = submit  # type: ignore[method-assign]


class LazyWork(Future[Any]):
    """Work that runs only when its result is requested."""

    def __init__(self, queue: "LazyQueue", work: Callable[[], Any]) -> None:
        super().__init__()
        self._queue, self._work = queue, work

    def run(self) -> None:
        try:
            self.set_result(self._work())
        except BaseException as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        self._queue.run_up_to(self)
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._queue.run_up_to(self)
        return super().exception(timeout)


class LazyQueue:
    """The slowest device there is: the host is always ahead of it."""

    def __init__(self) -> None:
        self.waiting: list[LazyWork] = []

    def submit(self, work: Callable[[], Any]) -> LazyWork:
        self.waiting.append(LazyWork(self, work))
        return self.waiting[-1]

    def run_up_to(self, work: LazyWork) -> None:
        while work in self.waiting:
            self.waiting.pop(0).run()


class Sink:
    """Keeps what a request gives."""

    def __init__(self, streams: bool = True) -> None:
        self.streams = streams
        self.items: list[RequestOutput] = []
        self.error: Exception | None = None

    def put(self, output: RequestOutput) -> None:
        self.items.append(output)

    def fail(self, error: Exception) -> None:
        self.error = error


def add_parts(engine: Engine, *parts: EnginePart) -> None:
    """Make an engine, which has run no step, anew with further parts, or others of their kind."""
    observers, kinds = engine._observers, {type(part) for part in parts}
    kept = [part for part in engine._parts.all if type(part) not in kinds]
    manager, scheduler, executor = engine._manager, engine._scheduler, engine._executor
    engine.__init__(manager, scheduler, executor, [*kept, *parts])  # type: ignore[misc]
    engine._observers = observers


def add_request(
    bench: "Bench | LLM",
    request_id: str,
    prompt: Prompt,
    params: SamplingParams,
    *,
    priority: float = 0,
    sink: OutputSink | None = None,
) -> Request:
    """Make and queue a request; its outputs go to `sink`."""
    engine, processor = (
        (bench._engine, bench._input_processor)
        if isinstance(bench, LLM)
        else (bench.engine, bench.processor)
    )
    request = processor.request(request_id, prompt, params, RequestOptions(priority=priority))
    request.sink = sink
    engine.add(request)
    return request


@dataclass
class Bench:
    manager: BlockManager
    scheduler: Scheduler
    runner: FakeRunner
    engine: Engine
    processor: InputProcessor
    requests: dict[str, Request] = field(default_factory=dict)

    def submit(self, prompts: dict[str, list[int]], params: SamplingParams = GREEDY) -> None:
        for request_id, tokens in prompts.items():
            request = add_request(self, request_id, Prompt(token_ids=tokens), params)
            self.requests[request_id] = request

    def output(self, name: str) -> RequestOutput:
        self.engine._output.flush()
        return self.requests[name].output()

    def abort(self, names: list[str]) -> list[RequestOutput]:
        """Those that had not ended."""
        requests = [self.requests[name] for name in names if name in self.requests]
        return [request.output() for request in self.engine.abort(requests)]

    def step(self) -> list[RequestOutput]:
        """The requests that the step ended."""
        return [request.output() for request in self.engine.step().finished]

    def run(self) -> dict[str, RequestOutput]:
        done: dict[str, RequestOutput] = {}
        for _ in range(10_000):
            if not self.engine.has_work:
                return done
            self.engine.step()
            self.manager.check()
            done.update(self.take_finished())
        raise AssertionError("the engine did not come to an end in 10,000 steps")

    def take_finished(self) -> dict[str, RequestOutput]:
        """Requests that have ended, in whatever way, since it was last called."""
        ended = {
            name: request
            for name, request in self.requests.items()
            if request.result.finished_time is not None
        }
        for name in ended:
            del self.requests[name]
        return {name: request.output() for name, request in ended.items()}

    def generate(
        self, prompts: list[list[int]], params: SamplingParams = GREEDY
    ) -> list[RequestOutput]:
        self.submit({str(i): prompt for i, prompt in enumerate(prompts)}, params)
        done = self.run()
        return [done[str(i)] for i in range(len(prompts))]

    def assert_all_free(self) -> None:
        usage = self.manager.usage()
        assert (usage.active, usage.pinned) == (0, 0), usage
        self.manager.check()


def make_bench(
    num_blocks: int = 64,
    block_size: int = 4,
    *,
    max_num_batched_tokens: int = 256,
    max_num_seqs: int = 32,
    max_model_len: int | None = None,
    groups: tuple[int | None, ...] = (None,),
    seed: int = 0,
    depth: int = 1,
    max_overtakes: int = 0,
    max_pinned_blocks: int = 0,
    tokenizer: Any = None,
    **manager: Any,
) -> Bench:
    blocks = BlockManager(num_blocks, block_size, groups=groups, **manager)
    limits = SchedulerLimits(
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=max_num_seqs,
        max_overtakes=max_overtakes,
        max_pinned_blocks=max_pinned_blocks,
    )
    caching = bool(manager.get("prefix_caching", True))
    scheduler = Scheduler(blocks, limits, prefix_caching=caching)
    most = max_model_len or num_blocks * block_size
    runner = FakeRunner(num_blocks, block_size, groups=groups, width=-(-most // block_size))
    model_limits = ModelLimits(
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        max_model_len=longest_sequence(blocks, max_num_batched_tokens, most),
        max_num_seqs=max_num_seqs,
        limited_by=f"the KV pool holds {num_blocks} blocks of {block_size} tokens",
    )
    executor = Executor(runner, LazyQueue(), depth=depth)
    parts: list[EnginePart] = [Pinning(blocks, scheduler.pins)]
    if manager.get("explain"):
        parts.append(Explainer(block_size))
    engine = Engine(blocks, scheduler, executor, parts)
    processor = make_processor(blocks, model_limits, tokenizer=tokenizer, seed=seed)
    return Bench(blocks, scheduler, runner, engine, processor)


def make_processor(
    blocks: BlockManager, limits: ModelLimits, *, tokenizer: Any = None, seed: int = 0
) -> InputProcessor:
    kept = PromptEntryCache(blocks.num_blocks, blocks.block_size)
    return InputProcessor(limits, kept, tokenizer=tokenizer, seed=seed)
