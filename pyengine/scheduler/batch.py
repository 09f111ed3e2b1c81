"""The plan of one step: its decodes, prompt chunks and drafts."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic
from typing import Any

from pyengine.kv_cache import StepPlan
from pyengine.request.request import SequenceState


@dataclass(slots=True, eq=False)
class Entry:
    """One sequence's part of a step: `num_tokens` positions from `start` on."""

    sequence: SequenceState
    start: int
    num_tokens: int
    num_cached: int
    samples: bool
    num_attached: int = 0
    """Cached tokens of blocks that were attached before the step was planned."""
    num_attached_blocks: int = 0


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A plan that is ready to run: first `decodes`, one token each, then `chunks` of prompts.

    While the same sequences decode, `decodes` is the same tuple in each step: results may be cached
    by its identity. The step updates the counts of its sequences as they are planned or cancelled.
    `drafts` are tokens after those of decodes; the number of accepted ones is known after the step.
    """

    plan: StepPlan
    is_ahead: bool = False
    """Planned while the step before it runs: nothing can be preempted."""
    planned_time: float = field(default_factory=monotonic)
    """In seconds of `time.monotonic`."""
    decodes: tuple[SequenceState, ...] = ()
    chunks: list[Entry] = field(default_factory=list)
    drafts: Mapping[SequenceState, Sequence[int]] = field(default_factory=dict)
    num_bounded: int = 0
    """Tokens of prompts with a bounded chunk (`Request.max_chunk`)."""
    may_draft: bool = True
    """False while a request at fault is searched: it runs without drafts."""
    forked: tuple[SequenceState, ...] = ()
    """Sequences whose states are copied from others before it."""
    mtp: Any = None
    """The part of the model's MTP layers (`MTPStep`), if they draft."""

    @property
    def sequences(self) -> list[SequenceState]:
        """All sequences of the step, in plan order."""
        return [*self.decodes, *(entry.sequence for entry in self.chunks)]

    @property
    def sampling_sequences(self) -> list[SequenceState]:
        """Sequences that get a token, in the order of the sampled logits' rows."""
        return [*self.decodes, *(entry.sequence for entry in self.chunks if entry.samples)]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.num_decoded + sum([entry.num_tokens for entry in self.chunks])

    @property
    def num_decoded(self) -> int:
        """Tokens of decodes and their drafts: they come first."""
        return len(self.decodes) + sum(map(len, self.drafts.values()))

    @property
    def awaited(self) -> list[SequenceState]:
        """Sequences that no step can decode before this one's tokens are known."""
        return [
            sequence
            for sequence in self.sampling_sequences
            if sequence.is_awaited or sequence in self.drafts
        ]

    def add_decodes(self, sequences: tuple[SequenceState, ...]) -> None:
        """Record sequences whose next token the plan decodes."""
        self.decodes = self.decodes + sequences if self.decodes else sequences
        for sequence in sequences:
            sequence.num_computed += 1
            sequence.num_tokens += 1

    def add_prefill(self, sequence: SequenceState, num_tokens: int, num_cached: int) -> Entry:
        """Record a sequence whose known tokens the plan computes, except cached ones."""
        start = sequence.num_computed + num_cached
        end = start + num_tokens
        samples = end == sequence.num_tokens
        entry = Entry(sequence, start, num_tokens, num_cached, samples)
        self.chunks.append(entry)
        if sequence.request.max_chunk != inf:
            self.num_bounded += num_tokens
        sequence.num_computed = end
        sequence.num_tokens += samples
        return entry

    def accept(self, counts: Iterable[int]) -> None:
        """After the commit, record the number of tokens of each sampling sequence."""
        for sequence, count in zip(self.sampling_sequences, counts, strict=True):
            sequence.num_computed += count - 1
            sequence.num_tokens += count - 1
            if count <= len(self.drafts.get(sequence, ())) and sequence.kv.is_live:
                sequence.kv.trim(sequence.num_computed)  # the blocks of rejected drafts

    def cancel(self, sequence: SequenceState) -> list[SequenceState]:
        """Remove a sequence from the plan, if it is in it.

        Sequences that share its blocks of this step are removed too, and returned.
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
        bounded = [entry for entry in chunks if entry.sequence.request.max_chunk != inf]
        self.num_bounded -= sum([entry.num_tokens for entry in bounded])
        return [other for other in sequences if other is not sequence and other.kv.id in gone]

    def rollback(self) -> None:
        """Undo the plan. The newest step first."""
        self.plan.rollback()
        _move_back(self.decodes, self.chunks)


def _move_back(decodes: Iterable[SequenceState], chunks: Iterable[Entry]) -> None:
    """Reset the counts of these sequences to those before the step."""
    for sequence in decodes:
        sequence.num_computed -= 1
        sequence.num_tokens -= 1
    for entry in chunks:
        entry.sequence.num_computed = entry.start - entry.num_cached
        entry.sequence.num_tokens -= entry.samples
