"""The sampler: a batch of logits in, one token per request out; log-probabilities on request."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from pyengine.errors import BrokenLogitsError
from pyengine.sampling.draws import DrawBatch
from pyengine.sampling.logits_processors import LogitsProcessors, process
from pyengine.sampling.logprobs import PendingLogprobs, TokenLogprobs
from pyengine.sampling.operations import Logits, TokenIds, operations_of
from pyengine.sampling.penalties import LARGEST, Penalties
from pyengine.sampling.state import Positions, SamplingState, uniforms
from pyengine.sampling.token_masks import TokenMasks
from pyengine.utils.devices import Device
from pyengine.utils.host_copy import HostCopy, OnDevices, upload

if TYPE_CHECKING:
    import torch

_Ids: TypeAlias = npt.NDArray[np.int64]


class Adjustments:
    """The changes of a batch's logits; computed once, valid for many steps.

    In vLLM's order: tokens that are not allowed, bad words, and stop tokens before
    ``min_tokens`` become -inf, then the bias is added, then penalties apply; the forced end of
    thinking comes last. They change few logits of a row, which are gathered, changed and written
    back by flat index (row * vocabulary + token).
    """

    def __init__(self, states: Sequence[SamplingState]) -> None:
        rows = dict(enumerate(states))
        self._allowed = _Cells({row: item.allowed_ids for row, item in rows.items()})
        self._barred = _Cells({row: item.barred_ids for row, item in rows.items()})
        self._stops = _Cells({row: item.stop_ids for row, item in rows.items()})
        self._stops_until = np.array([state.params.min_tokens for state in states])[
            self._stops.rows
        ]
        self._bias = _Cells({row: item.bias_ids for row, item in rows.items()})
        self._bias_values = OnDevices(np.concatenate([state.bias_values for state in states]))
        self._allowed_rows = OnDevices(np.unique(self._allowed.rows))
        self._worded = [(row, item) for row, item in rows.items() if item.bad_words]
        self._penalties = Penalties(rows)
        self._thinking = {
            row: item.thinking for row, item in rows.items() if item.thinking is not None
        }

    def apply(self, logits: Logits, positions: Positions) -> Logits:
        """Return the changed logits: float32 [B, V], or ``logits`` itself if none changes.

        ``positions[i]`` is the position of row i's token in its output. ``logits`` is not changed.
        """
        stops = np.asarray(positions, dtype=np.int64)[self._stops.rows] < self._stops_until
        words = {row: ids for row, item in self._worded if len(ids := item.barred_by_output())}
        is_static = len(self._allowed) or len(self._barred) or len(self._bias)
        forced = {
            row: np.array([budget.forced])
            for row, budget in self._thinking.items()
            if budget.forced is not None
        }
        if not (is_static or stops.any() or words or self._penalties.is_due or forced):
            return logits
        operations = operations_of(logits)
        device, adjusted = operations.device, operations.float32_copy(logits)
        flat, vocab_size = adjusted.reshape(-1), adjusted.shape[1]
        if len(self._allowed):
            index = self._allowed.index(vocab_size, device)
            gathered = flat[index]
            operations.fill(adjusted, self._allowed_rows.on(device), -math.inf)
            flat[index] = gathered
        if len(self._barred):
            operations.fill(flat, self._barred.index(vocab_size, device), -math.inf)
        if words:
            operations.fill(flat, _Cells(words).index(vocab_size, device), -math.inf)
        if stops.any():
            index = self._stops.index(vocab_size, device)
            if not stops.all():
                index = index[upload(np.flatnonzero(stops), device)]
            operations.fill(flat, index, -math.inf)
        if len(self._bias):
            index = self._bias.index(vocab_size, device)
            with np.errstate(over="ignore"):
                biased = flat[index] + self._bias_values.on(device)
            flat[index] = operations.clamp_max(biased, LARGEST)
        self._penalties.apply(flat, vocab_size)
        if forced:
            cells = _Cells(forced)
            operations.fill(adjusted, upload(cells.rows, device), -math.inf)
            operations.fill(flat, cells.index(vocab_size, device), 0.0)
        return adjusted  # type: ignore[no-any-return]


class _Cells:
    """Cells of a table of logits: (row, token id), in the order of `ids_by_row`."""

    def __init__(self, ids_by_row: Mapping[int, _Ids]) -> None:
        id_lists = [ids for ids in ids_by_row.values() if len(ids)]
        lengths = [len(ids) for ids in ids_by_row.values()]
        self.rows: _Ids = np.repeat(np.array([*ids_by_row], dtype=np.int64), lengths)
        self._ids: _Ids = np.concatenate(id_lists) if id_lists else np.empty(0, dtype=np.int64)
        self._cached: tuple[int, Device | torch.device, Any] | None = None

    def __len__(self) -> int:
        return len(self.rows)

    def index(self, vocab_size: int, device: "Device | torch.device") -> Any:
        """Their flat index: int64 [n]; raises `ValueError` for ids outside the vocabulary."""
        if self._cached is None or self._cached[:2] != (vocab_size, device):
            if len(self._ids) and not 0 <= self._ids.min() <= self._ids.max() < vocab_size:
                raise ValueError(
                    f"token ids {self._ids.min()} to {self._ids.max()} in rows of "
                    f"{vocab_size} logits"
                )
            index = upload(self.rows * vocab_size + self._ids, device)
            self._cached = (vocab_size, device, index)
        return self._cached[2]


class SamplingBatch:
    """Requests in the order of the logits' rows, and their constant settings.

    One object serves all steps that sample the same requests.
    """

    def __init__(self, states: Sequence[SamplingState]) -> None:
        self.states = tuple(states)
        self.vocab_size = max([state.vocab_size for state in states], default=0)
        """The largest of them."""
        self.depends_on_output = any([state.depends_on_output for state in states])
        may_change_logits = any([state.may_change_logits for state in states])
        self.adjustments = Adjustments(self.states) if may_change_logits else None
        """``None``: no logits change."""
        self.matchers = {
            row: state.matcher for row, state in enumerate(states) if state.matcher is not None
        }
        """The matchers of rows with a grammar."""
        self.processors: dict[int, LogitsProcessors] = {}
        if self.depends_on_output:
            self.processors = {
                row: state.processors for row, state in enumerate(states) if state.processors
            }
        """The logits processors of rows that have any."""
        random_rows = [row for row, state in enumerate(states) if state.is_drawn]
        self.draws = DrawBatch(states, random_rows) if random_rows else None
        """The drawn rows; the others are greedy. ``None``: all are greedy."""
        self.num_logprobs = {
            row: state.num_logprobs
            for row, state in enumerate(states)
            if state.num_logprobs is not None
        }
        """The number of log-probabilities of each row that reports them."""
        self.logprob_rows = (
            OnDevices(np.array([*self.num_logprobs], dtype=np.int64)) if self.num_logprobs else None
        )
        """These rows; ``None``: there are none."""


class Sampled:
    """The tokens of one step, in the order of the logits' rows: chosen on the device, then read."""

    def __init__(
        self,
        token_ids: TokenIds,
        chosen: Any,
        rows: Sequence[int] = (),
        pending: PendingLogprobs | None = None,
    ) -> None:
        """`chosen` are the tokens' logits; `pending` the log-probabilities of `rows`."""
        self.token_ids: Any = token_ids
        """int64 [B], on the logits' device, for work queued after the sampling; after `wait` an
        array."""
        self.logprobs: list[TokenLogprobs | None] = []
        """After `wait` B entries, ``None`` for requests without log-probabilities."""
        self.pending_prompts: PendingLogprobs | None = None
        """Log-probabilities of the prompts in the step."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        """The same after `wait`, one prompt after the other."""
        self.pending_hidden: Callable[[], npt.NDArray[np.float32]] | None = None
        self.hidden: npt.NDArray[np.float32] | None = None
        """After `wait` the hidden states that the step was asked for: float32 [R, hidden]."""
        self._chosen = chosen
        self._copy = None if isinstance(token_ids, np.ndarray) else HostCopy([token_ids, chosen])
        self._rows = rows
        self._pending = pending

    def wait(self) -> "Sampled":
        """Wait for the tokens. Raises :class:`BrokenLogitsError` for a row without a choice."""
        if self._copy is not None:
            token_ids, self._chosen = self._copy.wait()
            self.token_ids, self._copy = token_ids.numpy(), None
        has_choice = np.asarray(self._chosen > -math.inf)  # false for NaN too
        if not has_choice.all():
            raise BrokenLogitsError(np.flatnonzero(~has_choice).tolist(), len(has_choice))
        self.logprobs = [None] * len(self.token_ids)
        if self._pending is not None:
            for row, entry in zip(self._rows, self._pending.result(), strict=True):
                self.logprobs[row] = entry
        if self.pending_prompts is not None:
            self.prompt_logprobs = self.pending_prompts.result()
        if self.pending_hidden is not None:
            self.hidden = self.pending_hidden()
        return self


def sample(
    logits: Logits,
    states: Sequence[SamplingState] | SamplingBatch,
    positions: Positions | None = None,
    masks: TokenMasks | None = None,
) -> Sampled:
    """Choose one token per row of ``logits``: [B, V], any floating type and device.

    As vLLM does, in this order:

    1. Log-probabilities are those of the raw logits. Then logits processors change them.
    2. Stop tokens barred by ``min_tokens``, bias, penalties (:class:`Adjustments`); then tokens
       outside the grammar of the answer (:mod:`.token_masks`).
    3. Greedy requests take the largest logit, of equal ones the lowest id.
    4. The others: temperature, min-p, top-k, top-p, draw (:func:`draw`).

    A row's token depends on that row and its state only, not on the rest of the batch. No state
    changes: the caller records an accepted token with :meth:`SamplingState.append`.

    Arrays are sampled from at once; tensors do not wait for the device. ``positions[i]`` is the
    position of row i's token in its output, by default the length of the state's output: a state
    without its pending last token is one short. ``masks`` are the allowed tokens of rows with a
    grammar; this waits for them. Raises ``ValueError`` if rows and states don't correspond.
    """
    batch = states if isinstance(states, SamplingBatch) else SamplingBatch(states)
    num_rows = len(batch.states)
    if logits.ndim != 2 or len(logits) != num_rows or batch.vocab_size > logits.shape[1]:
        raise _wrong_shape(logits, batch)
    operations = operations_of(logits)
    if positions is None:
        positions = [state.num_output for state in batch.states]
    candidates = logits
    if batch.processors:
        outputs = {
            row: (processors, batch.states[row].token_ids)
            for row, processors in batch.processors.items()
        }
        candidates = process(logits, outputs)
    if batch.adjustments is not None:
        candidates = batch.adjustments.apply(candidates, positions)
    if masks is not None and batch.draws is None and isinstance(candidates, np.ndarray):
        token_ids, chosen = masks.largest(candidates)
    else:
        if masks is not None:
            candidates = masks.apply(candidates, to_copy=candidates is logits)
        if batch.draws is None:
            token_ids = operations.largest(candidates)
        else:
            token_ids = _drawn(candidates, batch.draws, positions)
        chosen = operations.logits_of(candidates, token_ids)
    if batch.logprob_rows is None:
        return Sampled(token_ids, chosen)
    rows = None  # all of them, in order
    reported = token_ids
    if len(batch.num_logprobs) < num_rows:
        rows = batch.logprob_rows.on(operations.device)
        reported = token_ids[rows]
    logprobs = PendingLogprobs(logits, reported, [*batch.num_logprobs.values()], rows)
    return Sampled(token_ids, chosen, list(batch.num_logprobs), logprobs)


def _drawn(candidates: Logits, draws: DrawBatch, positions: Positions) -> Any:
    """One token per row, some of them drawn: int64 [B], of the kind of `candidates` [B, V]."""
    drawn = draw(candidates, draws, positions)
    if len(drawn) == len(candidates):
        return drawn
    operations = operations_of(candidates)
    token_ids = operations.largest(candidates)
    token_ids[draws.row_ids.on(operations.device)] = drawn
    return token_ids


def _wrong_shape(logits: Logits, batch: SamplingBatch) -> ValueError:
    if logits.ndim != 2 or len(logits) != len(batch.states):
        return ValueError(
            f"logits of shape {tuple(logits.shape)} for {len(batch.states)} requests: "
            "one row per request is needed"
        )
    return ValueError(
        f"logits of {logits.shape[1]} tokens for a request with a vocabulary of {batch.vocab_size}"
    )


def draw(logits: Logits, batch: DrawBatch, positions: Positions) -> TokenIds:
    """Return one drawn token for each row of the batch: int64 [R], of the kind of the logits.

    ``logits`` are [B, V], among them the batch's rows; ``positions[i]`` is the position of row i's
    token in its output, which determines its random number.

    Every filter is a *floor*: tokens below it are out, all others stay, whatever the order of equal
    logits. The draw is by inverse transform: the first token, in order of id, at which the
    cumulated weight exceeds u times the total, in float64: a row's token depends on that row alone.
    """
    numbers = uniforms(batch.seeds, np.asarray(positions)[batch.rows])
    drawn: TokenIds = operations_of(logits).draw(logits, batch, numbers)
    return drawn
