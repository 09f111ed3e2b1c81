"""Masks over logits: rows of every kind, vocabularies of every size."""

from threading import Barrier, Event, Lock, get_ident
from time import monotonic, sleep
from typing import Any

import llguidance
import numpy as np
import pytest
import torch

from pyengine.sampling import token_masks as structured
from pyengine.sampling.batch import SamplingBatch
from pyengine.sampling.sampler import Sampler
from pyengine.sampling.state import SamplingState
from pyengine.sampling.token_masks import MaskFiller, TokenMasks, TokenMatcher
from pyengine.sampling_params import SamplingParams


class FakeMatcher:
    """Allows some tokens; records the ones it got."""

    def __init__(self, allowed: set[int]) -> None:
        self.allowed, self.seen, self.error, self.num_filled = allowed, [0] * 0, "", 0
        self.is_finished = False

    def append(self, token: int) -> None:
        self.seen.append(token)

    def copy(self) -> "FakeMatcher":
        return FakeMatcher(self.allowed)

    def fail(self, reason: str) -> None:
        self.error = self.error or reason

    def may_come(self, token: int) -> bool:
        return bool(self.error) or token in self.allowed

    def fill(self, masks: Any, row: int) -> None:
        self.num_filled += 1
        if not self.allowed:
            raise RuntimeError("broken")
        masks[row] = 0
        words = masks[row].view(np.uint32)
        for token in self.allowed:
            words[token // 32] |= np.uint32(1 << token % 32)


def state(vocab_size: int, allowed: set[int] | None, **params: Any) -> SamplingState:
    matcher: Any = None if allowed is None else FakeMatcher(allowed)
    settings = SamplingParams(**{"temperature": 0, **params})
    made = SamplingState(settings, [1], seed=1, vocab_size=vocab_size)
    if matcher is not None:
        made.keep_to(matcher)
    return made


def start(batch: SamplingBatch) -> Any:
    return TokenMasks(batch.matchers, batch.vocab_size, MaskFiller()) if batch.matchers else None


def sampled(logits: torch.Tensor, states: list[SamplingState]) -> Any:
    batch = SamplingBatch(states)
    return Sampler().launch(logits, batch, None, start(batch)).wait()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "width"), [(64, 64), (97, 97), (97, 128), (31, 200)])
def test_only_allowed_tokens_come_and_other_rows_stay_as_they_are(
    vocab_size: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(width)
    logits = torch.randn(4, width, generator=generator).to(dtype)
    logits[:, vocab_size:] = -50.0  # a model's padding; what a row may be given is its vocabulary's
    before = logits.clone()
    last = vocab_size - 1
    several = [{0}, None, {last}, {1, 5, last}]
    found = sampled(logits, [state(vocab_size, value) for value in several])
    tokens = found.token_ids.tolist()
    assert tokens[0] == 0
    assert tokens[1] == int(logits[1].float().argmax())
    assert tokens[2] == last
    assert tokens[3] == max((1, 5, last), key=lambda token: (float(logits[3, token]), -token))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("vocab_size", "width"), [(64, 64), (97, 128), (31, 200)])
def test_the_largest_of_those_that_may_come_is_found_without_touching_the_others(
    vocab_size: int, width: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    logits = torch.randint(-3, 4, (40, width), generator=generator).to(dtype)  # many are equal
    logits[5, 7] = logits[6, 9] = torch.nan
    logits[7] = -torch.inf
    choice = np.random.default_rng(0)
    several = [
        None
        if row % 5 == 1
        else {int(integer) for integer in choice.integers(0, vocab_size, 1 + row % 9)}
        for row in range(len(logits))
    ]
    several[5] = {7}
    batch = SamplingBatch([state(vocab_size, value) for value in several])
    before = logits.clone()
    found, chosen = start(batch).largest(logits)
    assert torch.equal(logits.nan_to_num(9), before.nan_to_num(9))
    masked = start(batch).apply(logits, to_copy=True).numpy()
    assert found.tolist() == masked.argmax(1).tolist()
    expected = masked[np.arange(len(logits)), found.numpy()]
    assert np.array_equal(chosen.float().numpy(), expected, equal_nan=True)


def test_draws_stay_within_the_mask_and_follow_the_seed() -> None:
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(0))
    drawn = []
    for seed in range(200):
        settings = SamplingParams(temperature=2, top_p=0.9)
        matcher: Any = FakeMatcher({3, 40, 96})
        sampling_state = SamplingState(settings, [1], seed=seed, vocab_size=97)
        sampling_state.keep_to(matcher)
        drawn.append(int(sampled(logits, [sampling_state]).token_ids[0]))
    assert set(drawn) == {3, 40, 96}


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = torch.randn(2, 97, generator=torch.Generator().manual_seed(0))
    states = [state(97, {7}, logprobs=3), state(97, None, logprobs=3)]
    bound, free = sampled(logits, states).logprobs
    expected = torch.log_softmax(logits, 1)
    assert bound.logprob == pytest.approx(float(expected[0, 7]), abs=1e-5)
    assert list(bound.top_ids) == expected[0].topk(3).indices.tolist()
    assert list(free.top_ids) == expected[1].topk(3).indices.tolist()


