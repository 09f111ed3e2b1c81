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
"""

import math
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pyengine.integrations.vllm_keys import EventWriter, PseudoTokens, namespace_of
from pyengine.kv_cache import BlockManager, Extended, Pin, Remapping, Sequence, TokenError

NEVER = math.inf


@dataclass(slots=True)
class RequestBlocks:
    """The blocks of a request.

    `blocks` is the block table of the workers. `published` tokens are in registered blocks, `known`
    tokens were passed to the sequence, `hit` tokens came from the cache. The blocks have slots for
    `capacity` tokens, and the next block is registered at `next_publish` tokens: `NEVER` during a
    load, and without `shares`. `loading` is true during an asynchronous load.
    """

    sequence: Sequence
    blocks: list[int]
    published: int
    known: int
    hit: int
    capacity: int
    next_publish: float
    shares: bool
    loading: bool = False
    keepers: list[Sequence] = field(default_factory=list)
    merges: list[tuple[int, int]] = field(default_factory=list)
    merged_in_step: int = 0

    def free(self) -> None:
        """Release all blocks."""
        self.free_merged()
        self.sequence.free()

    def free_merged(self) -> None:
        """Release the blocks that were merged into others."""
        for keeper in self.keepers:
            keeper.free()
        self.keepers.clear()


@dataclass(slots=True)
class Lookup:
    """The cached blocks of a request, held until it is admitted or the next look-up.

    The sequence has the first `known` tokens. If all tokens are cached, `source` is the last block,
    which must be copied, and `pin` pins it. Without `shares`, blocks are not registered either.
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
        """Release the blocks."""
        if self.pin is not None:
            self.pin.release()
        self.sequence.free()


@dataclass(frozen=True, slots=True)
class RequiredBlocks:
    """Required blocks: in all now (`slots`) and for the whole prompt (`whole`, or 0); and blocks
    that must stay available: `spare` in any case, `reserved` for other requests."""

    slots: int
    whole: int
    spare: int
    reserved: int


