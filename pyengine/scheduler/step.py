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
    """A plan that is ready to run, and whose tokens are in it, in plan order."""

    plan: StepPlan
    entries: list[Entry] = field(default_factory=list)

    @property
    def sampling(self) -> list[Entry]:
        """The entries that get a token, in the order of the sampled logits' rows."""
        return [entry for entry in self.entries if entry.samples]

    def add_decode(self, job: Job) -> None:
        """Note a job whose next token the plan decodes."""
        self.entries.append(Entry(job, job.num_computed, 1, 0, samples=True))

    def add_prefill(self, job: Job, num_tokens: int, num_cached: int) -> Entry:
        """Note a job of whose known tokens the plan computes some and adopts others."""
        start = job.num_computed + num_cached
        samples = start + num_tokens == job.num_tokens
        entry = Entry(job, start, num_tokens, num_cached, samples)
        self.entries.append(entry)
        return entry

    def cancel(self, job: Job) -> list[Job]:
        """Take a job out of the plan again, if it is in it.

        Jobs that share what it was to compute in this step go with it; returns those.
        """
        if all(entry.job is not job for entry in self.entries):
            return []
        gone = {job.sequence.id, *self.plan.cancel(job.sequence)}
        others = [e.job for e in self.entries if e.job is not job and e.job.sequence.id in gone]
        self.entries = [entry for entry in self.entries if entry.job.sequence.id not in gone]
        return others
