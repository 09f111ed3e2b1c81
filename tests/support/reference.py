"""Whole generations compared with transformers: the same weights, its own attention and loop.

A batched forward is not bit-identical to a single one, so where two logits almost tie, either
token is right. Tokens have to be equal up to the first difference, and there the reference's
logits of the two candidates must lie within `NEAR_TIE` of each other; what follows cannot be
compared, since the texts have parted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal

from pyengine import RequestOutput
from pyengine.models.transformers_calls import quiet_transformers

NEAR_TIE = 1e-3
Stop = Literal["at_eos", "at_length"]


@dataclass(frozen=True)
class Difference:
    """The first token of a request that is not the reference's."""

    prompt: int
    position: int
    token: int | None
    expected: int | None
    gap: float
    """How far the reference's logits of the two are apart; infinite if one of them is none."""

    @property
    def is_near_tie(self) -> bool:
        return self.gap < NEAR_TIE


@dataclass(frozen=True)
class Counts:
    """The outcome of a comparison."""

    prompts: int
    tokens: int
    """Tokens that were compared."""
    differences: list[Difference] = field(default_factory=list)

    @property
    def different(self) -> list[Difference]:
        return [found for found in self.differences if not found.is_near_tie]

    @property
    def near_ties(self) -> int:
        return len(self.differences) - len(self.different)

    @property
    def equal(self) -> int:
        return self.prompts - len(self.differences)

    def __str__(self) -> str:
        return (
            f"{self.prompts} prompts, {self.tokens} tokens compared: {self.equal} equal, "
            f"{self.near_ties} near ties, {len(self.different)} different"
        )

    def assert_same(self) -> None:
        """Nothing differs, and near ties are what they should be: rare."""
        assert not self.different, f"{self}: {self.different}"
        assert self.prompts > 0 and self.near_ties <= max(1, self.prompts // 8), str(self)


class Reference:
    """A model folder in transformers, and the greedy continuations that its `generate` gives."""

    def __init__(
        self,
        folder: Path,
        *,
        attention: Literal["sdpa", "eager"],
        stop: Stop = "at_eos",
        device: str = "cpu",
    ) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        with quiet_transformers():
            model: Any = AutoModelForCausalLM.from_pretrained(
                folder, dtype=torch.float32, attn_implementation=attention
            )
        self._model = model.to(device).eval()
        config = self._model.generation_config
        eos = config.eos_token_id if stop == "at_eos" else None
        self._eos = frozenset(eos if isinstance(eos, list) else [eos]) - {None}
        config.eos_token_id = eos
        config.pad_token_id = 0  # masked or cut off wherever it appears
        self._known: dict[tuple[int, ...], list[int]] = {}

    def generate(
        self, prompts: Sequence[Sequence[int]], max_tokens: Sequence[int], *, batch_size: int = 1
    ) -> list[list[int]]:
        """Up to `max_tokens` tokens, each prompt its own; those of like length go together.

        Remembered: a prompt that comes again costs nothing, if it asks for no more tokens.
        """
        wanted = {tuple(p): limit for p, limit in zip(prompts, max_tokens, strict=True)}
        new = sorted((p for p in wanted if self._lacks(p, wanted[p])), key=len)
        for start in range(0, len(new), batch_size):
            batch = new[start : start + batch_size]
            self._generate_batch(batch, max(wanted[prompt] for prompt in batch))
        return [self._known[tuple(p)][:limit] for p, limit in zip(prompts, max_tokens, strict=True)]

    def _lacks(self, prompt: tuple[int, ...], limit: int) -> bool:
        known = self._known.get(prompt, [])
        return len(known) < limit and self._eos.isdisjoint(known)

    def _generate_batch(self, prompts: list[tuple[int, ...]], max_tokens: int) -> None:
        import torch

        width = max(map(len, prompts))
        ids = torch.zeros(len(prompts), width, dtype=torch.int64, device=self._model.device)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :] = torch.tensor(prompt)
            mask[row, width - len(prompt) :] = 1
        with quiet_transformers(), torch.inference_mode():
            full = self._model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False
            )
        for prompt, tokens in zip(prompts, full[:, width:].tolist(), strict=True):
            ends = [at for at, token in enumerate(tokens) if token in self._eos]
            self._known[prompt] = tokens[: ends[0] + 1] if ends else tokens

    def compare(
        self, outputs: Sequence[RequestOutput], max_tokens: Sequence[int], *, batch_size: int = 1
    ) -> Counts:
        """Hold finished outputs against the reference; `max_tokens` is each one's limit."""
        prompts = [output.prompt_token_ids for output in outputs]
        expected = self.generate(prompts, max_tokens, batch_size=batch_size)
        compared, differences = 0, []
        for index, output in enumerate(outputs):
            got, want = output.outputs[0].token_ids, expected[index]
            at = _first_difference(got, want)
            compared += len(want) if at is None else at + 1
            if at is not None:
                differences.append(self._difference(index, at, prompts[index], got, want))
        return Counts(len(outputs), compared, differences)

    def _difference(
        self, index: int, at: int, prompt: list[int], got: list[int], want: list[int]
    ) -> Difference:
        if at >= min(len(got), len(want)):
            token, expected = (tokens[at] if at < len(tokens) else None for tokens in (got, want))
            return Difference(index, at, token, expected, float("inf"))
        import torch

        with torch.inference_mode():
            ids = torch.tensor([prompt + want[:at]], device=self._model.device)
            logits = self._model(ids, logits_to_keep=1).logits[0, -1].double()
        gap = abs(float(logits[got[at]] - logits[want[at]]))
        return Difference(index, at, got[at], want[at], gap)


def _first_difference(got: list[int], want: list[int]) -> int | None:
    """The position of the first token that differs, or that only one of the two has."""
    for at, (token, expected) in enumerate(zip_longest(got, want)):
        if token != expected:
            return at
    return None
