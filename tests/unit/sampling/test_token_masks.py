"""Masks over logits: rows of every kind, vocabularies of every size."""

from collections import Counter
from threading import Barrier, Event, Lock, get_ident
from time import monotonic, sleep, thread_time
from typing import Any

import llguidance
import numpy as np
import pytest

from pyengine.sampling import token_masks as structured
from pyengine.sampling.sampler import SamplingBatch, sample
from pyengine.sampling.state import SamplingState
from pyengine.sampling.token_masks import (
    MIN_ROWS,
    CompiledGrammar,
    MaskFiller,
    TokenMasks,
    TokenMatcher,
)
from pyengine.sampling_params import SamplingParams
from pyengine.utils.dtypes import widened
from tests.support.logits import in_type, normal, tensor_of


class FakeMatcher:
    """Allows some tokens; records the ones it got."""

    seconds_per_mask = 1e-5

    def __init__(self, allowed: set[int]) -> None:
        self.allowed, self.seen, self.error, self.num_filled = allowed, [0] * 0, "", 0
        self.is_finished = False
        self.base = object()

    def append(self, token: int) -> None:
        self.seen.append(token)

    def sibling(self) -> "FakeMatcher":
        return FakeMatcher(self.allowed)

    def fail(self, reason: str) -> None:
        self.error = self.error or reason

    def may_come(self, token: int) -> bool:
        return bool(self.error) or token in self.allowed

    def fill(self, masks: Any, row: int, begin: float) -> float:
        self.num_filled += 1
        if not self.allowed:
            raise RuntimeError("broken")
        words = masks[row].view(np.uint32)
        words[:] = 0
        for token in self.allowed:
            words[token // 32] |= np.uint32(1 << token % 32)
        return thread_time()


def state(vocab_size: int, allowed: set[int] | None, **params: Any) -> SamplingState:
    matcher: Any = None if allowed is None else FakeMatcher(allowed)
    settings = SamplingParams(**{"temperature": 0, **params})
    sampling_state = SamplingState(settings, [1], seed=1, vocab_size=vocab_size)
    if matcher is not None:
        sampling_state.keep_to(matcher)
    return sampling_state


def start(batch: SamplingBatch) -> Any:
    return TokenMasks(batch.matchers, batch.vocab_size, MaskFiller()) if batch.matchers else None


def sampled(logits: Any, states: list[SamplingState]) -> Any:
    batch = SamplingBatch(states)
    return sample(logits, batch, None, start(batch)).wait()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab_size", "width"), [(64, 64), (97, 97), (97, 128), (31, 200)])
def test_only_allowed_tokens_come_and_other_rows_stay_as_they_are(
    vocab_size: int, width: int, dtype: str
) -> None:
    logits = normal(width, 4, width)
    logits[:, vocab_size:] = -50.0  # a model's padding; what a row may be given is its vocabulary's
    logits = in_type(logits, dtype)
    before, floats = logits.copy(), widened(logits)
    last = vocab_size - 1
    several = [{0}, None, {last}, {1, 5, last}]
    actual = sampled(logits, [state(vocab_size, value) for value in several])
    tokens = actual.token_ids.tolist()
    assert tokens[0] == 0
    assert tokens[1] == int(floats[1].argmax())
    assert tokens[2] == last
    assert tokens[3] == max((1, 5, last), key=lambda token: (float(floats[3, token]), -token))
    assert np.array_equal(logits, before)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("vocab_size", "width"), [(64, 64), (97, 128), (31, 200)])
