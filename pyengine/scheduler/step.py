"""What the scheduler decided for one step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from time import monotonic

from pyengine.cache import Sequence as CachedSequence
from pyengine.cache import StepPlan
from pyengine.core.request import Request


class Job:
    """A sample of a request as the scheduler sees it: its sequence, and the counts of it.

    The engine's samples are jobs: it is one object from the queue to the last token. The counts
    mirror the manager's, so that planning asks it nothing it has said before. They are those after
    every step that is open: a token that such a step samples is counted already, although its
    value is not known yet.
    """

    __slots__ = (
        "index",
        "is_running",
        "num_computed",
        "num_seats",
        "num_tokens",
        "order",
        "request",
        "sequence",
        "waits_for_tokens",
        "wants_drafts",
    )

    def __init__(self, request: Request, index: int = 0, *, waits_for_tokens: bool = False) -> None:
        self.request = request
        self.index = index
        """Position among the samples of its request; the first computes the prompt for all."""
        self.waits_for_tokens = waits_for_tokens
        """Its next token cannot be chosen before the value of its last one is known."""
        self.sequence: CachedSequence
        """Made by the scheduler when it is queued or forked."""
        self.order: tuple[float, int, int] = (request.priority, 0, index)
        """Priority, position in the order of submission, and among its samples."""
        self.num_seats = request.num_samples if index == 0 else 1
        """Sequences that run for it: itself, and the samples that are to be forked from it."""
        self.num_tokens = len(request.prompt_token_ids)
        """Prompt and output, the tokens that open steps sample included."""
        self.num_computed = 0
        """Tokens whose KV is in the cache, or will be by open steps."""
        self.is_running = False
        """Admitted: it holds blocks, or will once the open step is planned."""
        self.wants_drafts = False
        """There are guesses at what follows its last token, to be computed once that is known."""

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed

    @property
    def is_complete(self) -> bool:
        """Whether the open steps sample the last token that it may have."""
        return self.num_tokens >= self.request.max_tokens

    @property
    def is_awaited(self) -> bool:
        """Whether what follows the step that samples it has to wait for the token's value.

        So it is where tokens change what comes after them, where new samples are forked, and
        where drafts follow.
        """
        return self.waits_for_tokens or self.num_seats > 1 or self.wants_drafts


@dataclass(slots=True, eq=False)
class Entry:
    """One job's part of a step: `num_tokens` positions from `start` on."""

    job: Job
    start: int
    num_tokens: int
    num_cached: int
    samples: bool
    num_attached: int = 0
    """Of the cached tokens, those of blocks that were attached before the step was planned."""
    num_attached_blocks: int = 0

    @property
    def request(self) -> Request:
        """The request that these tokens belong to."""
        return self.job.request

    @property
    def end(self) -> int:
        """The position after the last one computed."""
        return self.start + self.num_tokens


