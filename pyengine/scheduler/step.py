"""What the scheduler decided for one step."""

from dataclasses import dataclass, field

from pyengine.cache import Sequence, StepPlan
from pyengine.core.request import Request


@dataclass(slots=True, eq=False)
class Job:
    """A request inside the scheduler: its sequence in the manager, and the counts of it.

    The counts mirror the manager's, so that planning asks it nothing it has said before.
    """

    request: Request
    sequence: Sequence
    arrival: tuple[int, int]
    """Position in the order of submission, and among its samples: first come, first served."""
    num_seats: int
    """Sequences that run for it: itself, and the samples that are to be forked from it."""
    num_tokens: int
    """Tokens known: prompt and output."""
    num_computed: int = 0
    """Tokens whose KV is in the cache, by committed steps."""
    is_running: bool = False
    """Admitted: it holds blocks, or will once the open step is planned."""

    @property
    def num_uncomputed(self) -> int:
        """Tokens still to be computed before the next one can be sampled."""
        return self.num_tokens - self.num_computed


@dataclass(slots=True, eq=False)
class Entry:
    """One job's part of a step: `num_tokens` positions from `start` on."""

    job: Job
    start: int
    num_tokens: int
    num_cached: int
    samples: bool

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
    """

    plan: StepPlan
    decodes: tuple[Job, ...] = ()
    chunks: list[Entry] = field(default_factory=list)

    @property
    def jobs(self) -> list[Job]:
        """Everyone who takes part, in plan order."""
        return [*self.decodes, *(entry.job for entry in self.chunks)]

    @property
    def sampling_jobs(self) -> list[Job]:
        """Those who get a token, in the order of the sampled logits' rows."""
        return [*self.decodes, *(entry.job for entry in self.chunks if entry.samples)]

    @property
    def entries(self) -> list[Entry]:
        """All parts in plan order, for those who look on; positions as of before the commit."""
        decodes = [Entry(job, job.num_computed, 1, 0, samples=True) for job in self.decodes]
        return decodes + self.chunks

    @property
    def sampling(self) -> list[Entry]:
        """The entries that get a token, in the order of the sampled logits' rows."""
        return [entry for entry in self.entries if entry.samples]

    def add_decodes(self, jobs: tuple[Job, ...]) -> None:
        """Note jobs whose next token the plan decodes."""
        self.decodes = self.decodes + jobs if self.decodes else jobs

    def add_prefill(self, job: Job, num_tokens: int, num_cached: int) -> Entry:
        """Note a job of whose known tokens the plan computes some and adopts others."""
        start = job.num_computed + num_cached
        samples = start + num_tokens == job.num_tokens
        entry = Entry(job, start, num_tokens, num_cached, samples)
        self.chunks.append(entry)
        return entry

    def cancel(self, job: Job) -> list[Job]:
        """Take a job out of the plan again, if it is in it.

        Jobs that share what it was to compute in this step go with it; returns those.
        """
        jobs = self.jobs
        if job not in jobs:
            return []
        gone = {job.sequence.id, *self.plan.cancel(job.sequence)}
        self.decodes = tuple(one for one in self.decodes if one.sequence.id not in gone)
        self.chunks = [entry for entry in self.chunks if entry.job.sequence.id not in gone]
        return [one for one in jobs if one is not job and one.sequence.id in gone]
