"""Logs one line per request: tokens, times, finish reason. Prompts and answers are never logged.

`middleware/refusals.py` logs refused requests.
"""

import json
import logging
import sys
from datetime import datetime
from logging.handlers import QueueHandler, QueueListener
from queue import SimpleQueue
from time import monotonic, time
from typing import Any, TextIO

from pyengine.engine.stats import StepResult
from pyengine.request.request import Request
from pyengine.server.metrics import reason_of
from pyengine.server.settings import LogFormat

_log = logging.getLogger("pyengine.request")


def request_line(request: Request) -> dict[str, Any]:
    """The log line of a finished request. Times are seconds since its arrival."""

    def after(moment: float | None) -> float | None:
        return None if moment is None else round(moment - request.arrival_time, 6)

    ended = monotonic() if request.result.finished_time is None else request.result.finished_time
    return {
        "id": request.request_id,
        "status": reason_of(request),
        "prompt_tokens": len(request.prompt_token_ids),
        "cached_tokens": request.progress.num_cached_tokens,
        "output_tokens": sum([len(sample.token_ids) for sample in request.sequences]),
        "preemptions": request.progress.num_preemptions,
        "queue_s": after(request.progress.scheduled_time),
        "first_token_s": after(request.result.first_token_time),
        "total_s": after(ended),
    }


class LineLog:
    """Writes log lines on a thread, so a slow terminal blocks nothing else."""

    def __init__(self, name: str, format: LogFormat = "text", stream: TextIO | None = None) -> None:
        self._name = name
        handler = logging.StreamHandler(sys.stderr if stream is None else stream)
        handler.setFormatter(_Json() if format == "json" else _Text())
        records: SimpleQueue[Any] = SimpleQueue()
        self._listener = QueueListener(records, handler)
        self._handler = _UnformattedQueue(records)
        self._is_closed = False
        self._listener.start()

    def put(self, line: dict[str, Any]) -> None:
        """Queue a line."""
        if self._is_closed:
            return
        record = logging.LogRecord(self._name, logging.INFO, "", 0, "", None, None)
        record.created, record.msg = time(), line
        self._handler.enqueue(record)

    def close(self) -> None:
        """Write the queued lines. Later ones are dropped."""
        self._is_closed = True
        self._listener.stop()


class RequestLog(LineLog):
    """An engine observer that logs each request when it finishes."""

    def __init__(self, format: LogFormat = "text", stream: TextIO | None = None) -> None:
        super().__init__(_log.name, format, stream)

    def on_arrival(self, request: Request) -> None:
        """Ignored."""

    def on_step(self, result: StepResult) -> None:
        """Ignored."""

    def on_finish(self, request: Request) -> None:
        """Log a finished request."""
        self.put(request_line(request))


class _UnformattedQueue(QueueHandler):
    """Queues records without formatting them: they hold plain values only."""

    def prepare(self, record: logging.LogRecord) -> logging.LogRecord:
        return record


def _moment(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created).astimezone().isoformat(timespec="milliseconds")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: Any = record.msg
        return json.dumps({"time": _moment(record), **line})


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line: Any = record.msg
        fields = [f"{name}={_word(value)}" for name, value in line.items() if value is not None]
        return " ".join([_moment(record), *fields])


def _word(value: object) -> str:
    """A value as one word, quoted if needed: clients choose request ids, and a line stays one."""
    text = str(value)
    return text if text.isprintable() and not set(text) & set(' "=') and text else json.dumps(text)
