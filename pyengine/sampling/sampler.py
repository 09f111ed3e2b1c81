"""One call per step: a batch of logits in, one token per request out."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pyengine.sampling.adjust import adjusted_logits
from pyengine.sampling.batch import SamplingBatch
from pyengine.sampling.draw import draw
from pyengine.sampling.logprobs import TokenLogprobs, token_logprobs
from pyengine.sampling.state import SamplingState


@dataclass(frozen=True, slots=True)
class Sampled:
    """The tokens of one step, in the order of the logits' rows."""

    token_ids: torch.Tensor
    """int64 [B], on the CPU."""
    logprobs: list[TokenLogprobs | None]
    """B entries, ``None`` for requests that did not ask."""


class Sampler:
    """Chooses tokens as vLLM does, in this order.

    1. Log-probabilities are those of the raw logits.
    2. Stop tokens barred by ``min_tokens``, logit bias, penalties (:mod:`.adjust`).
    3. Greedy requests take the largest logit, of equal ones the lowest id.
    4. The others: temperature, min-p, top-k, top-p, draw (:mod:`.draw`).

    It holds no state and never changes that of a request: the caller records the token that it
    accepts with :meth:`SamplingState.append`. A row's token depends on that row and its state
    only, not on the rest of the batch.
    """

    def __call__(
        self, logits: torch.Tensor, states: Sequence[SamplingState] | SamplingBatch
    ) -> Sampled:
        """Return one token per row of ``logits``: [B, V], any floating type and device.

        Raises ``ValueError`` if rows and states don't correspond.
        """
        batch = states if isinstance(states, SamplingBatch) else SamplingBatch(states)
        _check_shapes(logits, batch)
        if not len(batch):
            return Sampled(torch.empty(0, dtype=torch.int64), [])
        candidates = adjusted_logits(logits, batch.states) if batch.may_change_logits else logits
        if not batch.random_rows:
            token_ids = _largest(candidates)
        elif len(batch.random_rows) == len(batch):
            token_ids = draw(candidates.float(), batch.draws)
        else:
            token_ids = _largest(candidates)
            index = torch.tensor(batch.random_rows, device=logits.device)
            token_ids[index] = draw(candidates[index].float(), batch.draws)
        return Sampled(token_ids.cpu(), _requested_logprobs(logits, token_ids, batch))


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
    """Return the id of each row's largest logit, of equal ones the lowest: int64 [B].

    NumPy's argmax uses vector instructions and torch's on the CPU does not: 13 times as fast.
    """
    if logits.device.type == "cpu" and logits.dtype == torch.float32:
        return torch.from_numpy(logits.detach().numpy().argmax(1))
    return logits.argmax(1)


def _requested_logprobs(
    logits: torch.Tensor, token_ids: torch.Tensor, batch: SamplingBatch
) -> list[TokenLogprobs | None]:
    """Fill in the log-probabilities of the requests that asked; ``logits`` are the raw ones."""
    results: list[TokenLogprobs | None] = [None] * len(batch)
    if batch.wanted:
        index = torch.tensor(list(batch.wanted), device=logits.device)
        found = token_logprobs(logits[index], token_ids[index], list(batch.wanted.values()))
        for row, entry in zip(batch.wanted, found, strict=True):
            results[row] = entry
    return results
