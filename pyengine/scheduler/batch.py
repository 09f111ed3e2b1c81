"""The plan of one step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import TYPE_CHECKING

from pyengine.kv_cache import Sequence as KVSequence
from pyengine.kv_cache import StepPlan

if TYPE_CHECKING:
    from pyengine.engine.request import Request, SequenceState


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence's part of a step: `num_tokens` positions from `start` on."""

    sequence: "SequenceState"
    start: int
    num_tokens: int
    num_cached: int
    samples: bool
    num_attached: int = 0
    """Of the cached tokens, those of blocks that were attached before the step was planned."""
    num_attached_blocks: int = 0

    @property
    def request(self) -> "Request":
        """The request that these tokens belong to."""
        return self.sequence.request

    @property
    def end(self) -> int:
        """The position after the last one computed."""
        return self.start + self.num_tokens


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A plan that is ready to run: first `decodes`, one token each, then `chunks` of prompts.

    Decoding goes on for many steps with the same sequences, and then nothing is made for each of
    them: `decodes` is the very same tuple in every such step, so whoever has worked something out
    for it may keep that as long as it sees this tuple.

    The step keeps its sequences' counts: it moves them on as they are planned, and back as they are
    taken out. `drafts` are tokens that may follow those of decodes, computed with them; how many
    of these count is known when the step has run.
    """

    plan: StepPlan
    is_ahead: bool = False
    """Planned while the step before it runs: nothing can be preempted."""
    planned_time: float = field(default_factory=monotonic)
    """In seconds of `time.monotonic`."""
    decodes: "tuple[SequenceState, ...]" = ()
    chunks: list[Entry] = field(default_factory=list)
    drafts: "Mapping[SequenceState, Sequence[int]]" = field(default_factory=dict)
    num_bounded: int = 0
    """Tokens of prompts of which a step computes a bounded number (`Request.max_chunk`)."""

    @property
    def sequences(self) -> "list[SequenceState]":
        """Everyone who takes part, in plan order."""
        return [*self.decodes, *(entry.sequence for entry in self.chunks)]

    @property
    def sampling_sequences(self) -> "list[SequenceState]":
        """Those who get a token, in the order of the sampled logits' rows."""
        return [*self.decodes, *(entry.sequence for entry in self.chunks if entry.samples)]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.num_decoded + sum([entry.num_tokens for entry in self.chunks])

    @property
    def num_decoded(self) -> int:
        """Of these, the tokens of decodes and their drafts: they come first."""
        return len(self.decodes) + sum(map(len, self.drafts.values()))

    @property
    def awaited(self) -> "list[SequenceState]":
        """Sequences that no step can decode before this one's tokens are known."""
        return [
            sequence
            for sequence in self.sampling_sequences
            if sequence.is_awaited or sequence in self.drafts
        ]

    @property
    def entries(self) -> list[Entry]:
        """All parts in plan order, for those who look on; as long as this is the newest step."""
        decodes = [
            Entry(sequence, sequence.num_computed - 1, 1, 0, samples=True)
            for sequence in self.decodes
        ]
        return decodes + self.chunks

    def has_room(self, request: "Request") -> bool:
        """Whether the bound of `request`, if there is one, leaves tokens for a chunk of it."""
        return self.num_bounded < request.max_chunk

    def add_decodes(self, sequences: "tuple[SequenceState, ...]") -> None:
        """Note sequences whose next token the plan decodes."""
        self.decodes = self.decodes + sequences if self.decodes else sequences
        for sequence in sequences:
            sequence.num_computed += 1
            sequence.num_tokens += 1

    def add_prefill(self, sequence: "SequenceState", num_tokens: int, num_cached: int) -> Entry:
        """Note a sequence whose known tokens the plan computes in part, and reuses in part."""
        start = sequence.num_computed + num_cached
        samples = start + num_tokens == sequence.num_tokens
        entry = Entry(sequence, start, num_tokens, num_cached, samples)
        self.chunks.append(entry)
        if sequence.request.max_chunk != inf:
            self.num_bounded += num_tokens
        sequence.num_computed = entry.end
        sequence.num_tokens += samples
        return entry

    def accept(self, counts: Iterable[int]) -> None:
        """Note how many tokens each of the sampling sequences got, now that the step is
        committed."""
        for sequence, count in zip(self.sampling_sequences, counts, strict=True):
            sequence.num_computed += count - 1
            sequence.num_tokens += count - 1
            if count <= len(self.drafts.get(sequence, ())) and sequence.kv.is_live:
                sequence.kv.trim(sequence.num_computed)  # what rejected drafts took

    def cancel(self, sequence: "SequenceState") -> "list[SequenceState]":
        """Take a sequence out of the plan again, if it is in it.

        Sequences that share what it was to compute in this step go with it; returns those.
        """
        sequences = self.sequences
        if sequence not in sequences:
            return []
        gone = {sequence.kv.id, *self.plan.cancel(sequence.kv)}
        decodes = [sequence for sequence in self.decodes if sequence.kv.id in gone]
        chunks = [entry for entry in self.chunks if entry.sequence.kv.id in gone]
        _move_back(decodes, chunks)
        self.decodes = tuple(sequence for sequence in self.decodes if sequence not in decodes)
        self.chunks = [entry for entry in self.chunks if entry not in chunks]
        bounded = [entry.num_tokens for entry in chunks if entry.request.max_chunk != inf]
        self.num_bounded -= sum(bounded)
        return [other for other in sequences if other is not sequence and other.kv.id in gone]

    def rollback(self) -> None:
        """Undo the plan: it is as if nothing had been planned. The newest step goes first."""
        self.plan.rollback()
        _move_back(self.decodes, self.chunks)


def _move_back(decodes: "Iterable[SequenceState]", chunks: Iterable[Entry]) -> None:
    """The counts of these sequences are what they were before the step."""
    for sequence in decodes:
        sequence.num_computed -= 1
        sequence.num_tokens -= 1
    for entry in chunks:
        entry.sequence.num_computed = entry.start - entry.num_cached
        entry.sequence.num_tokens -= entry.samples


class ReuseCounters:
    """Counts that the block manager misses: added to its own, every prompt token is counted.

    The block manager counts what a step plan finds in the cache. A prefix that is attached before
    the step is planned, and blocks that a fork shares, are counted here.
    """

    def __init__(self, block_size: int, null_block: int) -> None:
        self._block_size = block_size
        self._null_block = null_block
        self._values = dict.fromkeys(
            ("prompt_tokens", "cached_tokens", "hit_blocks", "forked_tokens", "forked_blocks"), 0
        )

    def as_dict(self) -> dict[str, int]:
        """The counters by name; they only grow."""
        return dict(self._values)

    def num_blocks(self, blocks: Iterable[int]) -> int:
        """How many of these blocks of a table are really there: not behind a window."""
        return len([block for block in blocks if block != self._null_block])

    def add_attached(self, num_tokens: int, num_blocks: int) -> None:
        """Count a cached prefix that a committed step did not compute."""
        self._values["prompt_tokens"] += num_tokens
        self._values["cached_tokens"] += num_tokens
        self._values["hit_blocks"] += num_blocks

    def add_fork(self, kv: KVSequence) -> None:
        """Count what a sequence that has just been forked shares; its last block if it is full."""
        computed = kv.num_computed_tokens
        full = computed // self._block_size
        self._values["forked_tokens"] += computed
        self._values["forked_blocks"] += sum(
            [self.num_blocks(table[:full]) for table in kv.block_tables]
        )
