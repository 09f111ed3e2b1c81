"""`max_num_seqs`: a request is admitted when all of its samples may run at once."""

from random import Random

import pytest

from pyengine.kv_cache import BlockManager
from pyengine.request.request import SequenceState
from pyengine.sampling_params import SamplingParams
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits, StalledError
from tests.support.engines import make_bench
from tests.support.requests import make_sequence


class FourSequences:
    """A scheduler of four sequences, whose prompts of 16 tokens take two steps."""

    def __init__(self, budget: int = 8) -> None:
        limits = SchedulerLimits(max_num_batched_tokens=budget, max_num_seqs=4)
        self.scheduler = Scheduler(BlockManager(256, 4), limits)
        self.sequences: dict[str, SequenceState] = {}

    def add(self, name: str, num_samples: int) -> None:
        prompt = [Random(name).randrange(90) for _ in range(16)]
        self.sequences[name] = make_sequence(name, prompt, n=num_samples)
        self.scheduler.add(self.sequences[name])

    def step(self) -> str:
        """Plan and commit a step, fork what has its first token; the names of who was in it."""
        step = self.scheduler.schedule()
        assert step is not None
        self.scheduler.commit(step, [1] * len(step.sampling_sequences))
        for sequence in step.sampling_sequences:
            if sequence.num_seqs > 1:
                others = [(other, 1) for other in sequence.request.sequences[1:]]
                self.scheduler.fork(sequence, others)
        assert self.scheduler.num_running <= 4
        return "".join(dict.fromkeys(sequence.request.request_id for sequence in step.sequences))


@pytest.mark.parametrize(
    ("samples", "admitted"),
    [
        ({"a": 3, "b": 2}, "a"),
        ({"a": 3, "b": 1}, "ab"),
        ({"a": 2, "b": 2, "c": 1}, "ab"),
        ({"a": 1, "b": 1, "c": 2, "d": 1}, "abc"),
        ({"a": 4, "b": 1}, "a"),
        ({"a": 1, "b": 4, "c": 1}, "a"),  # no request overtakes one that waits for sequences to end
    ],
)
def test_those_that_come_together_share_the_step(samples: dict[str, int], admitted: str) -> None:
    four = FourSequences(budget=256)
    for name, num_samples in samples.items():
        four.add(name, num_samples)
    assert four.step() == admitted
    assert four.step() == admitted


@pytest.mark.parametrize(("second", "is_admitted"), [(1, True), (2, False), (4, False)])
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_samples_count_before_and_after_they_are_forked(
    steps: int, second: int, is_admitted: bool
) -> None:
    """The first request, of three samples, computes its prompt for two steps; then they decode."""
    four = FourSequences()
    four.add("a", 3)
    for _ in range(steps):
        four.step()
    four.scheduler.limits = SchedulerLimits(max_num_batched_tokens=256, max_num_seqs=4)
    four.add("b", second)
    assert four.step() == ("ab" if is_admitted else "a")
    running = [
        sequence for sequence in four.scheduler.running if sequence.request.request_id == "a"
    ]
    four.scheduler.finish(running[:2])
    four.step()
    assert four.sequences["b"].is_running == (second <= 3 or not running[2:])


def test_a_request_of_more_samples_than_may_run_is_named() -> None:
    four = FourSequences()
    four.add("a", 5)
    with pytest.raises(StalledError, match="runs 5 samples at once"):
        four.scheduler.schedule()


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_has_more_samples_than_sequences_may_run(depth: int) -> None:
    random = Random(depth)
    bench = make_bench(512, 4, depth=depth, max_num_seqs=8, max_num_batched_tokens=32)
    counts, most = {}, 0
    for number in range(60):
        counts[f"{number}"] = random.randint(1, 8)
        params = SamplingParams(
            n=counts[f"{number}"], seed=number, max_tokens=random.randint(1, 9), ignore_eos=True
        )
        prompt = [random.randrange(90) for _ in range(random.randint(1, 40))]
        bench.submit({f"{number}": prompt}, params)
        for _ in range(random.choice([0, 0, 1, 4])):
            most = max(most, len(bench.engine.step().rows))
            assert bench.scheduler.num_running <= 8
    while bench.engine.has_work:
        most = max(most, len(bench.engine.step().rows))
        assert bench.scheduler.num_running <= 8
    assert most == 8
    for name, output in bench.take_finished().items():
        assert len(output.outputs) == counts[name]
    bench.assert_all_free()
