"""The errors for callers of pyengine.

There is one exception for each decision that a caller can make: correct the request, change the
settings, provide another model, try again, or create a new engine. Every message names the value
that was found, and says what to do.
"""

from collections.abc import Sequence
from copy import copy
from typing import Any, TypeVar

from pyengine.outputs import RequestOutput

_E = TypeVar("_E", bound=BaseException)


class PyEngineError(Exception):
    """Base of all errors of pyengine."""


class InvalidRequestError(PyEngineError, ValueError):
    """A request can never be served; it is refused at submission, before anything runs."""


class ContextLengthError(InvalidRequestError):
    """A prompt is longer than the model's context, or than the pool can hold."""


class AdapterError(InvalidRequestError):
    """A LoRA adapter is unknown, damaged, of another model, or of an unsupported kind."""


class QueueFullError(PyEngineError):
    """The queue is full, and no request was accepted. Try again later."""


class TenantQueueFullError(QueueFullError):
    """The part of the queue that this tenant has is full. Other tenants are not affected."""


class PinQuotaError(PyEngineError):
    """A pin was refused: its blocks exceed the quota. Pin less, or try again later."""


class EngineClosedError(PyEngineError):
    """The engine accepts no more requests: it is being drained, or is closed."""


class EngineAsleepError(PyEngineError):
    """The engine sleeps: its weights or its KV pool are not in memory."""


class NoReplicaError(PyEngineError):
    """No replica of a cluster accepts requests at the moment. Try again later."""


class ReplicaLostError(PyEngineError):
    """The replica was lost during the answer. Send the request again."""


class RequestFailedError(PyEngineError):
    """The forward pass fails repeatedly on this request; the other requests continued.

    `outputs` has the outputs of the whole call, in order, failed or not.
    """

    def __init__(self, message: str, outputs: Sequence[RequestOutput] = ()) -> None:
        super().__init__(message)
        self.outputs = list(outputs)


class StructuredOutputError(RequestFailedError):
    """An answer cannot continue in its grammar; the other requests continued.

    The grammar has become too complex, or leaves no token together with other settings.
    """


class HookError(RequestFailedError):
    """A logits processor or `stop_when` of a request failed; the other requests continued.

    The message names the callable. Its error is the ``__cause__``.
    """


class ConfigurationError(PyEngineError, ValueError):
    """Engine settings contradict each other, or do not fit the model or the machine."""


class DeviceMemoryError(PyEngineError):
    """Even the smallest step does not fit into the device's memory; it was rolled back."""


class BrokenLogitsError(PyEngineError):
    """No token can be chosen for some requests: their logits are NaN, or all minus infinity.

    ``rows`` are their rows in the batch; the other requests are not affected.
    """

    def __init__(self, rows: Sequence[int], num_rows: int) -> None:
        super().__init__(
            f"no token can be chosen in {len(rows)} of {num_rows} rows, the first of which is row "
            f"{rows[0]}: logits that are NaN, or none above minus infinity. Either the weights are "
            "damaged or too large for their dtype, or bad_words, allowed_token_ids, min_tokens "
            "and structured_outputs together leave no token"
        )
        self.rows = tuple(rows)
        self._num_rows = num_rows

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rows, self._num_rows)


class ModelLoadError(PyEngineError):
    """A model is missing, damaged, or of an unsupported kind."""


class WeightUpdateError(PyEngineError, ValueError):
    """New weights cannot be used. The engine goes on with those that it has."""


class WorkerError(PyEngineError):
    """A worker process failed in a step, which was rolled back; the engine continues."""


class EngineDeadError(PyEngineError):
    """The engine lost a worker process or its device and has ended: create a new one."""


def copy_error(error: _E) -> _E:
    """Return a copy of an exception, to be raised in another thread.

    Raising an exception changes its traceback, so each reader raises a copy. The copy starts with
    the traceback and the cause of `error`.
    """
    kind = type(error)
    try:
        copied = copy(error)
        is_same = type(copied) is kind and copied.args == error.args
    except Exception:  # not every class accepts its arguments
        is_same = False
    if not is_same:
        copied = kind.__new__(kind, *error.args)
        vars(copied).update(vars(error))
    notes = vars(error).get("__notes__")
    if notes is not None:
        vars(copied)["__notes__"] = list(notes)
    copied.__traceback__ = error.__traceback__
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied
