"""The blocks of vLLM's requests: each a sequence without a plan, and the table that workers know.

That table is a list which only grows, so a block that the block manager merges into another one may
still be the workers'. It is taken back at once and kept for its request (`Row.keeper`), until the
workers have been told (`merged_rows`) or the request ends.
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pyengine.cache import BlockManager, Extended, Pin, Remapping, Sequence, TokenError
from pyengine.integrations.vllm_contents import EventWriter, PseudoTokens, namespace_of

NEVER = math.inf


@dataclass(slots=True)
class Row:
    """The blocks of a request.

    `blocks` is the table as the workers know it. `published` tokens are registered (whole blocks),
    `known` ones has the sequence, `hit` came from the cache. Up to `capacity` tokens there are
    slots, and at `next_publish` a block becomes full.
    """

    sequence: Sequence
    blocks: list[int]
    published: int
    known: int
    hit: int
    capacity: int
    next_publish: float
    keepers: list[Sequence] = field(default_factory=list)
    merges: list[tuple[int, int]] = field(default_factory=list)
    merged_in_step: int = 0

    def free(self) -> None:
        """Give all blocks back."""
        self.let_go()
        self.sequence.free()

    def let_go(self) -> None:
        """Give the blocks back that were merged away."""
        for keeper in self.keepers:
            keeper.free()
        self.keepers.clear()


@dataclass(slots=True)
class Lookup:
    """What a request would find, held until it is admitted or somebody else looks.

    Its sequence has the first `known` tokens. Where all are cached, `source` is the last block, to
    be copied, and `pin` holds it. What does not share is not registered either.
    """

    request_id: str
    sequence: Sequence
    known: int
    hit: int
    blocks: list[int]
    shares: bool
    source: int | None = None
    pin: Pin | None = None

    def drop(self) -> None:
        """Let go of the blocks."""
        if self.pin is not None:
            self.pin.release()
        self.sequence.free()


@dataclass(frozen=True, slots=True)
class Wanted:
    """Blocks that a request is to have in all, now and (if that is asked) as a whole; and what must
    be left: to spare in any case, and reserved for others."""

    slots: int
    whole: int
    spare: int
    reserved: int


class Tables:
    """The rows of all requests that hold blocks, over one pool.

    Block 0 is taken at the start: it is vLLM's null block, so ids are the same on both sides.
    """

    def __init__(
        self, num_blocks: int, block_size: int, *, caching: bool, events: bool = False
    ) -> None:
        self.block_size = block_size
        self.caching = caching
        self.kv = BlockManager(
            num_blocks,
            block_size,
            prefix_caching=caching,
            partial_reuse=False,  # vLLM's runner does not carry out `StepPlan.copies`
            events=events and caching,
        )
        self._null = self.kv.sequence([0])
        self._null.extend(1)
        self.rows: dict[str, Row] = {}
        self.images = PseudoTokens(block_size)
        self.adapter_ids: dict[str, int] = {}
        self.events: EventWriter | None = None
        self._lookup: Lookup | None = None
        self._due: dict[str, tuple[Row, Any, int]] = {}
        self._copies: dict[str, tuple[int, int, Pin]] = {}
        self._merged: dict[str, Row] = {}
        self._fresh: set[int] = set()
        self._step = 0
        self._in_step = False

    def begin_step(self) -> None:
        """From now on full blocks are published when it is settled who runs in this step."""
        self._step += 1
        self._in_step = True
        self._fresh.clear()

    def end_step(self) -> None:
        """It is settled."""
        self.publish_due()
        self.drop_lookup()
        self._in_step = False

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks for so many tokens."""
        return -(-num_tokens // self.block_size)

    # -- look-up ------------------------------------------------------------------------------

    def look_up(self, request: Any) -> Lookup:
        """What is cached of a request, all but one token at most."""
        self.drop_lookup()
        self._lookup = self._search(request)
        return self._lookup

    def drop_lookup(self) -> None:
        """The latest look-up led to nothing."""
        if self._lookup is not None:
            self._lookup.drop()
            self._lookup = None

    def _search(self, request: Any) -> Lookup:
        size, tokens = self.block_size, request.num_tokens
        sequence, shares = self._sequence(request, tokens)
        hit = sequence.reuse_cached()
        blocks = sequence.block_table if hit else []
        if len(blocks) * size == hit:
            return Lookup(request.request_id, sequence, tokens, hit, blocks, shares)
        # Every token is cached. The last block is written to (the last token is computed again), so
        # it is copied: the sequence leaves that token out, and with it the block.
        *before, source = blocks
        pin = None if source in self._fresh else sequence.pin()
        sequence.free()
        sequence, shares = self._sequence(request, tokens - 1)
        reused = sequence.reuse_cached()
        if pin is None:  # there is nothing to copy before this step has run
            return Lookup(request.request_id, sequence, tokens - 1, reused, before, shares)
        found = (request.request_id, sequence, tokens - 1, hit, before, shares)
        return Lookup(*found, source, pin)

    def _sequence(self, request: Any, num_tokens: int) -> tuple[Sequence, bool]:
        """A sequence of its first tokens, without blocks; and whether others may share them.

        They may not where contents have no name: without a cache, where embeddings stand for
        tokens, where no number is left for an image or a token is none.
        """
        if self.caching and num_tokens and request.prompt_embeds is None:
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

    def grow(self, row: Row, wanted: Wanted) -> list[int] | None:
        """The blocks more that a request gets; None and no change if there is no room."""
        new = self._extend(row.sequence, wanted, len(row.blocks), row.published)
        if new:
            row.blocks += new
            row.capacity = len(row.blocks) * self.block_size
        return new

    def admit(self, request: Any, hit: int, wanted: Wanted, known: int) -> list[int] | None:
        """A request's first blocks, behind the `hit` tokens of which it was told; None and no
        change if there is no room. `known` tokens are computed by this step."""
        found = self._found(request, hit)
        published = len(found.blocks) * self.block_size
        new = self._extend(found.sequence, wanted, len(found.blocks), published)
        if new is None:
            found.drop()
            return None
        blocks = [*found.blocks, *new]
        row = self.rows[request.request_id] = Row(
            sequence=found.sequence,
            blocks=blocks,
            published=published,
            known=found.known,
            hit=hit,
            capacity=len(blocks) * self.block_size,
            next_publish=published + self.block_size if found.shares else NEVER,
        )
        if found.source is not None and found.pin is not None:
            # Its last content is registered already; the copy is, when the source may have gone.
            self._copies[request.request_id] = (found.source, new[0], found.pin)
        elif known >= row.next_publish:
            self._publish(row, request, known)
        return new

    def _extend(
        self, sequence: Sequence, wanted: Wanted, have: int, published: int
    ) -> list[int] | None:
        new = max(wanted.slots - have, 0)
        if wanted.whole or wanted.spare or wanted.reserved:
            available = self.kv.usage().available - wanted.spare
            if max(wanted.whole - have, 0) > available or new > available - wanted.reserved:
                return None
        if new == 0:
            return []
        answer = sequence.extend(wanted.slots * self.block_size - published)
        return answer.blocks[0] if isinstance(answer, Extended) else None

    def _found(self, request: Any, hit: int) -> Lookup:
        """What the latest look-up found, if it was for this; otherwise it is looked up again."""
        found, self._lookup = self._lookup, None
        if found is not None:
            if (found.request_id, found.hit) == (request.request_id, hit):
                return found
            found.drop()
        if hit % self.block_size:
            found = self._search(request)
        else:
            tokens = min(hit + 1, request.num_tokens) if hit else request.num_tokens
            sequence, shares = self._sequence(request, tokens)
            reused = sequence.reuse_cached() if hit else 0
            blocks = sequence.block_table if reused else []
            found = Lookup(request.request_id, sequence, tokens, reused, blocks, shares)
        if found.hit != hit:
            found.drop()
            raise RuntimeError(
                f"request {request.request_id} was told of {hit} cached tokens, of which "
                f"{found.hit} are left: look up and allocate in one step"
            )
        return found

    # -- publishing ---------------------------------------------------------------------------

    def publish_in_time(self, row: Row, request: Any, num_tokens: int) -> None:
        """The first tokens of a request are computed: what is full of it is registered now.

        Within a step, when it is settled that the request runs: until then it may be preempted, and
        then nobody computes what was planned for it.
        """
        if self._in_step:
            self._due[request.request_id] = (row, request, num_tokens)
        else:
            self._publish(row, request, num_tokens)

    def publish_due(self) -> None:
        """Who runs so far is settled."""
        if self._due:
            for row, request, num_tokens in self._due.values():
                self._publish(row, request, num_tokens)
            self._due.clear()

    def _publish(self, row: Row, request: Any, num_tokens: int) -> None:
        end = num_tokens // self.block_size * self.block_size
        if end <= row.published:
            return
        if self.events is not None:
            self.events.collect(self.kv.take_events())
        try:
            tokens = self._tokens(request, row.known, end) if end > row.known else None
            remappings = row.sequence.publish(end - row.published, tokens)
        except (OverflowError, TokenError):
            row.next_publish = NEVER
            return
        if self.events is not None:
            self.events.collect(self.kv.take_events(), request.session_id)
        if self._in_step:
            first, last = row.published // self.block_size, end // self.block_size
            self._fresh.update(row.blocks[first:last])
        row.published, row.known = end, max(row.known, end)
        row.next_publish = end + self.block_size
        if remappings:
            self._keep(request.request_id, row, remappings)

    # -- merges and copies --------------------------------------------------------------------

    def _keep(self, request_id: str, row: Row, remappings: list[Remapping]) -> None:
        """Takes the merged blocks back: the workers still use them. Freed last, they come first."""
        missing = {remapping.old_block for remapping in remappings}
        others: list[Sequence] = []  # that became free with them
        while missing:
            taken = self.kv.sequence([0])
            answer = taken.extend(1)
            if not isinstance(answer, Extended):
                raise RuntimeError(f"merged blocks {sorted(missing)} of {request_id} are lost")
            [block] = answer.blocks[0]
            (row.keepers if block in missing else others).append(taken)
            missing.discard(block)
        for each in reversed(others):
            each.free()
        row.merges += [(remapping.index, remapping.new_block) for remapping in remappings]
        row.merged_in_step = self._step
        self._merged[request_id] = row

    def merged_rows(self, running: Iterable[Any]) -> dict[str, list[int]]:
        """Whole new tables of those of `running` that hold duplicates, which are given back.

        To be asked when the step's blocks are handed out, and if the workers replace a request's
        table before they run the step. What this very step merged waits for the next one: until
        then its KV may not be there.
        """
        tables: dict[str, list[int]] = {}
        for request in running if self._merged else ():
            row = self._merged.get(request.request_id)
            if row is None or row.merged_in_step == self._step:
                continue
            for index, block in row.merges:
                row.blocks[index] = block
            row.let_go()
            row.merges.clear()
            del self._merged[request.request_id]
            tables[request.request_id] = row.blocks.copy()
        return tables

    def take_copies(self) -> list[tuple[int, int]]:
        """Pairs of blocks (source, copy) to copy before the step, whose sources are let go."""
        copies = [(source, copy) for source, copy, _ in self._copies.values()]
        for _, _, pin in self._copies.values():
            pin.release()
        self._copies.clear()
        return copies

    # -- the end ------------------------------------------------------------------------------

    def pop(self, request_id: str) -> Row | None:
        """Forget a request; its blocks are still to be freed."""
        if self._lookup is not None and self._lookup.request_id == request_id:
            self.drop_lookup()
        self._due.pop(request_id, None)
        self._merged.pop(request_id, None)
        copy = self._copies.pop(request_id, None)
        if copy is not None:
            copy[2].release()
        return self.rows.pop(request_id, None)

    def clear(self) -> int:
        """Forget all contents. Returns how many blocks requests hold: if any, nothing is done."""
        self.drop_lookup()
        usage = self.kv.usage()
        used = usage.active + usage.pinned - 1
        if used == 0:
            self.kv.evict_all()
            self.images.clear()
        return used
