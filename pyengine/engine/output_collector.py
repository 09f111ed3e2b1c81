"""Outputs on their way from the step to whoever asked, merged where the reader is slower."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from threading import Lock

from pyengine.outputs import CompletionOutput, Logprob, RequestOutput
from pyengine.sampling_params import RequestOutputKind


class OutputCollector:
    """What one request has given and its reader has not taken. See `OutputSink`.

    The thread that runs the step puts, another one may get; nobody waits here for more than a
    moment. With `DELTA` an item holds what is new since the item before, with `CUMULATIVE`
    everything so far, and with `FINAL_ONLY` there is one item, at the end. The last item is
    `finished`. What has not been read is one item, however slow the reader. `on_item` is called,
    by the thread that puts, when there may be something to get.
    """

    def __init__(
        self, kind: RequestOutputKind, on_item: Callable[["OutputCollector"], object] | None = None
    ) -> None:
        self.streams = kind is not RequestOutputKind.FINAL_ONLY
        self._kind = kind
        self._on_item = on_item
        self._lock = Lock()
        self._unread: RequestOutput | _Sum | None = None
        self._so_far = _Sum()
        self._error: Exception | None = None

    @property
    def has_item(self) -> bool:
        """Whether `get` gives something now."""
        return self._unread is not None or self._error is not None

    def put(self, output: RequestOutput) -> None:
        """See `OutputSink.put`."""
        with self._lock:
            unread = self._unread
            if unread is None:
                self._unread = output
            elif isinstance(unread, _Sum):
                unread.add(output)
            else:
                self._unread = _Sum()
                self._unread.add(unread)
                self._unread.add(output)
        if self._on_item is not None:
            self._on_item(self)

    def fail(self, error: Exception) -> None:
        """See `OutputSink.fail`: what has been put before can still be read."""
        self._error = error
        if self._on_item is not None:
            self._on_item(self)

    def get(self) -> RequestOutput | None:
        """Everything that has come, as one item; None if nothing has.

        Raises the error that the request ended with, once all else was read.
        """
        with self._lock:
            unread, self._unread = self._unread, None
        if unread is None:
            if self._error is not None:
                raise self._error
            return None
        item = unread.snapshot() if isinstance(unread, _Sum) else unread
        if self._kind is not RequestOutputKind.CUMULATIVE:
            return item
        self._so_far.add(item)
        return self._so_far.snapshot()


class _Sum:
    """Several deltas as one."""

    def __init__(self) -> None:
        self._last: RequestOutput | None = None
        self._parts: dict[int, _SoFar] = {}

    def add(self, item: RequestOutput) -> None:
        self._last = item
        for one in item.outputs:
            self._parts.setdefault(one.index, _SoFar()).add(one)

    def snapshot(self) -> RequestOutput:
        assert self._last is not None
        outputs = [self._parts[index].snapshot() for index in sorted(self._parts)]
        return replace(self._last, outputs=outputs)


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
