"""A whole engine around a fake runner: real manager, scheduler, sampler and loop."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from pyengine.cache import BlockManager
from pyengine.core import RequestOutput, SamplingParams
from pyengine.engine import Engine, Executor, ModelFacts, Prompt, RequestState
from pyengine.engine.capacity import longest_sequence
from pyengine.runner import Work
from pyengine.runner.queue import ThreadWork
from pyengine.scheduler import Scheduler, SchedulerLimits
from tests.support.fake_runner import VOCAB_SIZE, FakeRunner

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=8)
EOS = 2


class LazyWork(ThreadWork[Any]):
    """Work that is done when somebody asks for its result, and not before."""

    def __init__(self, queue: "LazyQueue", work: Callable[[], Any]) -> None:
        super().__init__(Future())
        self._queue, self._work = queue, work

    def run(self) -> None:
        try:
            self._future.set_result(self._work())
        except BaseException as error:
            self._future.set_exception(error)

    def wait(self) -> None:
        self._queue.run_up_to(self)

    def result(self) -> Any:
        self.wait()
        return super().result()


class LazyQueue:
    """The slowest device there is: the host is always ahead of it."""

    def __init__(self) -> None:
        self.waiting: list[LazyWork] = []

    def submit(self, work: Callable[[], Any]) -> Work[Any]:
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


@dataclass
class Bench:
    manager: BlockManager
    scheduler: Scheduler
    runner: FakeRunner
    engine: Engine
    states: dict[str, RequestState] = field(default_factory=dict)

    def submit(self, prompts: dict[str, list[int]], params: SamplingParams = GREEDY) -> None:
        for request_id, tokens in prompts.items():
            state = self.engine.add_request(request_id, Prompt(token_ids=tokens), params)
            self.states[request_id] = state

    def output(self, name: str) -> RequestOutput:
        return self.engine.output(self.states[name])

    def abort(self, names: list[str]) -> list[RequestOutput]:
        """Those that had not ended."""
        states = [self.states[name] for name in names if name in self.states]
        return [state.output() for state in self.engine.abort(states)]

    def step(self) -> list[RequestOutput]:
        """The requests that the step ended."""
        return [state.output() for state in self.engine.step().finished]

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
        ended = {name: one for name, one in self.states.items() if one.finished_time is not None}
        for name in ended:
            del self.states[name]
        return {name: state.output() for name, state in ended.items()}

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
    tokenizer: Any = None,
    **manager: Any,
) -> Bench:
    blocks = BlockManager(num_blocks, block_size, groups=groups, **manager)
    limits = SchedulerLimits(
        max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=max_num_seqs
    )
    caching = bool(manager.get("prefix_caching", True))
    scheduler = Scheduler(blocks, limits, prefix_caching=caching)
    most = max_model_len or num_blocks * block_size
    runner = FakeRunner(num_blocks, block_size, groups=groups, width=-(-most // block_size))
    facts = ModelFacts(
        vocab_size=VOCAB_SIZE,
        eos_token_ids=frozenset({EOS}),
        max_model_len=longest_sequence(blocks, max_num_batched_tokens, most),
        max_num_seqs=max_num_seqs,
        limited_by=f"the KV pool holds {num_blocks} blocks of {block_size} tokens",
    )
    executor = Executor(runner, LazyQueue(), depth=depth)
    engine = Engine(blocks, scheduler, executor, facts, tokenizer=tokenizer, seed=seed)
    return Bench(blocks, scheduler, runner, engine)