@dataclass(slots=True, eq=False)
class ScheduledStep:
    """A plan that is ready to run: first `decodes`, one token each, then `chunks` of prompts.

    Decoding goes on for many steps with the same jobs, and then nothing is made for each of them:
    `decodes` is the very same tuple in every such step, so whoever has worked something out for
    it may keep that as long as it sees this tuple.

    The step keeps its jobs' counts: it moves them on as they are planned, and back as they are
    taken out. `drafts` are tokens that may follow those of decodes, computed with them; how many
    of these count is known when the step has run.
    """

    plan: StepPlan
    is_ahead: bool = False
    """Planned while the step before it runs: nobody can be preempted."""
    planned_time: float = field(default_factory=monotonic)
    """In seconds of `time.monotonic`."""
    decodes: tuple[Job, ...] = ()
    chunks: list[Entry] = field(default_factory=list)
    drafts: Mapping[Job, Sequence[int]] = field(default_factory=dict)
    num_bounded: int = 0
    """Tokens of prompts of which a step computes a bounded number (`Request.max_chunk`)."""

    @property
    def jobs(self) -> list[Job]:
        """Everyone who takes part, in plan order."""
        return [*self.decodes, *(entry.job for entry in self.chunks)]

    @property
    def sampling_jobs(self) -> list[Job]:
        """Those who get a token, in the order of the sampled logits' rows."""
        return [*self.decodes, *(entry.job for entry in self.chunks if entry.samples)]

    @property
    def num_tokens(self) -> int:
        """Tokens to compute."""
        return self.num_decoded + sum([entry.num_tokens for entry in self.chunks])

    @property
    def num_decoded(self) -> int:
        """Of these, the tokens of decodes and their drafts: they come first."""
        return len(self.decodes) + sum(map(len, self.drafts.values()))

    @property
    def awaited(self) -> list[Job]:
        """Jobs that no step can decode before this one's tokens are known."""
        return [job for job in self.sampling_jobs if job.is_awaited or job in self.drafts]

    @property
    def entries(self) -> list[Entry]:
        """All parts in plan order, for those who look on; as long as this is the newest step."""
        decodes = [Entry(job, job.num_computed - 1, 1, 0, samples=True) for job in self.decodes]
        return decodes + self.chunks

    def has_room(self, request: Request) -> bool:
        """Whether the bound of `request`, if there is one, leaves tokens for a chunk of it."""
        return self.num_bounded < request.max_chunk

    def add_decodes(self, jobs: tuple[Job, ...]) -> None:
        """Note jobs whose next token the plan decodes."""
        self.decodes = self.decodes + jobs if self.decodes else jobs
        for job in jobs:
            job.num_computed += 1
            job.num_tokens += 1

    def add_prefill(self, job: Job, num_tokens: int, num_cached: int) -> Entry:
        """Note a job of whose known tokens the plan computes some and reuses others."""
        start = job.num_computed + num_cached
        samples = start + num_tokens == job.num_tokens
        entry = Entry(job, start, num_tokens, num_cached, samples)
        self.chunks.append(entry)
        if job.request.max_chunk != inf:
            self.num_bounded += num_tokens
        job.num_computed = entry.end
        job.num_tokens += samples
        return entry

    def accept(self, counts: Iterable[int]) -> None:
        """Note how many tokens each of the sampling jobs got, now that the step is committed."""
        for job, count in zip(self.sampling_jobs, counts, strict=True):
            job.num_computed += count - 1
            job.num_tokens += count - 1
            if count <= len(self.drafts.get(job, ())) and job.sequence.is_live:
                job.sequence.trim(job.num_computed)  # what rejected drafts took

    def cancel(self, job: Job) -> list[Job]:
        """Take a job out of the plan again, if it is in it.

        Jobs that share what it was to compute in this step go with it; returns those.
        """
        jobs = self.jobs
        if job not in jobs:
            return []
        gone = {job.sequence.id, *self.plan.cancel(job.sequence)}
        decodes = [one for one in self.decodes if one.sequence.id in gone]
        chunks = [entry for entry in self.chunks if entry.job.sequence.id in gone]
        _move_back(decodes, chunks)
        self.decodes = tuple(one for one in self.decodes if one not in decodes)
        self.chunks = [entry for entry in self.chunks if entry not in chunks]
        bounded = [entry.num_tokens for entry in chunks if entry.request.max_chunk != inf]
        self.num_bounded -= sum(bounded)
        return [one for one in jobs if one is not job and one.sequence.id in gone]

    def rollback(self) -> None:
        """Undo the plan: it is as if nothing had been planned. The newest step goes first."""
        self.plan.rollback()
        _move_back(self.decodes, self.chunks)


def _move_back(decodes: Iterable[Job], chunks: Iterable[Entry]) -> None:
    """The counts of these jobs are what they were before the step."""
    for job in decodes:
        job.num_computed -= 1
        job.num_tokens -= 1
    for entry in chunks:
        entry.job.num_computed = entry.start - entry.num_cached
        entry.job.num_tokens -= entry.samples