def test_the_largest_of_those_that_may_come_is_found_without_touching_the_others(
    vocab_size: int, width: int, dtype: str
) -> None:
    choice = np.random.default_rng(vocab_size)
    logits = choice.integers(-3, 4, (40, width)).astype(np.float32)  # many are equal
    logits[5, 7] = logits[6, 9] = np.nan
    logits[7] = -np.inf
    logits = in_type(logits, dtype)
    several = [
        None
        if row % 5 == 1
        else {int(integer) for integer in choice.integers(0, vocab_size, 1 + row % 9)}
        for row in range(len(logits))
    ]
    several[5] = {7}
    batch = SamplingBatch([state(vocab_size, value) for value in several])
    before = logits.copy()
    actual, chosen = start(batch).largest(logits)
    assert np.array_equal(widened(logits), widened(before), equal_nan=True)
    masked = start(batch).apply(logits, to_copy=True)
    assert actual.tolist() == masked.argmax(1).tolist()
    expected = masked[np.arange(len(logits)), actual]
    assert np.array_equal(chosen, expected, equal_nan=True)


def test_draws_stay_within_the_mask_and_follow_the_seed() -> None:
    logits = normal(0, 1, 97)
    drawn = []
    for seed in range(200):
        settings = SamplingParams(temperature=2, top_p=0.9)
        matcher: Any = FakeMatcher({3, 40, 96})
        sampling_state = SamplingState(settings, [1], seed=seed, vocab_size=97)
        sampling_state.keep_to(matcher)
        drawn.append(int(sampled(logits, [sampling_state]).token_ids[0]))
    assert set(drawn) == {3, 40, 96}


def test_log_probabilities_are_those_of_the_model() -> None:
    logits = normal(0, 2, 97)
    states = [state(97, {7}, logprobs=3), state(97, None, logprobs=3)]
    bound, free = sampled(logits, states).logprobs
    expected = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert bound.logprob == pytest.approx(float(expected[0, 7]), abs=1e-5)
    assert list(bound.top_ids) == np.argsort(-expected[0])[:3].tolist()
    assert list(free.top_ids) == np.argsort(-expected[1])[:3].tolist()


def test_what_fails_while_masks_are_filled_is_raised_where_they_are_used() -> None:
    with pytest.raises(RuntimeError, match="broken"):
        sampled(np.zeros((1, 97), dtype=np.float32), [state(97, set())])


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
        def fill(self, masks: Any, row: int, begin: float) -> float:
            start = monotonic()
            while not (self.error and go_on.is_set()) and monotonic() - start < 10:
                pass
            return super().fill(masks, row, begin)

    stuck: Any = Stuck({1})
    states = [state(97, {7}), state(97, None), state(97, {8})]
    assert states[1].matcher is None
    states[1].keep_to(stuck)
    batch, filler = SamplingBatch(states), MaskFiller()
    logits = np.tile(np.arange(97, dtype=np.float32), (3, 1))
    masks = TokenMasks(batch.matchers, 97, filler)
    tokens = sample(logits, batch, None, masks).wait().token_ids.tolist()
    assert tokens == [7, 96, 8]
    assert "take more than 0.02 s" in stuck.error
    states = [state(97, {3})]
    batch = SamplingBatch(states)  # the next step has another thread
    masks = TokenMasks(batch.matchers, 97, filler)
    assert sample(logits[:1], batch, None, masks).wait().token_ids.tolist() == [3]
    go_on.set()


class Meeting(FakeMatcher):
    """Its mask needs another thread that fills one at the same time."""

    def __init__(self, allowed: set[int], barrier: Barrier) -> None:
        super().__init__(allowed)
        self._barrier = barrier

    def fill(self, masks: Any, row: int, begin: float) -> float:
        self._barrier.wait()
        return super().fill(masks, row, begin)


def bits_of(filling: Any) -> list[set[int]]:
    rows = np.unpackbits(filling.result().view(np.uint8), axis=1, bitorder="little")
    return [set(np.flatnonzero(row).tolist()) for row in rows]


def test_many_rows_are_filled_by_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "usable_threads", lambda: 2)
    barrier = Barrier(2, timeout=20)
    matchers: list[Any] = [Meeting({row}, barrier) for row in range(64)]
    assert bits_of(MaskFiller().fill(matchers, 3)) == [{row} for row in range(64)]


