"""Logits processors: callables of a request that change a row of logits, as in vLLM's V0 engine."""

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any

import numpy as np

from pyengine.errors import HookError
from pyengine.sampling.operations import Logits, operations_of
from pyengine.sampling_params import LogitsProcessor
from pyengine.utils.callables import name_of, takes
from pyengine.utils.validation import FLOAT32_MAX


class LogitsProcessors:
    """The logits processors of one sequence, and why the last call has failed."""

    def __init__(
        self, processors: Sequence[LogitsProcessor], prompt_token_ids: Sequence[int]
    ) -> None:
        """A processor that takes two arguments gets output tokens and logits.

        Otherwise the tokens of the prompt come first.
        """
        self._processors = [(processor, not takes(processor, 2)) for processor in processors]
        self._prompt_token_ids = np.asarray(prompt_token_ids).tolist()
        self.error: HookError | None = None
        """The error of the last call; None if it succeeded."""

    @property
    def names(self) -> str:
        """The names of the processors, for messages."""
        return ", ".join([name_of(processor) for processor, _ in self._processors])

    def sibling(self) -> "LogitsProcessors":
        """Return those of another sequence: the same callables."""
        return copy(self)

    def apply(self, output_token_ids: Sequence[int], row: Any) -> Any:
        """Return the changed logits; `row` itself, float32 [V], may be changed.

        After an error of a processor, which is kept in `error`, the result is any row.
        """
        self.error = None
        for processor, takes_prompt in self._processors:
            tokens = [list(output_token_ids)]
            if takes_prompt:
                tokens.insert(0, list(self._prompt_token_ids))
            try:
                changed = processor(*tokens, row)
                row = row if changed is None else _checked(changed, row)
            except Exception as error:
                message = f"the logits processor {name_of(processor)} failed after "
                message += f"{len(output_token_ids)} tokens: {error!r}"
                self.error = HookError(message)
                self.error.__cause__ = error
                return row
        return row


def _checked(changed: Any, row: Any) -> Any:
    """The result of a processor. Raises `TypeError` or `ValueError` if it is no row of logits."""
    kind = "a NumPy array" if isinstance(row, np.ndarray) else "a tensor"
    if isinstance(row, np.ndarray) != isinstance(changed, np.ndarray):
        raise TypeError(f"it returned a {type(changed).__name__}: the logits are {kind}")
    if changed.shape != row.shape:
        raise ValueError(
            f"it returned shape {tuple(changed.shape)}: the logits have {tuple(row.shape)}"
        )
    return changed


def process(logits: Logits, rows: Mapping[int, tuple[LogitsProcessors, Sequence[int]]]) -> Logits:
    """Return logits [B, V] in float32 with changed `rows`: their processors, and their outputs.

    `logits` is not changed. Infinity becomes the largest number.
    """
    operations = operations_of(logits)
    processed = operations.float32_copy(logits)
    for row, (processors, output_token_ids) in rows.items():
        before = processed[row]
        changed = processors.apply(output_token_ids, before)
        processed[row] = operations.clamp_max(before if processors.error else changed, FLOAT32_MAX)
    return processed  # type: ignore[no-any-return]
