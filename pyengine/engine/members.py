"""Who takes part in a step, and which of its rows are theirs."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pyengine.engine.request_state import Completion, RequestState
from pyengine.runner import StepLogits
from pyengine.sampling import prompt_logprobs
from pyengine.scheduler import Entry


@dataclass(frozen=True, slots=True)
class Member:
    """One entry of the plan, and the request behind it.

    `completions` get a token each from the sampled rows `rows`: the one that runs, or all of a new
    prompt. `rows` is empty while the prompt is not through.
    """

    entry: Entry
    state: RequestState
    completions: list[Completion]
    rows: range


def _due(members: list[Member]) -> Iterator[tuple[Member, int, int]]:
    """(member, first row, rows) of the prompt positions whose log-probabilities are due."""
    first_row = 0
    for one in members:
        if one.state.params.prompt_logprobs is not None:
            due = one.state.num_prompt_logprobs - 1  # the first position without an entry
            last = min(one.entry.end, len(one.entry.request.prompt_token_ids) - 1)
            if one.entry.start <= due < last:
                yield one, first_row + due - one.entry.start, last - due
        first_row += one.entry.num_tokens


def prompt_rows(members: list[Member]) -> npt.NDArray[np.int64] | None:
    """Rows among the step's tokens whose logits prompts have asked for: int64, or None."""
    rows = [np.arange(first, first + count) for _, first, count in _due(members)]
    return np.concatenate(rows).astype(np.int64) if rows else None


def collect_prompt_logprobs(members: list[Member], logits: StepLogits) -> None:
    """Hand the logits of `prompt_rows` to the requests that asked for them."""
    at = 0
    for one, _, count in list(_due(members)):
        due = one.state.num_prompt_logprobs - 1
        following = one.entry.request.prompt_token_ids[due + 1 : due + 1 + count]
        top = one.state.params.prompt_logprobs or 0
        rows = logits.extra[at : at + count]
        one.state.append_prompt_logprobs(prompt_logprobs(rows, following, top))
        at += count