def test_what_fails_while_masks_are_filled_is_raised_where_they_are_used() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        sampled(torch.zeros(1, 97), [state(97, set())])


def test_a_state_tells_its_matcher_and_a_sibling_has_its_own() -> None:
    sampling_state: Any = state(97, {5, 6})
    other: Any = sampling_state.sibling(2)
    assert sampling_state.depends_on_output
    assert other.depends_on_output
    sampling_state.append(5)
    assert (sampling_state.matcher.seen, other.matcher.seen) == ([5], [])


def test_a_row_that_takes_too_long_is_given_up_and_the_others_are_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(structured, "_LONGEST_MASK", 0.02)
    monkeypatch.setattr(structured, "_LOOKS_EVERY", 0.005)
    go_on = Event()

    class Stuck(FakeMatcher):
        def fill(self, masks: Any, row: int) -> None:
            begin = monotonic()
            while not (self.error and go_on.is_set()) and monotonic() - begin < 10:
                pass
            super().fill(masks, row)

    stuck: Any = Stuck({1})
    states = [state(97, {7}), state(97, None), state(97, {8})]
    assert states[1].matcher is None
    states[1].keep_to(stuck)
    batch, filler = SamplingBatch(states), MaskFiller()
    logits = torch.arange(97.0).expand(3, 97)
    masks = TokenMasks(batch.matchers, 97, filler)
    tokens = Sampler().launch(logits, batch, None, masks).wait().token_ids.tolist()
    assert tokens == [7, 96, 8]
    assert "take more than 0.02 s" in stuck.error
    states = [state(97, {3})]
    batch = SamplingBatch(states)  # the next step has another thread
    masks = TokenMasks(batch.matchers, 97, filler)
    assert Sampler().launch(logits[:1], batch, None, masks).wait().token_ids.tolist() == [3]
    go_on.set()


class Meeting(FakeMatcher):
    """Its mask needs another thread that fills one at the same time."""

    def __init__(self, allowed: set[int], barrier: Barrier) -> None:
        super().__init__(allowed)
        self._barrier = barrier

    def fill(self, masks: Any, row: int) -> None:
        self._barrier.wait()
        super().fill(masks, row)


def bits_of(filling: Any) -> list[set[int]]:
    rows = np.unpackbits(filling.result().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in rows]


def test_many_rows_are_filled_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    barrier = Barrier(2, timeout=20)
    matchers: list[Any] = [Meeting({row}, barrier) for row in range(64)]
    assert bits_of(MaskFiller().fill(matchers, 3)) == [{row} for row in range(64)]


