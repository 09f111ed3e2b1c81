"""Outputs on their way from the step to whoever asked, merged where the reader is slower."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from pyengine.core.outputs import CompletionOutput, Logprob, RequestOutput
from pyengine.core.sampling_params import RequestOutputKind


class OutputCollector:
    """What one request has given and its reader has not taken. See `OutputSink`.

    The thread that runs the step puts, another one may get; nobody waits for anybody here. With
    `DELTA` an item holds what is new since the item before, with `CUMULATIVE` everything so far,
    and with `FINAL_ONLY` there is one item, at the end. `on_item` is called, by the thread that
    puts, when there may be something to get.
    """

    def __init__(
        self, kind: RequestOutputKind, on_item: Callable[["OutputCollector"], object] | None = None
    ) -> None:
        self.streams = kind is not RequestOutputKind.FINAL_ONLY
        self.is_over = False
        """Whether the last item has been put."""
        self._kind = kind
        self._on_item = on_item
        self._items: deque[RequestOutput] = deque()
        self._so_far: dict[int, _SoFar] = {}
        self._error: Exception | None = None

    @property
    def has_item(self) -> bool:
        """Whether `get` gives something now."""
        return bool(self._items) or self._error is not None

    def put(self, output: RequestOutput) -> None:
        """See `OutputSink.put`."""
        self.is_over = self.is_over or output.finished
        self._items.append(output)
        if self._on_item is not None:
            self._on_item(self)

    def fail(self, error: Exception) -> None:
        """See `OutputSink.fail`: what has been put before can still be read."""
        self._error, self.is_over = error, True
        if self._on_item is not None:
            self._on_item(self)

    def get(self) -> RequestOutput | None:
        """Everything that has come, as one item; None if nothing has.

        Raises the error that the request ended with, once all else was read.
        """
        items = [self._items.popleft() for _ in range(len(self._items))]
        if not items:
            if self._error is not None:
                raise self._error
            return None
        if self._kind is RequestOutputKind.CUMULATIVE:
            return self._added_up(items)
        return items[0] if len(items) == 1 else _merged(items)

    def _added_up(self, items: list[RequestOutput]) -> RequestOutput:
        for item in items:
            for one in item.outputs:
                self._so_far.setdefault(one.index, _SoFar()).add(one)
        outputs = [self._so_far[index].snapshot() for index in sorted(self._so_far)]
        return replace(items[-1], outputs=outputs)


@dataclass(slots=True)
class _SoFar:
    """A completion as far as it was read."""

    last: CompletionOutput | None = None
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)

    def add(self, one: CompletionOutput) -> None:
        self.last = one
        self.text += one.text
        self.token_ids += one.token_ids
        self.logprobs += one.logprobs or ()

    def snapshot(self) -> CompletionOutput:
        assert self.last is not None
        return replace(
            self.last,
            text=self.text,
            token_ids=list(self.token_ids),
            logprobs=None if self.last.logprobs is None else list(self.logprobs),
        )


def _merged(items: Iterable[RequestOutput]) -> RequestOutput:
    """Several deltas as one."""
    parts: dict[int, _SoFar] = {}
    last = None
    for last in items:
        for one in last.outputs:
            parts.setdefault(one.index, _SoFar()).add(one)
    assert last is not None
    return replace(last, outputs=[parts[index].snapshot() for index in sorted(parts)])