@pytest.mark.parametrize(("num_rows", "num_threads"), [(1, 1), (31, 1), (32, 2), (64, 4), (999, 4)])
def test_few_rows_are_filled_by_one_thread(
    num_rows: int, num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "usable_threads", lambda: 4)
    threads = set()

    class Seen(FakeMatcher):
        def fill(self, masks: Any, row: int, begin: float) -> float:
            threads.add(get_ident())
            return super().fill(masks, row, begin)

    matchers: list[Any] = [Seen({row % 97}) for row in range(num_rows)]
    assert bits_of(MaskFiller().fill(matchers, 4)) == [{row % 97} for row in range(num_rows)]
    assert len(threads) == num_threads


def test_no_matcher_is_used_by_two_threads_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a step is begun before the masks of the one before are filled."""
    monkeypatch.setattr(structured, "usable_threads", lambda: 4)

    class Alone(FakeMatcher):
        def __init__(self, allowed: set[int]) -> None:
            super().__init__(allowed)
            self._lock = Lock()

        def fill(self, masks: Any, row: int, begin: float) -> float:
            assert self._lock.acquire(blocking=False)
            sleep(0.0005)
            end = super().fill(masks, row, begin)
            self._lock.release()
            return end

    matchers: list[Any] = [Alone({row % 97}) for row in range(100)]
    filler, chance = MaskFiller(), np.random.default_rng(0)
    fillings = []
    for _ in range(8):
        chosen = chance.permutation(100)[: chance.integers(1, 101)].tolist()
        fillings.append((chosen, filler.fill([matchers[at] for at in chosen], 4)))
    for chosen, filling in fillings:
        assert bits_of(filling) == [{at % 97} for at in chosen]


def test_a_stuck_row_of_many_costs_no_other_its_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "usable_threads", lambda: 4)
    monkeypatch.setattr(structured, "_LONGEST_MASK", 0.02)
    monkeypatch.setattr(structured, "_LOOKS_EVERY", 0.005)
    go_on = Event()

    late = Barrier(4, timeout=20)

    class Stuck(FakeMatcher):
        def fill(self, masks: Any, row: int, begin: float) -> float:
            if self.error:
                masks[row] = -1
                return begin
            start = monotonic()
            while not go_on.is_set() and monotonic() - start < 10:
                pass
            masks[row] = 0
            late.wait()
            return thread_time()

    matchers: list[Any] = [
        Stuck({0}) if row in (5, 40, 63) else FakeMatcher({row}) for row in range(64)
    ]
    filler, everything = MaskFiller(), set(range(96))
    filling = filler.fill(matchers, 3)
    bits = filling.result()
    for _ in range(2):  # the second time they are known to be stuck
        for row, (matcher, allowed) in enumerate(zip(matchers, bits_of(filling), strict=True)):
            assert allowed == (everything if isinstance(matcher, Stuck) else {row})
            assert bool(matcher.error) == isinstance(matcher, Stuck)
        filling = filler.fill(matchers, 3)
    before = bits.copy()
    go_on.set()
    late.wait()
    assert np.array_equal(bits, before)


def compiled_grammar(
    grammar: str, tokenizer: Any = None, *, max_bases: int = 1, background: Any = None
) -> CompiledGrammar:
    vocabulary = tokenizer or llguidance.LLTokenizer("byte")
    return CompiledGrammar(
        lambda: llguidance.LLMatcher(vocabulary, grammar, log_level=0), max_bases, background
    )


def alone(matcher: TokenMatcher) -> Any:
    """The mask of a copy: int32 [V / 32]."""
    masks = np.zeros((1, 9), dtype=np.int32)
    matcher.ahead().fill(masks, 0, thread_time())
    return masks[0]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_masks_are_those_of_the_grammar_whoever_fills_them(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured, "usable_threads", lambda: num_threads)
    tokenizer = llguidance.LLTokenizer("byte")
    grammar = llguidance.LLMatcher.grammar_from_regex(r"([ab]{2,9}|c[0-9]+d?)*")
    compiled, num_words = compiled_grammar(grammar, tokenizer), 9
    matchers = [compiled.matcher() for _ in range(70)]
    chance, filler = np.random.default_rng(0), MaskFiller()
    for _ in range(5):
        bits = filler.fill(matchers, num_words).result()
        for row, matcher in enumerate(matchers):
            assert np.array_equal(alone(matcher), bits[row])
            allowed = np.flatnonzero(np.unpackbits(bits[row].view(np.uint8), bitorder="little"))
            matcher.append(int(chance.choice(allowed[allowed < 256])))


@pytest.mark.parametrize("width", [1, 31, 64, 97, 128, 200])
def test_a_device_unpacks_masks_as_the_host_does(width: int) -> None:
    pytest.importorskip("torch", reason="tensors are masked on devices")
    from pyengine.sampling.operations import operations_of

    rng = np.random.default_rng(width)
    bits = rng.integers(-(2**31), 2**31, (3, 4), dtype=np.int64).astype(np.int32)
    logits = np.zeros((5, width), dtype=np.float32)
    for rows in (np.array([0, 2, 3]), np.arange(3)):
        few = logits[: max(3, rows[-1] + 1)]
        on_host = operations_of(few).forbid(few, rows, bits, to_copy=True)
        tensor = tensor_of(few)
        on_device = operations_of(tensor).forbid(tensor, rows, bits, to_copy=True)
        assert (on_device.numpy() == on_host).all()
        assert not np.isfinite(on_host[rows, 128:]).any()
        assert not logits.any()


def test_a_matcher_walks_drafts_and_stays_where_it_is() -> None:
    grammar = llguidance.LLMatcher.grammar_from_regex("ab(c|d)e")
    matcher = compiled_grammar(grammar).matcher()
    a, b, c, x, e = b"abcxe"
    for drafts, count in (([a, b, c], 3), ([a, b, x, e], 2), ([x], 0), ([], 0)):
        assert matcher.num_allowed(drafts) == count
    assert matcher.num_allowed([a, b, c, e]) == 3, "what ends the answer leaves nothing to follow"
    ahead = matcher.ahead()
    ahead.append(a)
    assert (ahead.num_allowed([b]), matcher.num_allowed([b]), matcher.num_allowed([a])) == (1, 0, 1)
    ahead.fill(np.zeros((1, 9), dtype=np.int32), 0, thread_time())
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
        matcher = compiled_grammar(grammar, tokenizer).matcher()
        for _ in range(12):
            mask = alone(matcher)
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
            said = np.array([matcher.may_come(token) for token in range(len(bits))])
            assert not (said & (bits == 0)).any()
            assert set(np.flatnonzero(~said & (bits == 1))) <= {tokenizer.eos_token}
            if matcher.is_finished:
                break
            matcher.append(int(chance.choice(np.flatnonzero(bits))))


class Queue:
    """An executor whose tasks run when the test says so."""

    def __init__(self) -> None:
        self.tasks: list[Any] = []

    def submit(self, task: Any) -> None:
        self.tasks.append(task)

    def run(self) -> None:
        for task in self.tasks:
            task()
        self.tasks.clear()


REGEX = llguidance.LLMatcher.grammar_from_regex(r"([ab]{2,9}|c[0-9]+d?)*")
LARK = llguidance.LLMatcher.grammar_from_lark('start: "x" start "y" | /[0-9]{1,30}/')
SCHEMA = llguidance.LLMatcher.grammar_from_json_schema({"type": "array", "items": {"enum": [1]}})


def test_many_matchers_of_a_grammar_are_dealt_to_several_bases() -> None:
    queue = Queue()
    compiled = compiled_grammar(REGEX, max_bases=2, background=queue)
    matchers = [compiled.matcher() for _ in range(MIN_ROWS)]
    assert not queue.tasks, "few matchers have one base"
    matchers += [compiled.matcher() for _ in range(20)]
    assert len({matcher.base for matcher in matchers}) == len(queue.tasks) == 1
    queue.run()
    matchers += [matchers[0].sibling() for _ in range(40)]
    assert by_base(matchers) == [38, 38]
    del matchers[:20]  # of the first base
    matchers += [compiled.matcher() for _ in range(20)]
    assert by_base(matchers) == [38, 38]
    assert not queue.tasks, "one base for each thread"


def by_base(matchers: list[TokenMatcher]) -> list[int]:
    return sorted(Counter(matcher.base for matcher in matchers).values())


@pytest.mark.parametrize("reason", ["one thread", "slow to compile", "fails the second time"])
def test_a_grammar_keeps_its_only_base(reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer, grammars = llguidance.LLTokenizer("byte"), [REGEX]
    if reason == "slow to compile":
        monkeypatch.setattr(structured, "_QUICK", 0.0)
    queue: Any = Queue()
    compiled = CompiledGrammar(
        lambda: llguidance.LLMatcher(tokenizer, grammars[-1], log_level=0),
        1 if reason == "one thread" else 2,
        queue,
    )
    if reason == "fails the second time":
        grammars.append("start: nowhere")
    matchers = []
    for _ in range(3):
        matchers += [compiled.matcher() for _ in range(30)]
        queue.run()
    assert by_base(matchers) == [90]
    assert not any(matcher.error for matcher in matchers)


def test_rows_of_one_base_are_filled_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And the others take about equal time."""
    monkeypatch.setattr(structured, "usable_threads", lambda: 2)
    threads: dict[object, set[int]] = {}

    class Seen(FakeMatcher):
        def __init__(self, row: int, base: object, seconds: float) -> None:
            super().__init__({row})
            self.base, self.seconds_per_mask = base, seconds

        def fill(self, masks: Any, row: int, begin: float) -> float:
            threads.setdefault(self.base, set()).add(get_ident())
            return super().fill(masks, row, begin)

    slow, quick = 3e-4, 1e-5
    bases = [("a", slow), ("b", quick), ("c", slow), ("d", quick)]
    matchers: list[Any] = [Seen(row, *bases[row % 4]) for row in range(64)]
    filler = MaskFiller()
    for rows in ([*range(64)], [*range(63, -1, -1)]):
        filling = filler.fill([matchers[row] for row in rows], 2)
        assert bits_of(filling) == [{row} for row in rows]
        [first], [second] = threads["a"], threads["c"]
        assert first != second
        assert threads["b"] != threads["d"]
        threads.clear()
    assert bits_of(filler.fill(matchers[::4] * 2, 2)) == [{row} for row in range(0, 64, 4)] * 2
    assert len(threads["a"]) == 1, "a second thread would only wait"


