"""The engine while steps fail and requests go: every token must be that of the request run alone.

The runner raises by chance, after it has destroyed what it was to write; requests are aborted
between steps and between plan and commit; pools are small, chunks short, prompts shared, and two
namespaces ask for the same prompts. `PYENGINE_FAULT_SEED` names the seed of the first case; a
failure names its own.
"""

import os
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from pyengine.executor.model_runner import StepLogits
from pyengine.outputs import RequestOutput
from pyengine.sampling.state import sample_seed
from pyengine.sampling_params import SamplingParams
from tests.support import fake_runner
from tests.support.engines import EOS, make_bench
from tests.support.fake_runner import continued
from tests.support.faults import InjectedError, Setting, make_faulty_bench

MAX_STEPS = 20_000


def drawn_prompt(random: Random, longest: int) -> list[int]:
    """Two families whose members share prefixes; at most two different tokens at the end."""
    family = random.randrange(2)
    shared = [(7 * family + i * i) % 97 for i in range(random.choice([8, 24, 40]))]
    tail = [random.randrange(2) for _ in range(random.randint(0, 2))]
    return (shared[: random.randint(1, 40)] + tail)[:longest]


def drawn_params(random: Random, slots: int) -> SamplingParams:
    return SamplingParams(
        n=random.randint(1, min(4, slots)) if random.random() < 0.5 else 1,
        temperature=random.choice([0, 1]),
        seed=random.randrange(3),
        max_tokens=random.randint(1, 12),
        ignore_eos=random.random() < 0.7,
        prompt_logprobs=0 if random.random() < 0.1 else None,
    )


def alone(prompt: list[int], params: SamplingParams, index: int, most: int) -> list[int]:
    """The tokens of the sample by itself, on a separate engine or without any."""
    length = min(params.max_tokens or most, most)
    if params.temperature > 0:
        seed = sample_seed(params.seed or 0, index)
        sample_params = replace(params, n=1, seed=seed, max_tokens=length, prompt_logprobs=None)
        return make_bench().generate([prompt], sample_params)[0].outputs[0].token_ids
    tokens = continued(prompt, length)
    ends = EOS in tokens and not params.ignore_eos
    return tokens[: tokens.index(EOS) + 1] if ends else tokens


