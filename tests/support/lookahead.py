"""A block manager as a multi-token-prediction head makes the engine use it."""

from typing import Any

from pyengine.kv_cache import BlockManager, Remapping, Sequence, StepPlan


class LookaheadPlan:
    """A plan whose decodes take slots for drafts too. None is accepted: commit releases them."""

    def __init__(self, plan: StepPlan, lookahead: int) -> None:
        self._plan = plan
        self._lookahead = lookahead
        self._decoded: list[Sequence] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plan, name)

    def decode(self, sequences: list[Sequence]) -> list[int]:
        self._decoded += sequences if self._lookahead else []
        return self._plan.decode(sequences, lookahead=self._lookahead)

    def commit(self, sampled: Any, counts: Any = None) -> list[Remapping]:
        remappings = self._plan.commit(sampled, counts)
        for sequence in self._decoded:
            if sequence.is_live:
                sequence.trim(sequence.num_tokens)
        return remappings


class LookaheadManager:
    """`BlockManager`, but for its plans. A scheduler takes it for one."""

    def __init__(self, manager: BlockManager, lookahead: int) -> None:
        self._manager = manager
        self._lookahead = lookahead

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    def begin_step(self, token_budget: int) -> LookaheadPlan:
        return LookaheadPlan(self._manager.begin_step(token_budget), self._lookahead)
