"""Calls of tokenizers, which come with models: one error, and a time limit."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from threading import Thread, local
from typing import Any, NoReturn, TypeVar

from pyengine.errors import InvalidRequestError

_T = TypeVar("_T")


def within(seconds: float, work: Callable[[], _T], who: str) -> _T:
    """The result of `work`, or its error, computed in a thread so that it can be abandoned.

    Raises `InvalidRequestError` about `who` after `seconds`. The work is left to itself then, as
    libraries in Rust cannot be interrupted: the thread is a daemon, and `unfinished_work` lists it.
    """
    result: Future[_T] = Future()
    Thread(target=_run, args=(work, result), name="pyengine-timed", daemon=True).start()
    try:
        return result.result(seconds)
    except TimeoutError:
        if result.done():  # the work's own
            raise
        raise out_of_time(who, seconds) from None
    finally:
        if not result.done() and hasattr(_here, "unfinished"):
            _here.unfinished.append(result)


def _run(work: Callable[[], _T], result: Future[_T]) -> None:
    try:
        result.set_result(work())
    except BaseException as error:
        result.set_exception(error)


def out_of_time(who: str, seconds: float) -> InvalidRequestError:
    """The error of a text for which `who` needs more than `seconds`."""
    return InvalidRequestError(
        f"{who} was still at work after {seconds:g} seconds: send a shorter text"
    )


_here = local()


@contextmanager
def unfinished_work() -> Iterator[list[Future[Any]]]:
    """Yields a list of the work that calls of `within` in this block leave to itself."""
    unfinished: list[Future[Any]] = []
    _here.unfinished = unfinished
    try:
        yield unfinished
    finally:
        del _here.unfinished


@contextmanager
def tokenizer_errors() -> Iterator[None]:
    """Errors of a tokenizer become an `InvalidRequestError`."""
    try:
        yield
    except BaseException as error:
        raise_tokenizer_error(error)


def raise_tokenizer_error(error: BaseException) -> NoReturn:
    """Raise a failure of a tokenizer as an `InvalidRequestError`, and other errors as they are."""
    if isinstance(error, InvalidRequestError) or not is_failure(error):
        raise error
    raise InvalidRequestError(f"the model's tokenizer fails on this text: {error}") from error


def is_failure(error: BaseException) -> bool:
    """True unless the process is to end. Libraries in Rust panic, which is no `Exception`."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"