def test_masks_of_many_bases_are_those_of_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """For mixed grammars, while rows end and begin; one row fails."""
    monkeypatch.setattr(structured, "usable_threads", lambda: 3)
    chance, filler, queue = np.random.default_rng(0), MaskFiller(), Queue()
    several = [
        compiled_grammar(text, max_bases=3, background=queue) for text in (REGEX, LARK, SCHEMA)
    ]
    rows: list[TokenMatcher] = []
    num_threads, bases = 0, set()
    for _ in range(12):
        chance.shuffle(rows)  # type: ignore[arg-type]
        del rows[: chance.integers(0, 40)]
        rows += [several[at].matcher() for at in chance.integers(0, 3, 200 - len(rows))]
        queue.run()
        expected = [alone(matcher) for matcher in rows]
        failing = rows[int(chance.integers(0, len(rows)))]
        failing.append(ord("!"))
        assert failing.error
        filling = filler.fill(rows, 9)
        num_threads, bases = len(filler._latest), bases | {matcher.base for matcher in rows}
        for matcher, bits, mask in zip(rows, filling.result(), expected, strict=True):
            assert np.array_equal(bits, np.full(9, -1) if matcher is failing else mask)
            assert bool(matcher.error) == (matcher is failing)
        rows.remove(failing)
        for matcher, mask in zip(rows, (alone(matcher) for matcher in rows), strict=True):
            allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
            matcher.append(int(chance.choice(allowed)))
        rows = [matcher for matcher in rows if not matcher.is_finished]
    assert num_threads == 3
    assert len(bases) == 9