class Case:
    """One engine, and requests that come, fail, go and end."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.setting = Setting.drawn(self.random)
        self.bench = make_faulty_bench(self.setting, self.random)
        self.bench.runner.during = self.maybe_abort
        self.seen: Counter[str] = self.bench.runner.seen
        self.asked: dict[str, tuple[list[int], SamplingParams]] = {}
        self.live: list[str] = []

    def submit(self) -> None:
        random, name = self.random, str(len(self.asked))
        prompt = drawn_prompt(random, self.setting.max_model_len - 1)
        params = drawn_params(random, self.setting.slots)
        self.asked[name] = prompt, params
        self.bench.scheduler.namespaces[name] = random.randrange(2)
        self.bench.submit({name: prompt}, params)
        self.live.append(name)

    def maybe_abort(self, moment: str) -> None:
        requests = self.bench.requests  # one that ended in this very step is still in `live`
        live = [name for name in self.live if requests[name].result.finished_time is None]
        if live and self.random.random() < self.setting.aborts:
            name = self.random.choice(live)
            self.live.remove(name)
            (output,) = self.bench.abort([name, "unknown"])
            assert self.bench.abort([name]) == []
            del self.bench.requests[name]
            self.judge(output)
            self.seen[f"aborted {moment}"] += 1

    def judge(self, output: RequestOutput) -> None:
        prompt, params = self.asked[output.request_id]
        most = self.setting.max_model_len - len(prompt)
        assert output.prompt_token_ids == prompt
        assert len(output.outputs) == params.n
        for index, each_output in enumerate(output.outputs):
            expected = alone(prompt, params, index, most)
            if each_output.finish_reason in ("abort", "error"):
                assert each_output.token_ids == expected[: len(each_output.token_ids)]
                assert len(each_output.token_ids) < len(expected)
            else:
                assert each_output.token_ids == expected
                assert each_output.finish_reason in ("length", "stop")
        whole = all(
            each_output.finish_reason not in ("abort", "error") for each_output in output.outputs
        )
        if params.prompt_logprobs is not None and whole:
            assert output.prompt_logprobs is not None
            assert len(output.prompt_logprobs) == len(prompt)

    def step(self) -> None:
        try:
            self.bench.engine.step()
        except KeyboardInterrupt:
            pass
        except InjectedError:  # two requests failed, and no step in between went well
            self.seen["given up"] += 1
        self.bench.manager.check()
        self.check_jobs()
        for name, output in self.bench.take_finished().items():
            self.live.remove(name)
            self.seen["found at fault"] += output.error is not None
            self.judge(output)

    def check_jobs(self) -> None:
        """The scheduler's counts mirror the manager's; who waits holds nothing, who runs does."""
        scheduler = self.bench.scheduler
        sequences = [*scheduler.waiting, *scheduler.running]
        live = {sample for request in self.bench.engine.unfinished for sample in request.unfinished}
        assert len(sequences) == len(set(sequences))
        assert set(sequences) <= live  # samples that are not forked yet are nowhere
        assert {sequence.request for sequence in sequences} == set(self.bench.engine.unfinished)
        for sequence in sequences:
            if not self.bench.engine._queue:
                assert sequence.num_tokens == sequence.kv.num_tokens
                assert sequence.num_computed == sequence.kv.num_computed_tokens
            assert (
                sequence.is_running
                == (sequence in scheduler._running)
                == bool(sequence.kv.block_table)
            )

    def run(self, num_requests: int) -> None:
        rush = self.random.choice([0.1, 0.4, 0.9])
        for _ in range(MAX_STEPS):
            if len(self.asked) < num_requests and self.random.random() < rush:
                self.submit()
            elif len(self.asked) == num_requests and not self.bench.engine.has_work:
                break
            self.maybe_abort("between steps")
            self.step()
        assert not self.live, f"{self.live} have not ended after {MAX_STEPS} steps"
        self.seen["preemptions"] += self.bench.scheduler.num_preemptions
        self.seen.update(self.bench.engine.stats().counters)
        self.all_is_free()

    def all_is_free(self) -> None:
        bench = self.bench
        bench.assert_all_free()
        assert not bench.engine.unfinished and bench.engine._output._unread is None
        assert not bench.engine.recovery.faults.suspects
        bench.manager.evict_all()
        assert bench.manager.usage().free == bench.manager.num_blocks
        assert bench.manager.cached_hashes() == []


def run_cases(num_requests: int) -> None:
    first = int(os.environ.get("PYENGINE_FAULT_SEED", "0"))
    seen: Counter[str] = Counter()
    done, seed = 0, first
    while done < num_requests:
        fake_runner._LOGITS.clear()  # it keeps the logits of every context ever seen
        count = min(Random(seed).randint(4, 16), num_requests - done)
        case = Case(seed)
        try:
            case.run(count)
        except BaseException as error:
            error.add_note(f"again: PYENGINE_FAULT_SEED={seed} pytest {__file__}; {case.setting}")
            raise
        seen.update(case.seen)
        done, seed = done + count, seed + 1
    print(f"{done} requests on {seed - first} engines: {dict(seen)}")
    for what in MUST_HAPPEN:  # a test that never got there has shown nothing
        assert seen[what] > 0, f"no case had {what!r}; the seeds from {first} on are too tame"


MUST_HAPPEN = [
    "failed half-way",
    "failed after the forward pass",
    "found at fault",
    "aborted between steps",
    "aborted before the forward pass",
    "aborted after the forward pass",
    "preemptions",
    "cached_tokens",
    "in_flight_blocks",
    "merged_blocks",
    "taken_over_blocks",
    "copied_blocks",
    "draft_tokens",
    "accepted_draft_tokens",
    "evicted_blocks",
    "rolled_back_steps",
]


@pytest.mark.parametrize("n", [1, 4])
def test_an_abort_between_plan_and_commit_leaves_the_others_alone(n: int) -> None:
    bench, prompts = make_bench(), {"a": [1, 2, 3], "b": [4, 5, 6]}
    bench.submit(prompts, SamplingParams(n=n, temperature=0, ignore_eos=True, max_tokens=4))
    run = bench.runner.run

    def abort_after(*step: Any) -> StepLogits:
        logits = run(*step)
        bench.abort(["a"])
        return logits

    bench.runner.run = abort_after  # type: ignore[method-assign]
    assert [output.token_ids for output in bench.run()["b"].outputs] == [
        continued([4, 5, 6], 4)
    ] * n
    bench.assert_all_free()


def test_500_requests_under_fault() -> None:
    run_cases(500)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_10_000_requests_under_fault() -> None:
    run_cases(10_000)