@pytest.mark.parametrize(("num_rows", "num_threads"), [(1, 1), (31, 1), (32, 2), (64, 4), (999, 4)])
def test_few_rows_are_filled_by_one_thread(
    num_rows: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    threads = set()

    class Seen(FakeMatcher):
        def fill(self, masks: Any, row: int) -> None:
            threads.add(get_ident())
            super().fill(masks, row)

    matchers: list[Any] = [Seen({row % 97}) for row in range(num_rows)]
    assert bits_of(MaskFiller().fill(matchers, 4)) == [{row % 97} for row in range(num_rows)]
    assert len(threads) == num_threads


def test_no_matcher_is_used_by_two_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step is begun before the masks of the one before are filled."""
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)

    class Alone(FakeMatcher):
        def __init__(self, allowed: set[int]) -> None:
            super().__init__(allowed)
            self._lock = Lock()

        def fill(self, masks: Any, row: int) -> None:
            assert self._lock.acquire(blocking=False)
            sleep(0.0005)
            super().fill(masks, row)
            self._lock.release()

    matchers: list[Any] = [Alone({row % 97}) for row in range(100)]
    filler, chance = MaskFiller(), np.random.default_rng(0)
    fillings = []
    for _ in range(8):
        chosen = chance.permutation(100)[: chance.integers(1, 101)].tolist()
        fillings.append((chosen, filler.fill([matchers[at] for at in chosen], 4)))
    for chosen, filling in fillings:
        assert bits_of(filling) == [{at % 97} for at in chosen]


def test_a_stuck_row_of_many_costs_no_other_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(structured, "_LONGEST_MASK", 0.02)
    monkeypatch.setattr(structured, "_LOOKS_EVERY", 0.005)
    go_on = Event()

    class Stuck(FakeMatcher):
        def fill(self, masks: Any, row: int) -> None:
            if self.error:
                masks[row] = -1
                return
            begin = monotonic()
            while not go_on.is_set() and monotonic() - begin < 10:
                pass

    matchers: list[Any] = [
        Stuck({0}) if row in (5, 40, 63) else FakeMatcher({row}) for row in range(64)
    ]
    filler, everything = MaskFiller(), set(range(96))
    for _ in range(2):  # the second time they are known to be stuck
        found = bits_of(filler.fill(matchers, 3))
        for row, (matcher, bits) in enumerate(zip(matchers, found, strict=True)):
            assert bits == (everything if isinstance(matcher, Stuck) else {row})
            assert bool(matcher.error) == isinstance(matcher, Stuck)
    go_on.set()


@pytest.mark.parametrize("num_threads", [1, 4])
def test_masks_are_those_of_the_grammar_whoever_fills_them(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: num_threads)
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_regex(r"([ab]{2,9}|c[0-9]+d?)*")
    first, num_words = TokenMatcher(llguidance.LLMatcher(tokenizer, grammar)), 9
    matchers = [first.copy() for _ in range(70)]
    chance, filler = np.random.default_rng(0), MaskFiller()
    for _ in range(5):
        bits = filler.fill(matchers, num_words).result()
        for row, matcher in enumerate(matchers):
            alone = np.zeros((1, num_words), np.int32)
            matcher.copy().fill(alone, 0)
            assert np.array_equal(alone[0], bits[row])
            allowed = np.flatnonzero(np.unpackbits(bits[row].view(np.uint8), bitorder="little"))
            matcher.append(int(chance.choice(allowed[allowed < 256])))


@pytest.mark.parametrize("width", [1, 31, 64, 97, 128, 200])
def test_a_device_unpacks_masks_as_the_host_does(width: int) -> None:
    rng = np.random.default_rng(width)
    bits = rng.integers(-(2**31), 2**31, (3, 4), dtype=np.int64).astype(np.int32)
    logits = torch.zeros(3, width)
    on_host = structured._masked(logits.numpy(), np.arange(3), bits, is_own=False) == 0
    on_device = structured._unpacked(torch.from_numpy(bits), width)
    assert (on_device.numpy() == on_host).all()
    assert not on_host[:, 128:].any()
    assert not logits.any()


def test_a_matcher_walks_drafts_and_stays_where_it_is() -> None:
    grammar = llguidance.LLMatcher.grammar_from_regex("ab(c|d)e")
    matcher = TokenMatcher(llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar))
    a, b, c, x, e = b"abcxe"
    for drafts, count in (([a, b, c], 3), ([a, b, x, e], 2), ([x], 0), ([], 0)):
        assert matcher.num_allowed(drafts) == count
    assert matcher.num_allowed([a, b, c, e]) == 3, "what ends the answer leaves nothing to follow"
    ahead = matcher.ahead()
    ahead.append(a)
    assert (ahead.num_allowed([b]), matcher.num_allowed([b]), matcher.num_allowed([a])) == (1, 0, 1)
    masks = np.zeros((1, 9), np.int32)
    ahead.fill(masks, 0)
    assert ahead._spent is matcher._spent and matcher._spent.num_masks == 1


@pytest.mark.parametrize(
    "grammar",
    [
        llguidance.LLMatcher.grammar_from_regex(r"[ab]*(cd|ce)?[0-9]{2,3}"),
        llguidance.LLMatcher.grammar_from_json_schema(
            {"type": "array", "items": {"enum": ["red", 12, None]}, "maxItems": 2}
        ),
        llguidance.LLMatcher.grammar_from_lark('start: "x" start "y" | "z"'),
    ],
)
def test_a_token_may_come_where_the_mask_has_it_or_that_is_not_said(grammar: str) -> None:
    tokenizer = llguidance.LLTokenizer("byte")
    chance = np.random.default_rng(0)
    for _ in range(20):
        matcher = TokenMatcher(llguidance.LLMatcher(tokenizer, grammar))
        masks = np.zeros((1, -(-tokenizer.vocab_size // 32)), np.int32)
        for _ in range(12):
            matcher.fill(masks, 0)
            bits = np.unpackbits(masks.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
            said = np.array([matcher.may_come(token) for token in range(len(bits))])
            assert not (said & (bits == 0)).any()
            assert set(np.flatnonzero(~said & (bits == 1))) <= {tokenizer.eos_token}
            if matcher.is_finished:
                break
            matcher.append(int(chance.choice(np.flatnonzero(bits))))
