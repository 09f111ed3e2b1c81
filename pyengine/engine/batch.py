"""Who gets a token in a step, row by row, and which prompts want to see logits."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from pyengine.engine.request_state import Completion, RequestState
from pyengine.runner import StepLogits
from pyengine.sampling import SamplingBatch, prompt_logprobs
from pyengine.scheduler import Entry, Job, ScheduledStep


@dataclass(frozen=True, slots=True)
class PromptPart:
    """A chunk of a prompt that wants log-probabilities; its rows begin at `first_row`."""

    state: RequestState
    entry: Entry
    first_row: int

    @property
    def due(self) -> range:
        """The positions whose logits give the next log-probabilities; empty if not in here."""
        first = self.state.num_prompt_logprobs - 1  # the first position without an entry
        last = min(self.entry.end, len(self.entry.request.prompt_token_ids) - 1)
        return range(first, last) if self.entry.start <= first < last else range(0)

    @property
    def rows(self) -> npt.NDArray[np.int64]:
        """The rows of these positions among the step's tokens."""
        due = self.due
        first = self.first_row + due.start - self.entry.start
        return np.arange(first, first + len(due), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Batch:
    """One completion per sampled row. Worked out once for as long as the same jobs decode.

    `positions[i]` is the place of the i-th row's token in its output; the tokens before it may
    not be known yet.

    A new prompt's logits serve all of its completions: it has a row for each of them, and
    `repeats` says how many rows each job has (None: one). `beginners` are the requests that get
    their first token. `decodes` are the jobs that this batch may serve again (None: no further
    step).
    """

    completions: list[Completion]
    sampling: SamplingBatch
    positions: npt.NDArray[np.int64]
    request_ids: list[str]
    repeats: torch.Tensor | None
    beginners: list[RequestState]
    prompt_parts: list[PromptPart]
    decodes: tuple[Job, ...] | None

    @property
    def is_awaited(self) -> bool:
        """Whether the step after it can be planned or sampled only once its tokens are known.

        So it is where new samples are forked, where penalties count the tokens, and where the
        prompt's log-probabilities are to be read.
        """
        return (
            self.repeats is not None or self.sampling.depends_on_output or bool(self.prompt_parts)
        )

    def following(self) -> "Batch":
        """The same completions, one token further."""
        return replace(self, positions=self.positions + 1)

    def rows_of(self, logits: torch.Tensor) -> torch.Tensor:
        """The logits that each completion draws from."""
        if self.repeats is None:
            return logits
        return logits.repeat_interleave(self.repeats.to(logits.device), dim=0)

    def own_tokens(self, token_ids: torch.Tensor) -> npt.NDArray[np.int64]:
        """The token of each job among those of its completions: the first."""
        tokens: npt.NDArray[np.int64] = token_ids.numpy()
        if self.repeats is not None:
            tokens = tokens[(self.repeats.cumsum(0) - self.repeats).numpy()]
        return tokens

    def prompt_rows(self) -> npt.NDArray[np.int64] | None:
        """Rows among the step's tokens whose logits prompts have asked for: int64, or None."""
        rows = [part.rows for part in self.prompt_parts if part.due]
        return np.concatenate(rows) if rows else None

    def collect_prompt_logprobs(self, logits: StepLogits) -> None:
        """Hand the logits of `prompt_rows` to the requests that asked for them."""
        rows = logits.extra
        for part in self.prompt_parts:
            due, prompt = part.due, part.entry.request.prompt_token_ids
            if due:
                following = prompt[due.start + 1 : due.stop + 1]
                top = part.state.params.num_prompt_logprobs(rows.shape[1]) or 0
                found = prompt_logprobs(rows[: len(due)], following, top)
                part.state.append_prompt_logprobs(found)
                rows = rows[len(due) :]


Running = Mapping[str, tuple[RequestState, Completion]]
"""Who runs, by the id under which the scheduler knows each sample."""


def make_batch(step: ScheduledStep, running: Running) -> Batch:
    """Who is in the step, as of now: what is aborted while it runs is still part of it."""
    completions: list[Completion] = []
    states: list[RequestState] = []
    beginners: list[RequestState] = []
    positions: list[int] = []
    counts: list[int] = []
    for job in step.sampling_jobs:
        state, completion = running[job.request.request_id]
        states.append(state)
        position = job.num_tokens - 1 - len(job.request.prompt_token_ids)
        if position > 0:
            completions.append(completion)
            counts.append(1)
        else:
            completions += state.completions
            counts.append(len(state.completions))
            beginners.append(state)
        positions += [position] * counts[-1]
    return Batch(
        completions=completions,
        sampling=SamplingBatch([one.sampling for one in completions]),
        positions=np.array(positions, dtype=np.int64),
        request_ids=list(dict.fromkeys([state.request.request_id for state in states])),
        repeats=None if len(completions) == len(states) else torch.tensor(counts),
        beginners=beginners,
        prompt_parts=list(_prompt_parts(step, running)),
        decodes=None if step.chunks or beginners else step.decodes,
    )


def _prompt_parts(step: ScheduledStep, running: Running) -> Iterator[PromptPart]:
    """The chunks of prompts that asked; a token that is decoded is never one of them."""
    first_row = len(step.decodes)
    for entry in step.chunks:
        state, _ = running[entry.request.request_id]
        if state.params.prompt_logprobs is not None:
            yield PromptPart(state, entry, first_row)
        first_row += entry.num_tokens
