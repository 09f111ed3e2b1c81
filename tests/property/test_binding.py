"""Random operations through Python against an oracle of contents.

After every one, each position that a block table or a pin leads to must hold the KV of exactly
its tokens, whatever was shared, merged, taken over, evicted, loaded or rolled back before.
`KV_OPS=200000` for a long run.
"""

import os
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

from pyengine.kv_cache import (
    BlockManager,
    ConfigError,
    Evicted,
    Loading,
    NoBudget,
    NoRoom,
    Pin,
    PinError,
    PlanError,
    Prefilled,
    StepPlan,
    Transfer,
)
from tests.support.kv_oracle import (
    Chain,
    ExpectedEntry,
    ExpectedPin,
    ExpectedSequence,
    ExpectedTransfer,
    KVOracle,
)

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
MAX_TRANSFERS = 3
MAX_EVICTED = 2
NUM_OPERATIONS = int(os.environ.get("KV_OPS", "16000"))


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
            keep_evicted=True,
            hash_seed=1,
        )
        self.block_size, self.is_caching = block_size, prefix_caching
        self.kv = KVOracle(block_size, num_blocks)
        self.live: list[ExpectedSequence] = []
        self.pins: list[ExpectedPin] = []
        self.transfers: list[ExpectedTransfer] = []
        self.evicted: list[tuple[Pin, list[int], list[Chain]]] = []
        """Blocks that were evicted ahead and are being copied."""
        self.hashes: dict[Chain, bytes] = {}
        self.transfer_stats = dict.fromkeys(
            ("reserved_blocks", "restored_blocks", "failed_transfers"), 0
        )
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
    @rule(
        tokens=TOKENS, namespace=NAMESPACES, read_cache=st.sampled_from([True, True, True, False])
    )
    def add(self, tokens: list[int], namespace: bytes, read_cache: bool) -> None:
        handle = self.manager.sequence(tokens, namespace=namespace, read_cache=read_cache)
        self.live.append(ExpectedSequence([handle], namespace, list(tokens), read_cache=read_cache))

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

    # ---- transfers

    def prefix_of(self, expected: ExpectedSequence, rows: int) -> Chain:
        return expected.namespace, tuple(expected.tokens[: rows * self.block_size])

    def loads_at(self, expected: ExpectedSequence, row: int) -> list[ExpectedTransfer]:
        """The transfers that are to fill this block of a sequence: none or one."""
        if (row + 1) * self.block_size > len(expected.tokens):
            return []
        chain = self.prefix_of(expected, row + 1)
        found = [
            each
            for each in self.transfers
            if not each.is_abandoned
            and each.first <= row < each.first + len(each.blocks)
            and (each.namespace, tuple(each.tokens[: len(chain[1])])) == chain
        ]
        assert len(found) <= 1
        return found

    def may_wait(self, expected: ExpectedSequence, before: tuple[int, list[int]]) -> bool:
        """True if it certainly looks into the cache from where it is."""
        computed, table = before
        is_at_boundary = computed == len(table) * self.block_size
        has_collisions = self.manager.stats().collisions > 0
        return self.is_caching and expected.read_cache and is_at_boundary and not has_collisions

    def assert_awaits(self, answer: Loading, expected: ExpectedSequence, rows: range) -> None:
        """The answer names a transfer that is to fill one of these blocks."""
        loads = [each for row in rows for each in self.loads_at(expected, row)]
        assert answer.transfer in [each.handle.id for each in loads]

    @precondition(lambda self: self.live and len(self.transfers) < MAX_TRANSFERS)
    @rule(pick=PICK, less=st.sampled_from([0, 0, 0, 1, 3, 9]))
    def reserve(self, pick: int, less: int) -> None:
        expected = self.live[pick % len(self.live)]
        handle, size = expected.handle, self.block_size
        num_tokens = max(len(expected.tokens) + 1 - less, 0)
        if self.in_plan(expected):
            try:
                handle.reserve(num_tokens)
            except PlanError:
                return
            raise AssertionError
        with self.manager.match_prefix(expected.tokens, namespace=expected.namespace) as pin:
            cached = pin.blocks
        before, first = self.manager.usage(), max(len(cached), len(expected.table))
        holds = [*expected.table, *cached[len(expected.table) :]]
        states = [self.manager.state(block) for block in range(self.manager.num_blocks)]
        may_wait = self.may_wait(expected, (expected.computed, expected.table))
        whole = min(num_tokens, len(expected.tokens)) // size
        answer = handle.reserve(num_tokens)
        if isinstance(answer, Transfer):
            end = next((row for row in range(first, whole) if self.loads_at(expected, row)), whole)
            assert self.is_caching and expected.read_cache
            assert (answer.first_index, answer.num_blocks) == (first, end - first)
            assert [(row, group) for row, group, _ in answer.blocks] == [
                (row, 0) for row in range(first, end)
            ]
            blocks = [block for _, _, block in answer.blocks]
            assert all(states[block] in ("free", "evictable") for block in blocks)
            assert not {*holds} & {*blocks}
            self.transfer_stats["reserved_blocks"] += len(blocks)
            namespace, tokens = expected.namespace, expected.tokens[: end * size]
            self.transfers.append(
                ExpectedTransfer([answer], expected, namespace, tokens, first, blocks, holds)
            )
            self.check_evicted(self.manager.take_evicted())
            return
        assert self.manager.usage() == before
        if isinstance(answer, NoRoom):
            assert answer.needed > answer.available == before.available
        elif isinstance(answer, Loading):
            self.assert_awaits(answer, expected, range(first, first + 1))
        else:
            assert answer is None
            assert not may_wait or whole <= first

    @precondition(lambda self: self.transfers)
    @rule(pick=PICK, missing=st.sampled_from([0, 0, 1, 2, 9]))
    def complete(self, pick: int, missing: int) -> None:
        transfer = self.transfers.pop(pick % len(self.transfers))
        expected, size = transfer.expected, self.block_size
        num_blocks = max(len(transfer.blocks) - missing, 0)
        try:
            transfer.handle.complete([(transfer.first, 0, self.manager.num_blocks)])
        except ConfigError:
            pass
        else:
            raise AssertionError
        self.kv.load(transfer, num_blocks)
        filled = transfer.handle.blocks[:num_blocks]
        assert transfer.handle.restored_tokens(filled) == num_blocks * size
        reused = transfer.handle.complete(filled[::-1])  # in any order
        self.count_end(transfer, num_blocks)
        is_restored = num_blocks > 0 and not transfer.is_abandoned
        end = transfer.first + num_blocks
        if is_restored:
            with self.manager.match_prefix(
                transfer.tokens[: end * size], namespace=transfer.namespace
            ) as pin:
                assert len(pin.blocks) == end
        if expected.held and is_restored and not self.in_plan(expected):
            before = expected.computed, expected.table
            expected.table = expected.handle.block_table
            expected.computed = expected.handle.num_computed_tokens
            assert expected.table[: len(before[1])] == before[1]
            assert reused == expected.computed - before[0]
            if self.may_wait(expected, before):
                assert expected.computed >= min(end * size, len(expected.tokens) - 1)
        else:
            assert reused == 0
        for call in (transfer.handle.complete, transfer.handle.fail, transfer.handle.abandon):
            try:
                call()
            except PlanError:
                continue
            raise AssertionError

    @precondition(lambda self: self.live and len(self.transfers) < MAX_TRANSFERS)
    @rule(pick=PICK, missing=st.sampled_from([0, 1]))
    def load(self, pick: int, missing: int) -> None:
        before = len(self.transfers)
        self.reserve(pick, 0)
        if len(self.transfers) > before:
            self.complete(before, missing)

    @precondition(lambda self: self.transfers)
    @rule(pick=PICK, forget=st.booleans())
    def fail(self, pick: int, forget: bool) -> None:
        transfer = self.transfers.pop(pick % len(self.transfers))
        self.kv.load(transfer, 0)
        if not forget:
            transfer.handle.fail()
        transfer.held.clear()
        self.count_end(transfer, 0)

    def count_end(self, transfer: ExpectedTransfer, num_blocks: int) -> None:
        restored = 0 if transfer.is_abandoned else num_blocks
        self.transfer_stats["restored_blocks"] += restored
        self.transfer_stats["failed_transfers"] += restored == 0

    @precondition(lambda self: self.transfers)
    @rule(pick=PICK)
    def abandon(self, pick: int) -> None:
        transfer = self.transfers[pick % len(self.transfers)]
        transfer.handle.abandon()
        transfer.is_abandoned, transfer.holds = True, []

    @precondition(lambda self: len(self.evicted) < MAX_EVICTED)
    @rule(count=st.integers(0, 4))
    def evict_ahead(self, count: int) -> None:
        evictable = self.manager.usage().evictable
        records, pin = self.manager.evict(count)
        blocks = pin.blocks
        assert len(blocks) == min(count, evictable)
        assert {record.block for record in records} <= {*blocks}
        self.check_evicted(records)
        self.evicted.append((pin, blocks, [self.kv.chain_of(block) for block in blocks]))

    @precondition(lambda self: self.evicted)
    @rule(forget=st.booleans())
    def drop_evicted(self, forget: bool) -> None:
        pin, *_ = self.evicted.pop(0)
        if not forget:
            pin.release()

    def check_evicted(self, records: list[Evicted]) -> None:
        """Their KV is whole, and each prefix has one hash."""
        for record in records:
            namespace, tokens = chain = self.kv.chain_of(record.block)
            before = tokens[: len(tokens) - self.block_size]
            assert (record.group, record.namespace) == (0, namespace)
            assert record.tokens == list(tokens[len(before) :])
            assert self.hashes.setdefault(chain, record.hash) == record.hash
            if record.parent is None:
                assert not before or self.manager.stats().collisions > 0
            else:
                parent = self.hashes.setdefault((namespace, before), record.parent)
                assert parent == record.parent

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
    @rule(pick=PICK, most=st.integers(0, 20), spare=st.sampled_from([None, None, 0, 2]))
    def prefill(self, pick: int, most: int, spare: int | None) -> None:
        candidates = self.evictable_sequences()
        self.plan_prefill(candidates[pick % len(candidates)], most, spare)

    def plan_prefill(self, expected: ExpectedSequence, most: int, spare: int | None) -> None:
        plan = self.begun(40)
        before, left = (expected.computed, expected.table), plan.budget_left
        copied = len(plan.copies())
        answer = plan.prefill(expected.handle, most, spare_blocks=spare)
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
            assert not self.may_wait(expected, before) or not self.loads_at(
                expected, start // self.block_size
            )
        elif isinstance(answer, NoRoom):
            assert answer.needed > answer.available == self.manager.usage().available
        elif isinstance(answer, Loading):
            assert expected.read_cache
            self.assert_awaits(answer, expected, range(len(before[1]), len(expected.tokens)))
        else:
            assert isinstance(answer, NoBudget)
            assert min(most, left) == 0
        self.check_evicted(self.manager.take_evicted())
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
        self.check_evicted(self.manager.take_evicted())

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
        for pin, blocks, chains in self.evicted:
            assert pin.blocks == blocks
            assert [self.kv.chain_of(block) for block in blocks] == chains
        self.check_evicted(manager.take_evicted())
        self.counters_agree()

    def counters_agree(self) -> None:
        dropped = [e.expected for e in self.entries if not e.expected.held]
        in_tables = Counter(
            block for expected in [*self.live, *dropped] for block in expected.table
        )
        loading = {block for each in self.transfers for block in each.blocks}
        held = [*(block for kept in self.pins for block in kept.blocks), *self.sources, *loading]
        held += [block for _, blocks, _ in self.evicted for block in blocks]
        held += [block for each in self.transfers for block in each.holds]
        in_pins = Counter(held)
        states: Counter[str] = Counter()
        for block in range(self.manager.num_blocks):
            assert self.manager.seq_refs(block) == in_tables[block]
            assert self.manager.refs(block) == in_tables[block] + in_pins[block]
            state = self.manager.state(block)
            states[state] += 1
            assert (state == "active") == (in_tables[block] > 0)
            assert (state == "loading") == (block in loading)
            is_pinned = in_pins[block] > 0 == in_tables[block] and block not in loading
            assert (state == "pinned") == is_pinned
        now = self.manager.usage()
        assert states == Counter(
            free=now.free,
            evictable=now.evictable,
            active=now.active,
            pinned=now.pinned,
            loading=now.loading,
        )
        for expected in self.live:
            alone = [b for b in expected.table if in_tables[b] + in_pins[b] == 1]
            assert self.manager.preview(expected.handle) == len(alone)
        stats = self.manager.stats().as_dict()
        assert all(stats[name] >= count for name, count in self.last_stats.items())
        self.last_stats = stats
        assert self.transfer_stats.items() <= stats.items()

    def teardown(self) -> None:
        if not hasattr(self, "manager"):
            return
        self.plan, self.entries, self.sources = None, [], []
        self.live.clear()
        self.pins.clear()
        self.transfers.clear()
        self.evicted.clear()
        now = self.manager.usage()
        assert (now.active, now.pinned, now.loading) == (0, 0, 0)
        self.manager.check()


Binding.TestCase.settings = settings(max_examples=NUM_OPERATIONS // 40, stateful_step_count=40)
TestBinding = Binding.TestCase
