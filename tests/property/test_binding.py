"""Random operations through Python against an oracle of contents.

After every one, each position that a block table or a pin leads to must hold the KV of exactly
its tokens, whatever was shared, merged, taken over, evicted or rolled back before.
"""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from pyengine.kv_cache import BlockManager, NoBudget, NoRoom, Pin, PinError, Prefilled, StepPlan
from tests.support.kv_oracle import ExpectedEntry, ExpectedPin, ExpectedSequence, KVOracle

# Few families of prompts, so that most have a prefix in common with some other.
TOKENS = st.builds(
    lambda first, count, tail: [first] * count + tail,
    st.integers(0, 1),
    st.integers(1, 9),
    st.lists(st.integers(0, 1), max_size=4),
)
NAMESPACES = st.sampled_from([b"", b"", b"x"])
PICK = st.integers(0, 10**6)
SAMPLED = st.integers(0, 2**32 - 1)
"""Sampled tokens, one bit each."""
MAX_TOKENS = 24
MAX_LIVE = 8


class Binding(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(3, 16),
        block_size=st.integers(1, 4),
        hash_bits=st.sampled_from([128, 128, 2, 0]),
        prefix_caching=st.sampled_from([True, True, True, False]),
        prompts=st.lists(TOKENS, min_size=2, max_size=4),
    )
    def pool(
        self,
        num_blocks: int,
        block_size: int,
        hash_bits: int,
        prefix_caching: bool,
        prompts: list[list[int]],
    ) -> None:
        self.manager = BlockManager(
            num_blocks,
            block_size,
            hash_bits=hash_bits,
            prefix_caching=prefix_caching,
            in_flight_sharing=False,  # this oracle looks at the KV when a block is reused
            hash_seed=1,
        )
        self.block_size = block_size
        self.kv = KVOracle(block_size, num_blocks)
        self.live: list[ExpectedSequence] = []
        self.pins: list[ExpectedPin] = []
        self.plan: StepPlan | None = None
        self.entries: list[ExpectedEntry] = []
        self.sources: list[int] = []
        self.last_stats: dict[str, int] = {}
        for tokens in prompts:
            self.add(tokens, b"", True)

    def in_plan(self, expected: ExpectedSequence) -> bool:
        return any(entry.expected is expected for entry in self.entries)

    def evictable_sequences(self) -> list[ExpectedSequence]:
        return [expected for expected in self.live if not self.in_plan(expected)]

    # ---- sequences and pins

    @precondition(lambda self: len(self.live) < MAX_LIVE)
    @rule(tokens=TOKENS, namespace=NAMESPACES, read_cache=st.booleans())
    def add(self, tokens: list[int], namespace: bytes, read_cache: bool) -> None:
        handle = self.manager.sequence(tokens, namespace=namespace, read_cache=read_cache)
        self.live.append(ExpectedSequence([handle], namespace, list(tokens)))

    @precondition(lambda self: self.live)
    @rule(pick=PICK, forget=st.booleans())
    def end(self, pick: int, forget: bool) -> None:
        expected = self.live.pop(pick % len(self.live))
        if not self.in_plan(expected):
            available, promised = (
                self.manager.usage().available,
                self.manager.preview(expected.handle),
            )
        if not forget:
            expected.handle.free()
            assert not expected.handle.is_live
        expected.held.clear()
        if not self.in_plan(expected):
            assert self.manager.usage().available == available + promised

    @precondition(lambda self: self.evictable_sequences())
    @rule(pick=PICK)
    def reset(self, pick: int) -> None:
        candidates = self.evictable_sequences()
        expected = candidates[pick % len(candidates)]
        expected.handle.reset()
        expected.computed, expected.table = 0, []

    @rule(tokens=TOKENS, namespace=NAMESPACES)
    def match(self, tokens: list[int], namespace: bytes) -> None:
        pin = self.manager.match_prefix(tokens, namespace=namespace)
        self.keep(pin, namespace, tokens)

    @precondition(lambda self: self.live)
    @rule(pick=PICK)
    def pin(self, pick: int) -> None:
        expected = self.live[pick % len(self.live)]
        self.keep(expected.handle.pin(), expected.namespace, expected.tokens)

    def keep(self, pin: Pin, namespace: bytes, tokens: list[int]) -> None:
        assert pin.num_tokens == len(pin.blocks) * self.block_size <= len(tokens)
        self.pins.append(ExpectedPin(pin, namespace, tokens[: pin.num_tokens], pin.blocks))

    @precondition(lambda self: self.pins)
    @rule(pick=PICK, forget=st.booleans())
    def drop_pin(self, pick: int, forget: bool) -> None:
        kept = self.pins.pop(pick % len(self.pins))
        if not forget:
            kept.handle.release()

    @precondition(lambda self: self.pins and any(not s.table for s in self.evictable_sequences()))
    @rule(pick=PICK, which=PICK)
    def attach(self, pick: int, which: int) -> None:
        candidates = [expected for expected in self.evictable_sequences() if not expected.table]
        expected, kept = candidates[pick % len(candidates)], self.pins[which % len(self.pins)]
        covered = len(kept.tokens)
        fits = expected.tokens[:covered] == kept.tokens
        fits = not kept.blocks or (fits and expected.namespace == kept.namespace)
        try:
            expected.handle.attach(kept.handle)
        except PinError:
            assert not fits
            return
        assert fits
        expected.table, expected.computed = kept.blocks, min(covered, len(expected.tokens) - 1)

    @rule()
    def evict(self) -> None:
        evictable = self.manager.usage().evictable
        assert self.manager.evict_all() == evictable
        assert self.manager.usage().evictable == 0

    # ---- steps

    def begun(self, budget: int) -> StepPlan:
        """The open plan, or a new one."""
        if self.plan is None:
            self.plan = self.manager.begin_step(budget)
        return self.plan

    @precondition(lambda self: self.evictable_sequences())
    @rule(budget=st.sampled_from([5, 60]), first=PICK, sampled=SAMPLED)
    def step(self, budget: int, first: int, sampled: int) -> None:
        self.begun(budget)
        for expected in self.evictable_sequences():
            self.plan_prefill(expected, first % 7 + 1, None)
        self.commit(sampled)

    @precondition(lambda self: self.evictable_sequences())
    @rule(pick=PICK, most=st.integers(0, 20), reserve=st.sampled_from([None, None, 0, 2]))
    def prefill(self, pick: int, most: int, reserve: int | None) -> None:
        candidates = self.evictable_sequences()
        self.plan_prefill(candidates[pick % len(candidates)], most, reserve)

    def plan_prefill(self, expected: ExpectedSequence, most: int, reserve: int | None) -> None:
        plan = self.begun(40)
        before, left = (expected.computed, expected.table), plan.budget_left
        copied = len(plan.copies())
        answer = plan.prefill(expected.handle, most, reserve=reserve)
        copies_added = plan.copies()[copied:]
        self.sources += [source for source, _ in copies_added]  # held until the plan is closed
        if isinstance(answer, Prefilled):
            start = expected.computed + answer.num_cached_tokens
            entry = ExpectedEntry(expected, start, answer.num_tokens, before)
            assert 0 < entry.length <= min(most, left)
            assert entry.samples == answer.samples
            expected.table = expected.handle.block_table
            assert len(expected.table) == max(len(before[1]), -(-entry.end // self.block_size))
            assert len(copies_added) <= (start % self.block_size > 0)
            sources = {copy: source for source, copy in copies_added}
            self.kv.assert_holds(expected, [sources.get(b, b) for b in expected.table], start)
            self.entries.append(entry)
        elif isinstance(answer, NoRoom):
            assert answer.needed > answer.available == self.manager.usage().available
        else:
            assert isinstance(answer, NoBudget)
            assert min(most, left) == 0
        spent = answer.num_tokens if isinstance(answer, Prefilled) else 0
        assert plan.budget_left == left - spent

    @rule(pick=PICK)
    def decode(self, pick: int) -> None:
        plan = self.begun(40)
        ready = [s for s in self.evictable_sequences() if len(s.tokens) - s.computed == 1]
        ready = ready[pick % (len(ready) + 1) :]
        left, available = plan.budget_left, self.manager.usage().available
        rejected = plan.decode([expected.handle for expected in ready])
        for position, expected in enumerate(ready):
            grows = expected.computed // self.block_size >= len(expected.table)
            fits = left > 0 and (not grows or available > 0)
            assert fits == (position not in rejected)
            if fits:
                left, available = left - 1, available - grows
                before = (expected.computed, expected.table)
                self.entries.append(ExpectedEntry(expected, expected.computed, 1, before))
                expected.table = expected.handle.block_table

    def undo(self, entry: ExpectedEntry) -> None:
        entry.expected.computed, entry.expected.table = entry.before

    @precondition(lambda self: any(entry.expected.held for entry in self.entries))
    @rule(pick=PICK)
    def cancel(self, pick: int) -> None:
        assert self.plan is not None
        candidates = [entry for entry in self.entries if entry.expected.held]
        entry = candidates[pick % len(candidates)]
        self.plan.cancel(entry.expected.handle)
        self.entries.remove(entry)
        self.undo(entry)

    @precondition(lambda self: self.entries)
    @rule(executed=st.booleans(), forget=st.booleans())
    def roll_back(self, executed: bool, forget: bool) -> None:
        assert self.plan is not None
        if executed:
            self.kv.execute(self.plan, self.entries)
        if not forget:
            self.plan.rollback()
        self.plan, self.sources = None, []
        for entry in self.entries:
            self.undo(entry)
        self.entries = []

    @precondition(lambda self: self.entries)
    @rule(sampled=SAMPLED)
    def commit(self, sampled: int) -> None:
        assert self.plan is not None
        self.kv.execute(self.plan, self.entries)
        sequences = {
            entry.expected.handle.id: entry.expected
            for entry in self.entries
            if entry.expected.held
        }
        tokens = [sampled >> bit & 1 for bit in range(self.plan.num_samples)]
        for remapping in self.plan.commit(tokens):
            expected = sequences.get(remapping.sequence_id)
            if expected is None:
                continue  # a dropped one
            assert expected.table[remapping.index] == remapping.old_block != remapping.new_block
            expected.table = [*expected.table]
            expected.table[remapping.index] = remapping.new_block
        for entry in self.entries:
            entry.expected.computed = entry.end
            if entry.samples:
                entry.expected.tokens.append(tokens.pop(0))
        assert not tokens
        self.plan, self.entries, self.sources = None, [], []
        for expected in [s for s in self.live if len(s.tokens) > MAX_TOKENS]:
            self.live.remove(expected)

    # ---- what is true after every call

    @invariant()
    def everything_agrees(self) -> None:
        if not hasattr(self, "manager"):
            return
        manager = self.manager
        manager.check()
        for expected in self.live:
            handle = expected.handle
            assert handle.block_table == expected.table
            assert handle.tokens() == expected.tokens
            if not self.in_plan(expected):
                assert handle.num_computed_tokens == expected.computed
                self.kv.assert_holds(expected, expected.table, expected.computed)
        for kept in self.pins:
            assert kept.handle.blocks == kept.blocks
            self.kv.assert_holds(kept, kept.blocks, len(kept.tokens))
        self.counters_agree()

    def counters_agree(self) -> None:
        dropped = [e.expected for e in self.entries if not e.expected.held]
        in_tables = Counter(
            block for expected in [*self.live, *dropped] for block in expected.table
        )
        held = [*(block for kept in self.pins for block in kept.blocks), *self.sources]
        in_pins = Counter(held)
        states: Counter[str] = Counter()
        for block in range(self.manager.num_blocks):
            assert self.manager.seq_refs(block) == in_tables[block]
            assert self.manager.refs(block) == in_tables[block] + in_pins[block]
            state = self.manager.state(block)
            states[state] += 1
            assert (state == "active") == (in_tables[block] > 0)
            assert (state == "pinned") == (in_pins[block] > 0 == in_tables[block])
        now = self.manager.usage()
        assert states == Counter(
            free=now.free, evictable=now.evictable, active=now.active, pinned=now.pinned
        )
        for expected in self.live:
            alone = [b for b in expected.table if in_tables[b] + in_pins[b] == 1]
            assert self.manager.preview(expected.handle) == len(alone)
        stats = self.manager.stats().as_dict()
        assert all(stats[name] >= count for name, count in self.last_stats.items())
        self.last_stats = stats

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.plan, self.entries, self.sources = None, [], []
        self.live.clear()
        self.pins.clear()
        now = self.manager.usage()
        assert (now.active, now.pinned) == (0, 0)
        self.manager.check()


Binding.TestCase.settings = settings(max_examples=400, stateful_step_count=40)
TestBinding = Binding.TestCase
