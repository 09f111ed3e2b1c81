"""The blocks of vLLM's requests: a sequence for each, and its block table as the workers have it.

The workers' tables only grow, so they may still refer to a block that was merged into another one.
Such a block is allocated again at once (`RequestBlocks.keepers`) until the workers get the new
table (`merged_tables`) or the request ends.

A KV connector fills blocks from outside the pool. Its blocks are allocated with `Sequence.extend`
and registered with `Sequence.publish` once they are filled. Until then they are in no index, so no
request can match them, and they belong to their request until vLLM frees it. Transfers
(`Sequence.reserve`) do not fit vLLM's order of calls. A transfer has full blocks only, which are in
no block table, and it releases those that were not filled. vLLM needs the whole block table when a
load starts, with a partial last block. It computes further tokens in the step of a synchronous
load, and failed blocks in place. And two requests may load the same prefix.

With several groups of layers, or a sliding window, each group has a table over the same pool
(`Tables.windows`). Blocks are registered when a step is planned, and `Sequence.publish` releases
those that a window has passed at once. The step itself still reads them, so pins hold them until it
has ended (`RequestBlocks.guards`).

Groups of recurrent layers have tables of states (`vllm_states`), next to one group of full
attention.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pyengine.integrations.vllm_keys import EventWriter, PseudoTokens, namespace_of
from pyengine.integrations.vllm_states import Column, StateLayers
from pyengine.kv_cache import BlockManager, Extended, Pin, Remapping, Sequence, TokenError

NEVER = math.inf


@dataclass(slots=True)
class RequestBlocks:
    """The blocks of a request.

    `blocks` are the block tables of the workers, one for each layer group. In that of a window, 0
    stands for a block that it has passed; `passed` counts them. `states` are the tables of groups
    of recurrent layers, with the blocks of `columns` and 0 elsewhere. `published` tokens are in
    registered blocks, `known` tokens were passed to the sequence, `hit` tokens came from the cache.
    The blocks have slots for `capacity` tokens, and the next block is registered at `next_publish`
    tokens: `NEVER` during a load, and without `shares`. `loading` is true during an asynchronous
    load. The steps that compute the first `processed` tokens have ended. A guard `(end, pin)` holds
    blocks that windows have passed at `end`, until that many tokens are processed.
    """

    sequence: Sequence
    blocks: list[list[int]]
    published: int
    known: int
    hit: int
    capacity: int
    next_publish: float
    shares: bool
    loading: bool = False
    processed: int = 0
    guards: list[tuple[int, Pin]] = field(default_factory=list)
    passed: list[int] = field(default_factory=list)
    states: list[list[int]] = field(default_factory=list)
    columns: list[Column] = field(default_factory=list)
    keepers: list[Sequence] = field(default_factory=list)
    merges: list[tuple[int, int, int]] = field(default_factory=list)
    merged_in_step: int = 0

    def free(self) -> None:
        """Release all blocks."""
        self.free_merged()
        for _, pin in self.guards:
            pin.release()
        self.guards.clear()
        for column in self.columns:
            column.release()
        self.columns.clear()
        self.sequence.free()

    def free_merged(self) -> None:
        """Release the blocks that were merged into others."""
        for keeper in self.keepers:
            keeper.free()
        self.keepers.clear()


@dataclass(slots=True)
class Lookup:
    """The cached blocks of a request, held until it is admitted or the next look-up.

    The sequence has the first `known` tokens, and `blocks` by layer group. If all tokens are
    cached, `sources` are the last blocks, which must be copied, and `pin` pins them. Without
    `shares`, blocks are not registered either. `state` is the cached state at the end of the hit;
    without one, up to `attention_hit` tokens are cached for attention.
    """

    request_id: str
    sequence: Sequence
    known: int
    hit: int
    blocks: list[list[int]]
    shares: bool
    sources: list[int] = field(default_factory=list)
    pin: Pin | None = None
    state: Column | None = None
    attention_hit: int = 0

    def drop(self) -> None:
        """Release the blocks."""
        if self.state is not None:
            self.state.release()
        if self.pin is not None:
            self.pin.release()
        self.sequence.free()


@dataclass(frozen=True, slots=True)
class RequiredBlocks:
    """The needs of a request: blocks for all its tokens so far (`slots`), of which this step
    computes those from `start` to `end`; the tokens of the whole prompt (`whole`, or 0); and the
    end of the prefill. Further, blocks that must stay available: `spare` in any case, `reserved`
    for other requests.
    """

    start: int
    end: int
    slots: int
    whole: int
    prefill_end: int
    spare: int
    reserved: int


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """The layer groups of a model.

    `windows` has an entry for each group of attention layers: its window in tokens, or None for
    full attention. `caps` has the most blocks that vLLM's admission expects a request to hold at
    once, by group. `states` describes the groups of recurrent layers.
    """

    windows: tuple[int | None, ...] = (None,)
    caps: tuple[float, ...] = (math.inf,)
    states: StateLayers | None = None


class Tables:
    """The blocks of all requests, over one pool.

    Block 0 is vLLM's null block. With one group of full attention it is allocated at the start, so
    block ids are the same on both sides. Otherwise vLLM's ids are higher by one (`offset`).
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        caching: bool,
        events: bool = False,
        layers: LayerGroups = LayerGroups(),
    ) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.caching = caching
        self.windows, self.caps, self.state_layers = layers.windows, layers.caps, layers.states
        self.has_windows = any(self.windows)
        self.recurrent = layers.states.groups if layers.states else ()
        self.offset = 0 if self.windows == (None,) else 1
        spans = [self.blocks_of(window) for window in self.windows if window]
        self._stride = min(spans, default=0) * block_size
        self.kv = BlockManager(
            num_blocks - self.offset,
            block_size,
            groups=self.windows,
            prefix_caching=caching,
            partial_reuse=False,  # vLLM's runner does not execute `StepPlan.copies`
            events=events and caching,
            state_blocks=len(self.recurrent) if self.recurrent and caching else None,
        )
        if not self.offset:
            self._null = self.kv.sequence([0])
            self._null.extend(1)
        self.entries: dict[str, RequestBlocks] = {}
        self.images = PseudoTokens(block_size)
        self.adapter_ids: dict[str, int] = {}
        self.events: EventWriter | None = None
        self._lookup: Lookup | None = None
        self._due: dict[str, tuple[RequestBlocks, Any, int]] = {}
        self._copies: dict[str, tuple[list[tuple[int, int]], Pin]] = {}
        self._merged: dict[str, RequestBlocks] = {}
        self._fresh: set[int] = set()
        self._step = 0
        self._in_step = False

    def begin_step(self) -> None:
        """Start a step: delay publishing until the step's requests are final."""
        self._step += 1
        self._in_step = True
        self._fresh.clear()

    def end_step(self) -> None:
        """The requests of the step are final: publish their blocks."""
        self.publish_due()
        self.drop_lookup()
        self._in_step = False

    def blocks_of(self, num_tokens: int) -> int:
        """The number of blocks for `num_tokens` tokens."""
        return -(-num_tokens // self.block_size)

    def _ids(self, tables: list[list[int]]) -> list[list[int]]:
        """vLLM's ids of our blocks. Our null block has the id after the last one."""
        if not self.offset:
            return tables
        return [[(block + 1) % self.num_blocks for block in blocks] for blocks in tables]

    def all_tables(self, attention: list[list[int]], states: list[list[int]]) -> list[list[int]]:
        """The tables of all layer groups, in vLLM's order."""
        if not self.recurrent:
            return attention
        tables = attention.copy()
        for index, table in zip(self.recurrent, states, strict=True):
            tables.insert(index, table)
        return tables

    def seq_refs(self, block: int) -> int:
        """Requests that hold a block of vLLM's id."""
        return self.kv.seq_refs(block - self.offset) if block else 0

    # -- look-up ------------------------------------------------------------------------------

    def look_up(self, request: Any) -> Lookup:
        """Look up the cached blocks of a request: all but one token at most."""
        self.drop_lookup()
        self._lookup = self._search(request)
        return self._lookup

    def drop_lookup(self) -> None:
        """Release the blocks of the last look-up, if it was not used."""
        if self._lookup is not None:
            self._lookup.drop()
            self._lookup = None

    def _search(self, request: Any) -> Lookup:
        if self.state_layers is not None:
            return self._search_with_state(request, request.num_tokens)
        size, tokens = self.block_size, request.num_tokens
        sequence, shares = self._sequence(request, tokens)
        hit = sequence.reuse_cached()
        blocks = self._blocks(sequence, hit)
        if len(blocks[0]) * size == hit:
            return Lookup(request.request_id, sequence, tokens, hit, blocks, shares)
        # Every token is cached. The last token is computed again, which writes to the last blocks,
        # so these are copied: the sequence gets all tokens but the last.
        sources = [blocks_of_group[-1] for blocks_of_group in blocks]
        pin = None if not self._fresh.isdisjoint(sources) else sequence.pin()
        sequence.free()
        sequence, shares = self._sequence(request, tokens - 1)
        cached = sequence.reuse_cached()
        blocks = self._blocks(sequence, cached)
        lookup = Lookup(request.request_id, sequence, tokens - 1, cached, blocks, shares)
        if pin is not None and cached == hit // size * size:
            lookup.hit, lookup.sources, lookup.pin = hit, sources, pin
        elif pin is not None:  # an evicted block of a window is read by earlier tokens only
            pin.release()
        # Without a pin the block is not computed before this step has run.
        return lookup

    def blocks_of_lookup(self, lookup: Lookup) -> list[list[int]]:
        """The cached blocks of a look-up, for all layer groups."""
        if not self.recurrent:
            return lookup.blocks
        columns = [lookup.state] if lookup.state else []
        states = self._state_tables(columns, len(lookup.blocks[0]))
        return self.all_tables(lookup.blocks, states)

    def _search_with_state(self, request: Any, num_tokens: int) -> Lookup:
        """Look up the first tokens of a request: a hit ends at a state, before the last token."""
        sequence, shares = self._sequence(request, num_tokens)
        hit = sequence.reuse_cached()
        blocks = self._blocks(sequence, hit)
        lookup = Lookup(request.request_id, sequence, num_tokens, hit, blocks, shares)
        if hit:
            pin = sequence.pin()
            if pin.num_state_tokens != hit:
                raise RuntimeError(f"a hit of {hit} tokens, a state of {pin.num_state_tokens}")
            lookup.state = Column(hit // self.block_size - 1, hit, pin.state_blocks, pin)
        if shares and hit + self.block_size < num_tokens:
            tokens = self._tokens(request, 0, num_tokens - 1)
            with self.kv.match_prefix(tokens, namespace=namespace_of(request)) as prefix:
                lookup.attention_hit = prefix.num_tokens
        return lookup

    def _blocks(self, sequence: Sequence, num_cached: int) -> list[list[int]]:
        """The block tables of a sequence with this many cached tokens."""
        return self._ids(sequence.block_tables) if num_cached else [[] for _ in self.windows]

    def _sequence(self, request: Any, num_tokens: int) -> tuple[Sequence, bool]:
        """A sequence of the first tokens without blocks, and whether its blocks may be shared.

        They may not if they have no hash: without a cache, with embeddings instead of tokens, with
        no pseudo token left, or with an invalid token.
        """
        shares = self.caching or self.has_windows  # windows pass computed tokens
        if shares and num_tokens and request.prompt_embeds is None:
            if request.lora_request:
                adapter = request.lora_request
                self.adapter_ids[adapter.lora_name] = adapter.adapter_id
            read, space = not request.skip_reading_prefix_cache, namespace_of(request)
            with suppress(OverflowError, TokenError):
                tokens = self._tokens(request, 0, num_tokens)
                return self.kv.sequence(tokens, namespace=space, read_cache=read), True
        return self.kv.sequence([0], read_cache=False), False

    def _tokens(self, request: Any, start: int, end: int) -> list[int]:
        if request.mm_features:
            return self.images.tokens(request, start, end)
        tokens: list[int] = request._all_token_ids
        return tokens[start:end] if start or end < len(tokens) else tokens

    # -- slots --------------------------------------------------------------------------------

    def grow(self, entry: RequestBlocks, required: RequiredBlocks) -> list[list[int]] | None:
        """Allocate further blocks of a request; None and no change if the pool is full."""
        have = len(entry.blocks[0])
        new = self._extend(entry.sequence, required, have, entry.published, entry.columns)
        if new is None:
            return None
        if new[0]:
            for blocks, new_blocks in zip(entry.blocks, new, strict=True):
                blocks.extend(new_blocks)
            entry.capacity = len(entry.blocks[0]) * self.block_size
        return self.all_tables(new, self._begin_states(entry, required))

    def admit(
        self, request: Any, hit: int, required: RequiredBlocks, known: int, *, loads: bool
    ) -> list[list[int]] | None:
        """Allocate the first blocks of a request after its `hit` cached tokens.

        Returns None without a change if the pool is full. This step computes up to `known` tokens.
        If a connector `loads` some of them, no block is registered before `loaded`.
        """
        if loads and hit % self.block_size:
            raise ValueError(f"a connector loads tokens after {hit}, inside a block")
        lookup = self._take_lookup(request, hit)
        state = [lookup.state] if lookup.state else []
        have = len(lookup.blocks[0])
        published = have * self.block_size
        if state and not self._fresh.isdisjoint(state[0].blocks):
            new = None  # this step computes the state
        else:
            new = self._extend(lookup.sequence, required, have, published, state)
        if new is None:
            lookup.drop()
            return None
        blocks = [cached + added for cached, added in zip(lookup.blocks, new, strict=True)]
        entry = self.entries[request.request_id] = RequestBlocks(
            sequence=lookup.sequence,
            blocks=blocks,
            published=published,
            known=lookup.known,
            hit=hit,
            capacity=len(blocks[0]) * self.block_size,
            next_publish=published + self.block_size if lookup.shares and not loads else NEVER,
            shares=lookup.shares,
            processed=hit,
            passed=[0] * len(blocks),
            states=self._state_tables(state, have),
            columns=state,
        )
        new_states = self._begin_states(entry, required)
        if lookup.pin is not None:
            # The last block is registered already; the copy exists before the source is released.
            targets = [blocks_of_group[0] for blocks_of_group in new]
            pairs = list(zip(lookup.sources, targets, strict=True))
            self._copies[request.request_id] = (pairs, lookup.pin)
        elif known >= entry.next_publish:
            self._publish(entry, request, known)
        return self.all_tables(new, new_states)

    def _extend(
        self,
        sequence: Sequence,
        required: RequiredBlocks,
        have: int,
        published: int,
        columns: list[Column],
    ) -> list[list[int]] | None:
        new = max(required.slots - have, 0)
        start, prefill_end = required.start, required.prefill_end
        states = self.num_state_blocks(columns, start, required.end, prefill_end)
        if required.whole or required.spare or required.reserved or states:
            available = self.kv.usage().available - required.spare
            whole = self.num_missing(self.blocks_of(required.whole), have)
            whole += self.num_state_blocks(columns, start, required.whole, prefill_end)
            needed = new * len(self.windows) + states
            if whole > available or needed > available - required.reserved:
                return None
        if new == 0:
            return [[] for _ in self.windows]
        answer = sequence.extend(required.slots * self.block_size - published)
        return self._ids(answer.blocks) if isinstance(answer, Extended) else None

    def num_missing(self, blocks: int, have: int, *, capped: bool = True) -> int:
        """Blocks that a request with `have` blocks in each group of attention layers needs for
        `blocks`."""
        if not capped:
            return max(blocks - have, 0) * len(self.windows)
        return sum(int(max(min(blocks, cap) - have, 0)) for cap in self.caps)

    def _take_lookup(self, request: Any, hit: int) -> Lookup:
        """The last look-up if it was for this request, else a new one."""
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            if (lookup.request_id, lookup.hit) == (request.request_id, hit):
                return lookup
            lookup.drop()
        if hit and self.state_layers is not None:
            lookup = self._search_with_state(request, min(hit + 1, request.num_tokens))
        elif hit % self.block_size:
            lookup = self._search(request)
        else:
            tokens = min(hit + 1, request.num_tokens) if hit else request.num_tokens
            sequence, shares = self._sequence(request, tokens)
            cached = sequence.reuse_cached() if hit else 0
            blocks = self._blocks(sequence, cached)
            lookup = Lookup(request.request_id, sequence, tokens, cached, blocks, shares)
        if lookup.hit != hit:
            lookup.drop()
            raise RuntimeError(
                f"request {request.request_id} had {hit} cached tokens at look-up and has "
                f"{lookup.hit} now: look up and allocate in one step"
            )
        return lookup

    # -- states -------------------------------------------------------------------------------

    def _state_tables(self, columns: list[Column], num_columns: int) -> list[list[int]]:
        """Tables of states with so many columns, most of them without blocks."""
        tables = [[0] * num_columns for _ in self.recurrent]
        for column in columns:
            for table, block in zip(tables, column.blocks, strict=True):
                table[column.index] = block
        return tables

    def _new_columns(self, columns: list[Column], start: int, end: int, prefill_end: int) -> range:
        if self.state_layers is None:
            return range(0)
        num_columns = columns[-1].index + 1 if columns else 0
        return self.state_layers.new_columns(num_columns, start, end, prefill_end)

    def num_state_blocks(
        self, columns: list[Column], start: int, end: int, prefill_end: int
    ) -> int:
        """Blocks for the states of a request that computes from `start` to `end`."""
        return len(self._new_columns(columns, start, end, prefill_end)) * len(self.recurrent)

    def _begin_states(self, entry: RequestBlocks, required: RequiredBlocks) -> list[list[int]]:
        """Extend a request's tables of states for a step. Returns what is new of each table."""
        layers, columns = self.state_layers, entry.columns
        if layers is None:
            return []
        if columns:
            columns[-1].num_tokens = required.start
        have = len(entry.states[0])
        step = (required.start, required.end, required.prefill_end)
        indices = self._new_columns(columns, *step)
        added = layers.begin(self.kv, indices, required.end)
        columns += added
        columns[-1].num_tokens = required.end
        new = [table[have:] for table in self._state_tables(added, columns[-1].index + 1)]
        for table, blocks in zip(entry.states, new, strict=True):
            table.extend(blocks)
        slots = len(entry.blocks[0]) * self.block_size
        entry.capacity = min(slots, len(entry.states[0]) * layers.block_size)
        return new

    def _register_states(
        self,
        entry: RequestBlocks,
        request: Any,
        end: int,
        tokens: list[int] | None,
        layers: StateLayers,
    ) -> list[Remapping]:
        """Publish the tokens up to `end`, and cache the states that stand for whole blocks."""
        remappings: list[Remapping] = []
        published = entry.published
        for column in entry.columns:
            boundary = (column.index + 1) * layers.block_size
            is_new = column.num_tokens == boundary and published < boundary <= end
            if is_new and layers.retains(boundary, request):
                remappings += entry.sequence.publish(boundary - published, tokens)
                published, tokens = boundary, None
                layers.keep(self.kv, entry.sequence, column)
                if self._in_step:
                    self._fresh.update(column.blocks)
        return remappings + entry.sequence.publish(end - published, tokens)

    def _pass_columns(self, entry: RequestBlocks, num_tokens: int, size: int) -> None:
        """Release the states before the one after `num_tokens` tokens."""
        while entry.columns and entry.columns[0].index < (num_tokens - 1) // size:
            column = entry.columns.pop(0)
            column.release()
            for table in entry.states:
                table[column.index] = 0

    # -- publishing ---------------------------------------------------------------------------

    def publish_in_time(self, entry: RequestBlocks, request: Any, num_tokens: int) -> None:
        """Register the full blocks among the first `num_tokens` tokens of a request.

        Within a step this is delayed until its requests are final: a request that is preempted
        before does not compute its tokens.
        """
        if self._in_step:
            self._due[request.request_id] = (entry, request, num_tokens)
        else:
            self._publish(entry, request, num_tokens)

    def publish_due(self) -> None:
        """Register the delayed blocks: the requests planned so far are final."""
        if self._due:
            for entry, request, num_tokens in self._due.values():
                self._publish(entry, request, num_tokens)
            self._due.clear()

    def loaded(self, entry: RequestBlocks, request: Any, num_tokens: int) -> None:
        """Register the blocks of the first `num_tokens` tokens: a load of them has ended."""
        entry.loading = False
        if entry.shares:
            entry.next_publish = entry.published + self.block_size
            self._publish(entry, request, num_tokens, filled=True)

    def _publish(
        self, entry: RequestBlocks, request: Any, num_tokens: int, *, filled: bool = False
    ) -> None:
        """Register blocks that are `filled` already, or that the open step computes."""
        end = num_tokens // self.block_size * self.block_size
        if end <= entry.published or not self.caching:
            return
        if len(self.windows) > 1 and len(self.entries) > 1:
            end = min(end, entry.published + self._most_to_publish() * self.block_size)
            if end == entry.published:
                return  # later
        if self.events is not None:
            self.events.collect(self.kv.take_events())
        try:
            tokens = self._tokens(request, entry.known, end) if end > entry.known else None
            remappings = self._register(entry, request, end, tokens)
        except (OverflowError, TokenError):
            entry.next_publish = NEVER
            return
        if self.events is not None:
            self.events.collect(self.kv.take_events(), request.session_id)
        if self._in_step and not filled:
            first, last = entry.published // self.block_size, end // self.block_size
            for blocks in entry.blocks:
                self._fresh.update(blocks[first:last])
        entry.published, entry.known = end, max(entry.known, end)
        entry.next_publish = end + self.block_size
        if remappings:
            self._keep(request.request_id, entry, remappings)

    def _most_to_publish(self) -> int:
        """Logical blocks to publish at once such that `_keep` finds every block that is merged.

        `_keep` allocates a block of each group at a time, so it cannot reach the last blocks of the
        queue. For each logical block, publishing moves at most a block of each group to its front.
        """
        groups = len(self.windows)
        return max(self.kv.usage().available - groups + 1, 0) // groups

    # -- windows ------------------------------------------------------------------------------

    def _register(
        self, entry: RequestBlocks, request: Any, end: int, tokens: list[int] | None
    ) -> list[Remapping]:
        """Publish the tokens up to `end`, and guard what windows pass and the step still reads.

        A pin holds the blocks of a sequence that its windows read next. So the tokens are published
        in pieces of the smallest window, with a pin before each.
        """
        if self.state_layers is not None:
            return self._register_states(entry, request, end, tokens, self.state_layers)
        if not self.has_windows:
            return entry.sequence.publish(end - entry.published, tokens)
        remappings: list[Remapping] = []
        for start in range(entry.published, end, self._stride):
            stop = min(start + self._stride, end)
            if start and self._passes(stop, entry.processed):
                entry.guards.append((end, entry.sequence.pin()))
            remappings += entry.sequence.publish(stop - start, tokens)
            tokens = None
        return remappings

    def _passes(self, published: int, processed: int) -> bool:
        """True if publishing releases blocks that a token after the `processed` ones reads."""
        return any(
            published // self.block_size - self.blocks_of(window)
            > max(processed + 1 - window, 0) // self.block_size
            for window in self.windows
            if window
        )

    def process(self, entry: RequestBlocks, num_tokens: int) -> None:
        """The steps that compute the first `num_tokens` tokens of a request have ended: release
        what its windows have passed, and earlier states."""
        if self.state_layers is not None:
            self._pass_columns(entry, num_tokens, self.state_layers.block_size)
        if not self.has_windows:
            return
        entry.processed, size = num_tokens, self.block_size
        full = num_tokens // size * size
        if not self.caching and entry.shares and full > entry.published:
            entry.sequence.publish(full - entry.published, [0] * max(full - entry.known, 0))
            entry.published, entry.known = full, max(entry.known, full)
            entry.next_publish = full + size
        while entry.guards and entry.guards[0][0] <= num_tokens:
            entry.guards.pop(0)[1].release()
        for group, window in enumerate(self.windows):
            if window is None:
                continue
            released = entry.published // size - self.blocks_of(window)
            passed = min(max(num_tokens + 1 - window, 0) // size, released)
            for index in range(entry.passed[group], passed):
                entry.blocks[group][index] = 0
            entry.passed[group] = max(entry.passed[group], passed)

    # -- merges and copies --------------------------------------------------------------------

    def _keep(self, request_id: str, entry: RequestBlocks, redirects: list[Remapping]) -> None:
        """Allocate the merged blocks again: the workers still use them.

        They were freed last, so they are allocated first.
        """
        missing = {redirect.old_block for redirect in redirects}
        unrelated: list[Sequence] = []  # other blocks, allocated on the way
        while missing:
            sequence = self.kv.sequence([0])
            answer = sequence.extend(1)
            if not isinstance(answer, Extended):
                raise RuntimeError(f"merged blocks {sorted(missing)} of {request_id} are lost")
            blocks = {block for [block] in answer.blocks}
            (unrelated if blocks.isdisjoint(missing) else entry.keepers).append(sequence)
            missing -= blocks
        for sequence in reversed(unrelated):
            sequence.free()
        entry.merges += [
            (redirect.group, redirect.index, redirect.new_block + self.offset)
            for redirect in redirects
        ]
        entry.merged_in_step = self._step
        self._merged[request_id] = entry

    def merged_tables(self, running: Iterable[Any]) -> dict[str, tuple[list[int], ...]]:
        """New block tables of running requests with merged blocks; releases the merged blocks.

        Call it with the step's blocks, if the workers replace a request's table before they run the
        step. Merges of the current step follow in the next one, as their KV is not computed yet.
        """
        tables: dict[str, tuple[list[int], ...]] = {}
        for request in running if self._merged else ():
            entry = self._merged.get(request.request_id)
            if entry is None or entry.merged_in_step == self._step:
                continue
            for group, index, block in entry.merges:
                if index >= entry.passed[group]:
                    entry.blocks[group][index] = block
            entry.free_merged()
            entry.merges.clear()
            del self._merged[request.request_id]
            blocks = self.all_tables(entry.blocks, entry.states)
            tables[request.request_id] = tuple(table.copy() for table in blocks)
        return tables

    def take_copies(self) -> list[tuple[list[tuple[int, int]], Pin]]:
        """Pairs (source, copy) of blocks to copy before the step, and a pin of the sources."""
        copies = list(self._copies.values())
        self._copies.clear()
        return copies

    # -- the end ------------------------------------------------------------------------------

    def pop(self, request_id: str) -> RequestBlocks | None:
        """Remove a request. The caller frees its blocks."""
        if self._lookup is not None and self._lookup.request_id == request_id:
            self.drop_lookup()
        self._due.pop(request_id, None)
        self._merged.pop(request_id, None)
        copy = self._copies.pop(request_id, None)
        if copy is not None:
            copy[1].release()
        return self.entries.pop(request_id, None)

    def clear(self) -> int:
        """Evict all cached blocks, if no request holds any. Returns the number of held blocks."""
        self.drop_lookup()
        usage = self.kv.usage()
        used = usage.active + usage.pinned - (0 if self.offset else 1)
        if used == 0:
            self.kv.evict_all()
            self.images.clear()
        return used
