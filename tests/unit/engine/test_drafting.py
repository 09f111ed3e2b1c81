"""Drafts of every kind change nothing but the number of steps."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest

from pyengine.outputs import RequestOutput
from pyengine.request.request import SequenceState
from pyengine.sampling_params import SamplingParams
from pyengine.speculation.drafters import Draft, NgramDrafter
from tests.support import fake_runner
from tests.support.drafters import AnswerDrafter, MixedDrafter, RandomDrafter, speculate
from tests.support.engines import GREEDY, Bench, Sink, make_bench
from tests.support.fake_runner import VOCAB_SIZE, Logits, continued
from tests.support.soak import soak_cases

DRAFTERS: dict[str, Callable[[], Any]] = {
    "random": lambda: RandomDrafter(1),
    "mixed": lambda: MixedDrafter(2),
    "ngram": lambda: NgramDrafter(shortest=1),
}


def drawn(random: Random) -> tuple[list[int], SamplingParams]:
    params = SamplingParams(
        n=random.choice([1, 1, 1, 3]),
        temperature=random.choice([0, 0, 0.3, 1.2]),
        top_k=random.choice([0, 5]),
        top_p=random.choice([1, 0.8]),
        seed=random.randrange(9),
        max_tokens=random.randint(1, 24),
        min_tokens=random.choice([0, 0, 1]),
        ignore_eos=random.random() < 0.5,
        stop_token_ids=random.sample(range(97), random.choice([0, 0, 8])),
        repetition_penalty=random.choice([1, 1, 1.3]),
        frequency_penalty=random.choice([0, 0, 0.4]),
        logprobs=random.choice([None, None, 2]),
        prompt_logprobs=random.choice([None, None, None, 1]),
        speculate=random.random() < 0.8,
    )
    return [random.randrange(6) for _ in range(random.randint(1, 30))], params


def run(asked: dict[str, Any], bench: Bench) -> dict[str, RequestOutput]:
    for name, (prompt, params) in asked.items():
        bench.submit({name: prompt}, params)
    outputs = bench.run()
    bench.assert_all_free()
    return outputs


@pytest.mark.parametrize(
    ("num_blocks", "depth"), [(24, 2), (400, 1), *soak_cases([(24, 1), (400, 2)])]
)
def test_200_random_requests_give_the_same_with_every_drafter(num_blocks: int, depth: int) -> None:
    random = Random(num_blocks)
    asked = {str(name): drawn(random) for name in range(200)}
    sizes: dict[str, Any] = {"max_num_batched_tokens": 48, "max_num_seqs": 12}
    plain = run(asked, make_bench(num_blocks, 4, **sizes))
    answers = {
        (tuple(prompt), output.index): output.token_ids
        for name, (prompt, _) in asked.items()
        for output in plain[name].outputs
    }
    for name, make in {**DRAFTERS, "right": lambda: AnswerDrafter(answers)}.items():
        bench = make_bench(num_blocks, 4, depth=depth, **sizes)
        speculate(bench.engine, make())
        outputs = run(asked, bench)
        for key, item in plain.items():
            assert item.outputs == outputs[key].outputs, (name, key)
            assert item.prompt_logprobs == outputs[key].prompt_logprobs
        stats = bench.engine.stats()
        assert stats.counters["draft_tokens"] > 100
        assert stats.num_drafts > 50
        assert (bench.scheduler.num_preemptions > 0) == (num_blocks == 24)
        given = sum(len(output.token_ids) for each in outputs.values() for output in each.outputs)
        assert depth == 2 or stats.num_new_tokens == given  # ended rows of a running step count


def test_a_drafter_that_is_always_right_saves_steps() -> None:
    prompt = [1, 2, 3]
    answer = continued(prompt, 25)
    bench = make_bench()
    speculate(bench.engine, AnswerDrafter({((1, 2, 3), 0): answer}), most=7)
    (output,) = bench.generate([prompt], replace(GREEDY, max_tokens=25))
    assert output.outputs[0].token_ids == answer
    assert bench.runner.computed == [3, 8, 8, 8]
    stats = bench.engine.stats()
    assert (stats.num_drafts, stats.counters["accepted_draft_tokens"]) == (3, 21)
    assert stats.num_new_tokens == 25


def test_a_wrong_draft_leaves_no_block_behind() -> None:
    bench = make_bench(block_size=1)
    speculate(bench.engine, RandomDrafter(3), most=7)
    bench.submit({"a": [1, 2, 3]})
    for _ in range(6):
        bench.engine.step()
        for sequence in bench.scheduler.running:
            assert len(sequence.kv.block_table) == sequence.num_computed


def test_speculate_false_is_honoured() -> None:
    bench = make_bench()
    speculate(bench.engine, RandomDrafter(3))
    bench.generate([[1, 2, 3]], replace(GREEDY, speculate=False))
    assert bench.engine.stats().counters["draft_tokens"] == 0


def test_a_stream_gets_several_tokens_at_a_time_and_each_once() -> None:
    bench, sink, prompt = make_bench(), Sink(), [1, 2, 3]
    answer = continued(prompt, 20)
    speculate(bench.engine, AnswerDrafter({(tuple(prompt), 0): answer}))
    bench.submit({"a": prompt}, replace(GREEDY, max_tokens=20))
    bench.requests["a"].sink = sink
    bench.run()
    parts = [item.outputs[0].token_ids for item in sink.items]
    assert [token for part in parts for token in part] == answer
    assert max(map(len, parts)) == 6


def test_those_that_draft_wait_for_their_tokens_and_the_others_do_not() -> None:
    bench = make_bench(depth=2)
    speculate(bench.engine, RandomDrafter(3))
    bench.submit({"drafts": [1, 2, 3]})
    bench.submit({"plain": [4, 5, 6]}, replace(GREEDY, speculate=False))
    done = bench.run()
    assert done["drafts"].outputs[0].token_ids == continued([1, 2, 3], 8)
    assert done["plain"].outputs[0].token_ids == continued([4, 5, 6], 8)
    assert bench.runner.pending >= 5
    assert bench.engine.stats().counters["draft_tokens"] > 0


class Silent:
    """Never has a guess."""

    def propose(self, contexts: Sequence[SequenceState], most: Sequence[int]) -> list[Draft]:
        return [Draft() for _ in contexts]

    def forget(self, context: SequenceState) -> None:
        pass


def test_who_has_no_draft_waits_for_nothing() -> None:
    bench = make_bench(depth=2)
    speculate(bench.engine, Silent())
    bench.generate([[1, 2, 3], [4, 5]])
    assert bench.runner.pending == 14
    assert bench.runner.computed == [5, *[2] * 7]


class Counted(NgramDrafter):
    """Prompt look-up that notes how many tokens each sample had when it was asked."""

    def __init__(self) -> None:
        super().__init__(shortest=1)
        self.asked: list[tuple[SequenceState, int]] = []

    def propose(self, contexts: Sequence[SequenceState], most: Sequence[int]) -> list[Draft]:
        self.asked += [(context, len(context.token_ids)) for context in contexts]
        return super().propose(contexts, most)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_drafter_is_asked_once_a_step(depth: int) -> None:
    """With two steps open: with the last token, or without it, and never both."""
    bench, drafter = make_bench(depth=depth), Counted()
    speculate(bench.engine, drafter)
    prompts = [[1, 2, 3], [4, 5], [6] * 9]
    outputs = bench.generate(prompts, replace(GREEDY, max_tokens=40))
    assert [output.outputs[0].token_ids for output in outputs] == [
        continued(prompt, 40) for prompt in prompts
    ]
    again = len(drafter.asked) - len(set(drafter.asked))
    assert bench.engine.stats().num_drafts > 3 and len(drafter.asked) > 30
    # A context that waits for its token is asked with it; no other is asked again.
    assert again == 0


def test_a_draft_without_a_choice_behind_it_costs_its_sample_the_drafts_only(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """After a wrong token the model may give NaN: without drafts that never shows."""
    bench = make_bench()
    answer = continued([1, 2, 3], 8)
    wrong = (answer[1] + 1) % VOCAB_SIZE
    speculate(bench.engine, AnswerDrafter({((1, 2, 3), 0): [answer[0], wrong, *answer[2:]]}))
    plain = fake_runner.logits_of

    def logits_of(tokens: Any) -> Logits:
        logits = plain(tokens)
        return logits * np.float32(np.nan) if int(tokens[-1]) == wrong else logits

    monkeypatch.setattr(fake_runner, "logits_of", logits_of)
    assert wrong not in answer
    (output,) = bench.generate([[1, 2, 3]])
    assert output.outputs[0].token_ids == answer
    assert sum("goes on without drafts" in record.getMessage() for record in caplog.records) == 1
    bench.assert_all_free()