class Tables:
    """The blocks of all requests, over one pool.

    Block 0 is allocated at the start as vLLM's null block, so block ids are the same on both sides.
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
            partial_reuse=False,  # vLLM's runner does not execute `StepPlan.copies`
            events=events and caching,
        )
        self._null = self.kv.sequence([0])
        self._null.extend(1)
        self.entries: dict[str, RequestBlocks] = {}
        self.images = PseudoTokens(block_size)
        self.adapter_ids: dict[str, int] = {}
        self.events: EventWriter | None = None
        self._lookup: Lookup | None = None
        self._due: dict[str, tuple[RequestBlocks, Any, int]] = {}
        self._copies: dict[str, tuple[int, int, Pin]] = {}
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
        size, tokens = self.block_size, request.num_tokens
        sequence, shares = self._sequence(request, tokens)
        hit = sequence.reuse_cached()
        blocks = sequence.block_table if hit else []
        if len(blocks) * size == hit:
            return Lookup(request.request_id, sequence, tokens, hit, blocks, shares)
        # Every token is cached. The last token is computed again, which writes to the last block,
        # so that is copied: the sequence gets all tokens but the last.
        *before, source = blocks
        pin = None if source in self._fresh else sequence.pin()
        sequence.free()
        sequence, shares = self._sequence(request, tokens - 1)
        cached = sequence.reuse_cached()
        if pin is None:  # the block is not computed before this step has run
            return Lookup(request.request_id, sequence, tokens - 1, cached, before, shares)
        lookup = (request.request_id, sequence, tokens - 1, hit, before, shares)
        return Lookup(*lookup, source, pin)

    def _sequence(self, request: Any, num_tokens: int) -> tuple[Sequence, bool]:
        """A sequence of the first tokens without blocks, and whether its blocks may be shared.

        They may not if they have no hash: without a cache, with embeddings instead of tokens, with
        no pseudo token left, or with an invalid token.
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

    def grow(self, entry: RequestBlocks, required: RequiredBlocks) -> list[int] | None:
        """Allocate further blocks of a request; None and no change if the pool is full."""
        new = self._extend(entry.sequence, required, len(entry.blocks), entry.published)
        if new:
            entry.blocks += new
            entry.capacity = len(entry.blocks) * self.block_size
        return new

    def admit(
        self, request: Any, hit: int, required: RequiredBlocks, known: int, *, loads: bool
    ) -> list[int] | None:
        """Allocate the first blocks of a request after its `hit` cached tokens.

        Returns None without a change if the pool is full. This step computes up to `known` tokens.
        If a connector `loads` some of them, no block is registered before `loaded`.
        """
        if loads and hit % self.block_size:
            raise ValueError(f"a connector loads tokens after {hit}, inside a block")
        lookup = self._take_lookup(request, hit)
        published = len(lookup.blocks) * self.block_size
        new = self._extend(lookup.sequence, required, len(lookup.blocks), published)
        if new is None:
            lookup.drop()
            return None
        blocks = [*lookup.blocks, *new]
        entry = self.entries[request.request_id] = RequestBlocks(
            sequence=lookup.sequence,
            blocks=blocks,
            published=published,
            known=lookup.known,
            hit=hit,
            capacity=len(blocks) * self.block_size,
            next_publish=published + self.block_size if lookup.shares and not loads else NEVER,
            shares=lookup.shares,
        )
        if lookup.source is not None and lookup.pin is not None:
            # The last block is registered already; the copy exists before the source is released.
            self._copies[request.request_id] = (lookup.source, new[0], lookup.pin)
        elif known >= entry.next_publish:
            self._publish(entry, request, known)
        return new

    def _extend(
        self, sequence: Sequence, required: RequiredBlocks, have: int, published: int
    ) -> list[int] | None:
        new = max(required.slots - have, 0)
        if required.whole or required.spare or required.reserved:
            available = self.kv.usage().available - required.spare
            if max(required.whole - have, 0) > available or new > available - required.reserved:
                return None
        if new == 0:
            return []
        answer = sequence.extend(required.slots * self.block_size - published)
        return answer.blocks[0] if isinstance(answer, Extended) else None

    def _take_lookup(self, request: Any, hit: int) -> Lookup:
        """The last look-up if it was for this request, else a new one."""
        lookup, self._lookup = self._lookup, None
        if lookup is not None:
            if (lookup.request_id, lookup.hit) == (request.request_id, hit):
                return lookup
            lookup.drop()
        if hit % self.block_size:
            lookup = self._search(request)
        else:
            tokens = min(hit + 1, request.num_tokens) if hit else request.num_tokens
            sequence, shares = self._sequence(request, tokens)
            cached = sequence.reuse_cached() if hit else 0
            blocks = sequence.block_table if cached else []
            lookup = Lookup(request.request_id, sequence, tokens, cached, blocks, shares)
        if lookup.hit != hit:
            lookup.drop()
            raise RuntimeError(
                f"request {request.request_id} had {hit} cached tokens at look-up and has "
                f"{lookup.hit} now: look up and allocate in one step"
            )
        return lookup

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
        if end <= entry.published:
            return
        if self.events is not None:
            self.events.collect(self.kv.take_events())
        try:
            tokens = self._tokens(request, entry.known, end) if end > entry.known else None
            remappings = entry.sequence.publish(end - entry.published, tokens)
        except (OverflowError, TokenError):
            entry.next_publish = NEVER
            return
        if self.events is not None:
            self.events.collect(self.kv.take_events(), request.session_id)
        if self._in_step and not filled:
            first, last = entry.published // self.block_size, end // self.block_size
            self._fresh.update(entry.blocks[first:last])
        entry.published, entry.known = end, max(entry.known, end)
        entry.next_publish = end + self.block_size
        if remappings:
            self._keep(request.request_id, entry, remappings)

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
            [block] = answer.blocks[0]
            (entry.keepers if block in missing else unrelated).append(sequence)
            missing.discard(block)
        for sequence in reversed(unrelated):
            sequence.free()
        entry.merges += [(redirect.index, redirect.new_block) for redirect in redirects]
        entry.merged_in_step = self._step
        self._merged[request_id] = entry

    def merged_tables(self, running: Iterable[Any]) -> dict[str, list[int]]:
        """New block tables of running requests with merged blocks; releases the merged blocks.

        Call it with the step's blocks, if the workers replace a request's table before they run the
        step. Merges of the current step follow in the next one, as their KV is not computed yet.
        """
        tables: dict[str, list[int]] = {}
        for request in running if self._merged else ():
            entry = self._merged.get(request.request_id)
            if entry is None or entry.merged_in_step == self._step:
                continue
            for index, block in entry.merges:
                entry.blocks[index] = block
            entry.free_merged()
            entry.merges.clear()
            del self._merged[request.request_id]
            tables[request.request_id] = entry.blocks.copy()
        return tables

    def take_copies(self) -> list[tuple[int, int, Pin]]:
        """Triples (source, copy, pin of the source) of blocks to copy before the step."""
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
            copy[2].release()
        return self.entries.pop(request_id, None)

    def clear(self) -> int:
        """Evict all cached blocks, if no request holds any. Returns the number of held blocks."""
        self.drop_lookup()
        usage = self.kv.usage()
        used = usage.active + usage.pinned - 1
        if used == 0:
            self.kv.evict_all()
            self.images.clear()
        return used
