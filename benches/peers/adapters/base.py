"""The interface of a block manager in the benchmark.

`prompt`, `sampled`, `start`, `stop`, `evict_excess` and `blocks` prepare and look: they are never
timed. Everything else is. A work that a manager does not name in `works` is not asked of it.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.int64]

PREFILL, DECODE, FILL, STEPS, ABORT = "prefill", "decode", "fill", "steps", "abort"
FORK, PIN = "fork", "pin"


class Manager(ABC):
    """One pool of `num_blocks` blocks."""

    name: ClassVar[str]
    works: ClassVar[frozenset[str]]

    @abstractmethod
    def __init__(self, num_blocks: int, block_size: int) -> None:
        """An empty pool with prefix caching."""

    @abstractmethod
    def prompt(self, tokens: Tokens) -> Any:
        """The tokens in the form in which this manager's engine hands them over."""

    @abstractmethod
    def cold(self, prompt: Any) -> None:
        """A prompt of which nothing is cached: matched, allocated, registered, freed."""

    def hot(self, prompt: Any) -> None:
        """A prompt that is cached: matched, reused, the rest computed and registered, freed."""
        self.cold(prompt)

    def evict_excess(self) -> None:  # noqa: B027 (most have nothing to do)
        """Evicts what exceeds the pool, if the manager does not do so by itself."""

    # Decode: a set of running sequences, one token each per step.

    def start(self, prompts: list[Any]) -> None:
        """Computes these prompts and one sampled token each, and keeps them running."""
        raise NotImplementedError

    def sampled(self, tokens: Tokens) -> Any:
        """A step's sampled tokens in the form in which this manager takes them."""
        return tokens.tolist()

    def plan(self) -> None:
        """Gives every running sequence the slot of its next token."""
        raise NotImplementedError

    def commit(self, sampled: Any) -> None:
        """Takes the step as computed: appends the tokens, registers the blocks that became full."""
        raise NotImplementedError

    def fill(self) -> None:
        """Writes the planned step's inputs: ids, positions, slots, lengths, block tables."""
        raise NotImplementedError

    def stop(self) -> None:
        """Frees every running sequence."""
        raise NotImplementedError

    # Steps of whole prompts.

    def submit(self, prompt: Any) -> Any:
        """A request, before it is admitted. What is hashed once per request is hashed here."""
        raise NotImplementedError

    def open_step(self, budget: int) -> None:
        """Begins a step that computes at most `budget` tokens."""
        raise NotImplementedError

    def admit(self, request: Any, budget: int) -> int | None:
        """Plans the whole request: tokens to compute, or None if it does not fit this step."""
        raise NotImplementedError

    def close_step(self, requests: list[Any]) -> None:
        """Takes the step as computed."""
        raise NotImplementedError

    def release(self, requests: list[Any]) -> None:
        """Frees them."""
        raise NotImplementedError

    def blocks(self, request: Any) -> list[int]:
        """The block table of an admitted request."""
        raise NotImplementedError
