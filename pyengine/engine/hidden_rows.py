"""The hidden states of a step, and how they reach the requests that want them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pyengine.request.prompt_states import PromptStates, States
from pyengine.scheduler.batch import ScheduledStep


class _PromptPart(NamedTuple):
    """Hidden states of a prompt's tokens: their first position, and their rows in the result."""

    receiver: PromptStates
    start: int
    result: slice


class HiddenRows:
    """The tokens of a step whose hidden states are wanted.

    They are tokens of prompts, and for `SamplingParams.return_hidden_states` those that the step
    samples after.
    """

    def __init__(self, step: ScheduledStep, first_rows: Sequence[int]) -> None:
        """`first_rows` are the rows that each sampling sequence begins at, and their number."""
        tokens: list[int] = []
        self._parts: list[_PromptPart] = []
        self._of_row: dict[int, int] = {}
        token, sampling = 0, 0
        for sequence in step.decodes:
            count = 1 + len(step.drafts.get(sequence, ()))
            if sequence.request.params.return_hidden_states is not None:
                for offset in range(count):
                    self._of_row[first_rows[sampling] + offset] = len(tokens)
                    tokens.append(token + offset)
            token, sampling = token + count, sampling + 1
        for entry in step.chunks:
            request, end = entry.sequence.request, entry.start + entry.num_tokens
            if request.prompt_states is not None:
                wanted = request.prompt_states.wanted(entry.start, end)
                if wanted:
                    result = slice(len(tokens), len(tokens) + len(wanted))
                    self._parts.append(_PromptPart(request.prompt_states, wanted.start, result))
                    tokens += range(
                        token + wanted.start - entry.start, token + wanted.stop - entry.start
                    )
            token += entry.num_tokens
            if entry.samples:
                if request.params.return_hidden_states is not None:
                    rows = range(first_rows[sampling], first_rows[sampling + 1])
                    self._of_row.update(dict.fromkeys(rows, len(tokens)))
                    tokens.append(token - 1)
                sampling += 1
        self.tokens: npt.NDArray[np.int64] = np.array(tokens, dtype=np.int64)

    def deliver(self, states: States) -> None:
        """Add the states `[R, hidden]` of `tokens` to their prompts."""
        for part in self._parts:
            part.receiver.extend(part.start, states[part.result])

    def of_row(self, row: int, states: States | None) -> States | None:
        """The state `[hidden]` that a row of logits comes from, if its request wants it."""
        index = self._of_row.get(row)
        return None if index is None or states is None else states[index].copy()
