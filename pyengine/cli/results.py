"""The results of a batch: into a file as they come, found there by a later run, or to the terminal.

Each line of the file is a JSON object. Lines are in the order in which the answers ended; `index`
is the prompt's position among those of the run, and `id` its own. Nothing that is in a file is
ever overwritten: a run writes into a new or empty file, or, with `--resume`, behind what is there.
"""

import fcntl
import hashlib
import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any, Protocol

from pyengine.cli.display import write
from pyengine.cli.prompts import (
    AnyPrompt,
    MessagesPrompt,
    Template,
    TextPrompt,
    TokenPrompt,
    text_of,
)
from pyengine.core.errors import InvalidRequestError
from pyengine.core.outputs import RequestOutput
from pyengine.core.sampling_params import SamplingParams
from pyengine.core.settings import EngineSettings

_START = b'{"index": '


@dataclass(frozen=True)
class Batch:
    """The prompts of a run, and all that their answers depend on."""

    prompts: Sequence[AnyPrompt]
    template: Template
    params: SamplingParams
    settings: EngineSettings

    def key(self, index: int) -> tuple[str, str | int]:
        """What a prompt is known by: its id, or where it has none its position."""
        name = self.prompts[index].id
        return ("index", index) if name is None else ("id", name)

    def fingerprint(self, index: int) -> str:
        """The same for the same prompt, template, model, seed and sampling parameters only."""
        text = json.dumps([_content(self.prompts[index]), self._circumstances], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _circumstances(self) -> list[object]:
        plain, settings = SamplingParams(), self.settings
        chosen = {field.name: getattr(self.params, field.name) for field in fields(SamplingParams)}
        changed = {n: repr(value) for n, value in chosen.items() if value != getattr(plain, n)}
        return [self.template, str(settings.model), settings.revision, settings.seed, changed]

    def params_of(self, index: int) -> SamplingParams:
        """The prompt's own: draws do not depend on which other prompts are run with it."""
        if self.params.is_greedy or self.params.seed is not None:
            return self.params
        draws = Random(f"{self.settings.seed}/{self.key(index)}")
        return replace(self.params, seed=draws.getrandbits(63))


class Results(Protocol):
    """Takes results as they come."""

    @property
    def done(self) -> frozenset[int]:
        """Positions of the prompts whose results were there before this run."""

    def put(self, index: int, result: RequestOutput) -> None:
        """Take the result of the prompt at this position."""

    def summary(self, failed: bool) -> str:
        """What there is now, in words; none where it can be seen."""


@dataclass
class Printed:
    """Results on standard output in the order of the prompts, each once those before it are."""

    batch: Batch
    done: frozenset[int] = frozenset()
    _waiting: dict[int, RequestOutput] = field(default_factory=dict, init=False)
    _next: int = field(default=0, init=False)

    def put(self, index: int, result: RequestOutput) -> None:
        """See `Results.put`."""
        self._waiting[index] = result
        while self._next in self._waiting:
            self._print(self._next)
            self._next += 1

    def summary(self, failed: bool) -> str:
        """See `Results.summary`. What waited for one before it is printed now."""
        for index in sorted(self._waiting):
            self._print(index)
        return ""

    def _print(self, index: int) -> None:
        result = self._waiting.pop(index)
        if result.error is not None:
            return
        write(f"[{index + 1}] {_title(self.batch.prompts[index])}\n", bold=True)
        write(result.outputs[0].text.strip("\n") + "\n\n")


def _title(prompt: AnyPrompt) -> str:
    match prompt:
        case TextPrompt(text=text):
            line = " ".join(text.split())
        case TokenPrompt(token_ids=ids):
            line = f"{len(ids)} token ids"
        case MessagesPrompt(messages=messages):
            line = " ".join(text_of(messages[-1]).split())
    return line if len(line) <= 76 else line[:73] + "..."


def _content(prompt: AnyPrompt) -> dict[str, Any]:
    match prompt:
        case TextPrompt(text=text):
            return {"prompt": text}
        case TokenPrompt(token_ids=ids):
            return {"prompt_token_ids": ids}
        case MessagesPrompt(messages=messages):
            return {"messages": messages}


class ResultFile:
    """Results as lines of JSON, each written when it comes, behind those of an earlier run."""

    def __init__(self, path: Path, descriptor: int, batch: Batch) -> None:
        self._path = path
        self._descriptor = descriptor
        self._batch = batch
        self._count = 0
        self.done: frozenset[int] = frozenset()

    def find(self) -> None:
        """Read what an earlier run has written.

        A line that was cut short, as the last one may be, is taken away. Raises
        `InvalidRequestError` for results that are not of this batch.
        """
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            lines = file.read().split(b"\n")
        cut = lines.pop()
        if not cut.startswith(_START[: len(cut)]):
            raise self._foreign(len(lines) + 1, "it is no result of pyengine")
        places = {self._batch.key(index): index for index in range(len(self._batch.prompts))}
        if len(places) < len(self._batch.prompts):
            raise InvalidRequestError(
                "two prompts have the same id: --resume can't tell them apart"
            )
        found = [
            self._place(number, line, places) for number, line in enumerate(lines, start=1) if line
        ]
        if cut:
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(cut))
        self.done = frozenset(found)

    def _place(self, number: int, line: bytes, places: Mapping[tuple[str, Any], int]) -> int:
        """The position of the prompt that a line is the result of."""
        try:
            record = json.loads(line)
            key = ("id", record["id"]) if "id" in record else ("index", record["index"])
            fingerprint = record["fingerprint"]
            place = places.get(key)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._foreign(number, "it is no result of pyengine") from None
        if place is None:
            raise self._foreign(number, f"no prompt of this run has the {key[0]} {key[1]!r}")
        if fingerprint != self._batch.fingerprint(place):
            raise self._foreign(
                number,
                f"the prompt with the {key[0]} {key[1]!r}, the model, the seed or the sampling "
                "parameters were others",
            )
        return place

    def _foreign(self, number: int, why: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self._path}, line {number} is not of this run: {why}; give another --output"
        )

    def put(self, index: int, result: RequestOutput) -> None:
        """See `Results.put`."""
        if result.error is not None:  # a later run tries again
            return
        prompt, answer = self._batch.prompts[index], result.outputs[0]
        record = {
            "index": index,
            **({} if prompt.id is None else {"id": prompt.id}),
            **_content(prompt),
            "text": answer.text,
            "token_ids": answer.token_ids,
            "finish_reason": answer.finish_reason,
            "num_prompt_tokens": len(result.prompt_token_ids),
            "num_cached_tokens": result.num_cached_tokens,
            "fingerprint": self._batch.fingerprint(index),
        }
        line = json.dumps(record, ensure_ascii=False).encode() + b"\n"
        with _naming(self._path):
            while line:
                line = line[os.write(self._descriptor, line) :]
        self._count += 1

    def summary(self, failed: bool) -> str:
        """See `Results.summary`."""
        there, total = self._count + len(self.done), len(self._batch.prompts)
        if failed and not there:
            return ""
        if not failed:
            before = f", {len(self.done)} of them from before" if self.done else ""
            return f"{there} results in {self._path}{before}"
        return f"{there} of {total} results are in {self._path}; --resume goes on after them"


