"""A caller that goes away at every possible moment: nothing leaks, and nobody else notices."""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest

from pyengine.engine.loop import EngineLoop
from pyengine.request.prompts import Prompt
from pyengine.request.request import Request
from pyengine.sampling_params import SamplingParams
from tests.support.engines import Bench, Sink, make_bench
from tests.support.soak import soak_cases
from tests.support.wishes import letters

MOMENTS = ("before planning", "before the forward pass", "after it", "after commit", "at an output")
STOP = ("q",)
PROMPTS = {"stays": [5, 6, 7, 8, 9], "also stays": [40, 41], "goes": [5, 6, 7, 8, 9, 10]}
NUM_BLOCKS = {1: 5, 3: 9}
"""So few, for so many samples of each, that somebody is preempted."""


class Stage:
    """An engine that says when which moment is there."""

    def __init__(self, depth: int, num_blocks: int) -> None:
        self.bench: Bench = make_bench(
            num_blocks, 4, depth=depth, max_num_seqs=8, max_model_len=20, tokenizer=letters()
        )
        self.abort: Callable[[list[Request]], object]
        self.at: Callable[[str], object] = lambda moment: None
        self.num_steps = 0
        scheduler, runner = self.bench.scheduler, self.bench.runner
        schedule, run, commit = scheduler.schedule, runner.run, scheduler.commit

        def told_schedule(**settings: Any) -> Any:
            self.at("before planning")
            return schedule(**settings)

        def told_run(*step: Any) -> Any:
            self.at("before the forward pass")
            logits = run(*step)
            self.at("after it")
            return logits

        def told_commit(*step: Any) -> Any:
            remappings = commit(*step)
            self.at("after commit")
            return remappings

        self.bench.engine.observe(self)
        scheduler.schedule = told_schedule  # type: ignore[method-assign]
        runner.run = told_run  # type: ignore[method-assign]
        scheduler.commit = told_commit  # type: ignore[method-assign]

    def on_arrival(self, request: Request) -> None: ...

    def on_finish(self, request: Request) -> None: ...

    def on_step(self, result: Any) -> None:
        self.num_steps += 1
        assert self.num_steps < 400, "somebody waits for ever"
        self.bench.manager.check()


class Teller(Sink):
    """Says that an output has come."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self._stage = stage

    def put(self, output: Any) -> None:
        super().put(output)
        self._stage.at("at an output")


def requests(stage: Stage, names: list[str], params: SamplingParams) -> dict[str, Request]:
    states = {}
    for name in names:
        state = stage.bench.processor.request(name, Prompt(token_ids=PROMPTS[name]), params)
        state.sink = Teller(stage)
        states[name] = state
    return states


def tokens_of(state: Request) -> list[list[int]]:
    return [output.token_ids for output in state.output().outputs]


def run(stage: Stage, states: dict[str, Request]) -> None:
    loop = EngineLoop(stage.bench.engine)
    stage.abort = loop.abort
    loop.submit(list(states.values()))
    while any(state.result.finished_time is None for state in states.values()):
        loop.flush()
    loop.close()
    for state in states.values():
        sink: Any = state.sink
        assert sink is not None and sink.error is None


def alone(name: str, params: SamplingParams) -> list[list[int]]:
    stage = Stage(1, 256)
    states = requests(stage, [name], params)
    run(stage, states)
    return tokens_of(states[name])


def when(number: int, leave: Callable[[str], object]) -> tuple[Callable[[str], None], list[str]]:
    """At the `number`-th moment, whatever it is, somebody leaves."""
    left, came = [number], []

    def at(moment: str) -> None:
        if not came:
            left[0] -= 1
            if left[0] < 0:
                came.append(moment)
                leave(moment)

    return at, came


# Every pair of values occurs; soak runs have all of them together.
PAIRS = [
    (1, 1, (), False),
    (1, 3, STOP, True),
    (2, 1, STOP, True),
    (2, 3, (), True),
    (2, 3, STOP, False),
]
ALL = product((1, 2), (1, 3), ((), STOP), (False, True))
CASES = [*PAIRS, *soak_cases([case for case in ALL if case not in PAIRS])]


def stages(depth: int, num_blocks: int) -> Iterator[tuple[int, Stage]]:
    for number in range(4000):
        yield number, Stage(depth, num_blocks)


@pytest.mark.parametrize(("depth", "n", "stop", "by_the_engine"), CASES)
def test_nothing_leaks_and_nobody_else_notices(
    depth: int, n: int, stop: tuple[str, ...], by_the_engine: bool
) -> None:
    """By the inbox, as a thread does it; and as the engine does it, which may be in a step."""
    params = SamplingParams(
        n=n, temperature=0.8, seed=1, ignore_eos=True, max_tokens=9, stop=list(stop)
    )
    expected = {name: alone(name, params) for name in PROMPTS}
    seen: Counter[str] = Counter()
    for number, stage in stages(depth, NUM_BLOCKS[n]):
        states = requests(stage, list(PROMPTS), params)
        goes = states["goes"]

        def leave(moment: str) -> None:
            left = goes.unfinished  # noqa: B023
            num_preemptions = goes.progress.num_preemptions  # noqa: B023
            was_preempted = num_preemptions and not all(entry.is_running for entry in left)
            seen["while preempted"] += bool(was_preempted)
            seen[moment] += 1
            if by_the_engine:
                stage.bench.engine.abort([goes])  # noqa: B023
            else:
                stage.abort([goes])  # noqa: B023

        stage.at, came = when(number, leave)
        run(stage, states)
        for name, state in states.items():
            found = tokens_of(state)
            if name != "goes":
                assert found == expected[name], (number, came)
            else:
                for tokens, whole in zip(found, expected[name], strict=True):
                    assert tokens == whole[: len(tokens)], (number, came)
            assert state.result.finished_time is not None
            last = state.sink.items[-1]  # type: ignore[union-attr]
            assert last.finished, (number, came)
        assert not stage.bench.engine.unfinished
        stage.bench.assert_all_free()
        seen["preemptions"] += stage.bench.scheduler.num_preemptions
        if not came:
            break
    for moment in MOMENTS:
        assert seen[moment], (moment, seen)
    assert seen["preemptions"] and seen["while preempted"], seen
