"""One call per step: a batch of logits in, one token per request out."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pyengine.errors import BrokenLogitsError
from pyengine.sampling.batch import SamplingBatch
from pyengine.sampling.draw import draw
from pyengine.sampling.draw_cpu import largest_on_cpu
from pyengine.sampling.logprobs import PendingLogprobs, TokenLogprobs
from pyengine.sampling.state import Positions, SamplingState
from pyengine.sampling.token_masks import TokenMasks
from pyengine.utils.host_copy import HostCopy, upload


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one step, in the order of the logits' rows."""

    token_ids: torch.Tensor
    """int64 [B], on the CPU."""
    logprobs: list[TokenLogprobs | None]
    """B entries, ``None`` for requests that did not ask."""


class PendingSample:
    """Tokens that are being chosen on the device of the logits."""

    __slots__ = ("_copy", "_logprobs", "_rows", "token_ids")

    def __init__(
        self,
        token_ids: torch.Tensor,
        chosen: torch.Tensor,
        rows: Sequence[int],
        logprobs: PendingLogprobs | None,
    ) -> None:
        self.token_ids = token_ids
        """int64 [B], on the device: for work that is queued behind the sampling."""
        self._copy = HostCopy([token_ids, chosen])
        self._rows = rows
        self._logprobs = logprobs

    def result(self) -> Sampled:
        """Wait for the tokens. Raises :class:`BrokenLogitsError` where there are none to choose."""
        token_ids, chosen = self._copy.wait()
        has_choice = (chosen > -torch.inf).numpy()  # false for NaN too
        if not has_choice.all():
            raise BrokenLogitsError(np.flatnonzero(~has_choice).tolist(), len(has_choice))
        logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
        if self._logprobs is not None:
            for row, entry in zip(self._rows, self._logprobs.result(), strict=True):
                logprobs[row] = entry
        return Sampled(token_ids, logprobs)


class Sampler:
    """Chooses tokens as vLLM does, in this order.

    1. Log-probabilities are those of the raw logits.
    2. Stop tokens barred by ``min_tokens``, logit bias, penalties (:mod:`.adjust`); then tokens
       that the form of the answer does not allow (:mod:`.structured`).
    3. Greedy requests take the largest logit, of equal ones the lowest id.
    4. The others: temperature, min-p, top-k, top-p, draw (:mod:`.draw`).

    It holds no state and never changes that of a request: the caller records the token that it
    accepts with :meth:`SamplingState.append`. A row's token depends on that row and its state
    only, not on the rest of the batch.
    """

    def __call__(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState] | SamplingBatch,
        positions: Positions | None = None,
    ) -> Sampled:
        """Return one token per row of ``logits``, as :meth:`launch` does, and wait for them."""
        return self.launch(logits, states, positions).result()

    def launch(
        self,
        logits: torch.Tensor,
        states: Sequence[SamplingState] | SamplingBatch,
        positions: Positions | None = None,
        masks: TokenMasks | None = None,
    ) -> PendingSample:
        """Choose one token per row of ``logits``: [B, V], any floating type and device.

        Nothing waits for the device. ``positions[i]`` is the position of row i's token in its
        output, by default the length of the state's output: a state without its pending last
        token is one short. ``masks`` say which tokens may come in rows whose answers
        have a form to keep to; they are waited for here. Raises ``ValueError`` if rows and states
        don't correspond.
        """
        batch = states if isinstance(states, SamplingBatch) else SamplingBatch(states)
        _check_shapes(logits, batch)
        if not len(batch):
            return PendingSample(logits.new_empty(0, dtype=torch.int64), torch.empty(0), (), None)
        if positions is None:
            positions = [state.num_output for state in batch.states]
        candidates = logits
        if batch.adjustments is not None:
            candidates = batch.adjustments.apply(logits, positions)
        if masks is not None and batch.draws is None and logits.device.type == "cpu":
            token_ids, chosen = masks.largest(candidates)
        else:
            if masks is not None:
                candidates = masks.apply(candidates, to_copy=candidates is logits)
            token_ids = _choose(candidates, batch, positions)
            chosen = candidates.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        logprobs = None
        if batch.wanted:
            rows = upload(np.array([*batch.wanted]), logits.device)
            logprobs = PendingLogprobs(logits[rows], token_ids[rows], [*batch.wanted.values()])
        return PendingSample(token_ids, chosen, list(batch.wanted), logprobs)


def _choose(candidates: torch.Tensor, batch: SamplingBatch, positions: Positions) -> torch.Tensor:
    """One token per row: int64 [B], on the device of `candidates` [B, V]."""
    if batch.draws is None:
        return _largest(candidates)
    drawn = draw(candidates, batch.draws, positions)
    if len(drawn) == len(batch):
        return drawn
    token_ids = _largest(candidates)
    token_ids[upload(batch.draws.rows, drawn.device)] = drawn
    return token_ids


def _check_shapes(logits: torch.Tensor, batch: SamplingBatch) -> None:
    if logits.dim() != 2 or len(logits) != len(batch):
        raise ValueError(
            f"logits of shape {tuple(logits.shape)} for {len(batch)} requests: "
            "one row per request is needed"
        )
    if batch.vocab_size > logits.shape[1]:
        raise ValueError(
            f"logits of {logits.shape[1]} tokens for a request with a vocabulary of "
            f"{batch.vocab_size}"
        )


def _largest(logits: torch.Tensor) -> torch.Tensor:
    """Return the id of each row's largest logit, of equal ones the lowest: int64 [B]."""
    if logits.device.type == "cpu":
        return torch.from_numpy(largest_on_cpu(logits.detach()))
    return logits.argmax(1)