@contextmanager
def opened(path: Path, batch: Batch, *, resume: bool) -> Iterator[ResultFile]:
    """Open a file for results, so that nothing is computed for one that can't be written.

    Raises `InvalidRequestError` for one that holds anything, if this is not to `resume` it. A file
    that was made here and that nothing was written into is removed again.
    """
    is_new = not os.path.lexists(path)
    descriptor = _open(path, resume)
    try:
        file = ResultFile(path, descriptor, batch)
        if resume:
            file.find()
        yield file
    finally:
        if is_new and os.fstat(descriptor).st_size == 0:
            path.unlink(missing_ok=True)
        os.close(descriptor)


def _open(path: Path, resume: bool) -> int:
    try:
        mode = os.O_RDWR if resume else os.O_WRONLY
        descriptor = os.open(path, mode | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise _refused(path, error.strerror) from error
    try:
        _check(path, descriptor, resume)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _check(path: Path, descriptor: int, resume: bool) -> None:
    found = os.fstat(descriptor)
    if stat.S_ISREG(found.st_mode):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _refused(path, "another run is writing into it") from error
        if found.st_size and not resume:
            raise InvalidRequestError(
                f"{path} holds something already: give another --output, or --resume to go on "
                "with the results in it"
            )
    elif resume or stat.S_ISBLK(found.st_mode):
        raise _refused(path, "it is no regular file")
    elif stat.S_ISCHR(found.st_mode) and not os.isatty(descriptor):
        try:
            os.write(descriptor, b"\n")  # /dev/full can be opened
        except OSError as error:
            raise _refused(path, error.strerror) from error


def _refused(path: Path, why: str | None) -> InvalidRequestError:
    return InvalidRequestError(
        f"cannot write {path}: {why}; give a file in a folder that exists and is yours"
    )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Have an error of the system name the file."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
