"""The results of a batch: appended to a file as they finish, or printed.

Each line of the file is a JSON object, in order of completion; `index` is the position of the
prompt, `id` its id. A run never overwrites results: it writes to a new or empty file, or appends
with `--resume`.
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
from typing import Any, TypeAlias

from pyengine.cli.prompts import Prompt, Template, text_of
from pyengine.cli.terminal import write
from pyengine.config import EngineSettings
from pyengine.errors import InvalidRequestError
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams

_START = b'{"index": '


@dataclass(frozen=True)
class Batch:
    """The prompts of a run, and everything that their answers depend on."""

    prompts: Sequence[Prompt]
    template: Template
    params: SamplingParams
    settings: EngineSettings

    def key(self, index: int) -> tuple[str, str | int]:
        """The identity of a prompt: its id, or its position if it has none."""
        name = self.prompts[index].id
        return ("index", index) if name is None else ("id", name)

    def fingerprint(self, index: int) -> str:
        """A hash of prompt, template, model, its weights, seed and sampling parameters."""
        prompt = self.prompts[index]
        text = json.dumps([{prompt.kind: prompt.content}, self._settings_hashed], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @cached_property
    def _settings_hashed(self) -> list[object]:
        plain, settings = SamplingParams(), self.settings
        chosen = {field.name: getattr(self.params, field.name) for field in fields(SamplingParams)}
        changed = {n: repr(value) for n, value in chosen.items() if value != getattr(plain, n)}
        model = [str(settings.model), settings.revision]
        if settings.load_format != "auto":
            model.append(settings.load_format)
        return [self.template, *model, settings.seed, changed]

    def params_of(self, index: int) -> SamplingParams:
        """Parameters of a prompt. Its seed does not depend on the other prompts."""
        if self.params.is_greedy or self.params.seed is not None:
            return self.params
        draws = Random(f"{self.settings.seed}/{self.key(index)}")
        return replace(self.params, seed=draws.getrandbits(63))


@dataclass
class Printed:
    """Prints results to standard output in the order of the prompts."""

    batch: Batch
    done: frozenset[int] = frozenset()
    _waiting: dict[int, RequestOutput] = field(default_factory=dict, init=False)
    _next: int = field(default=0, init=False)

    def put(self, index: int, result: RequestOutput) -> None:
        """Add the result of the prompt at this position."""
        self._waiting[index] = result
        while self._next in self._waiting:
            self._print(self._next)
            self._next += 1

    def summary(self, failed: bool) -> str:
        """Print the results that wait for an earlier one. There is nothing to say about them."""
        for index in sorted(self._waiting):
            self._print(index)
        return ""

    def _print(self, index: int) -> None:
        result = self._waiting.pop(index)
        if result.error is not None:
            return
        write(f"[{index + 1}] {_title(self.batch.prompts[index])}\n", bold=True)
        write(result.outputs[0].text.strip("\n") + "\n\n")


def _title(prompt: Prompt) -> str:
    match prompt.kind:
        case "prompt_token_ids":
            line = f"{len(prompt.content)} token ids"
        case "messages":
            line = " ".join(text_of(prompt.content[-1]).split())
        case _:
            line = " ".join(prompt.content.split())
    return line if len(line) <= 76 else line[:73] + "..."


class ResultFile:
    """Appends results to a file as lines of JSON."""

    def __init__(self, path: Path, descriptor: int, batch: Batch) -> None:
        self._path = path
        self._descriptor = descriptor
        self._batch = batch
        self._count = 0
        self.done: frozenset[int] = frozenset()

    def find(self) -> None:
        """Read the results of an earlier run, and remove an incomplete last line.

        Raises `InvalidRequestError` for results of another batch.
        """
        with os.fdopen(os.dup(self._descriptor), "rb") as file:
            lines = file.read().split(b"\n")
        cut = lines.pop()
        if not cut.startswith(_START[: len(cut)]):
            raise self._mismatch(len(lines) + 1, "it is not a result of pyengine")
        indices = {self._batch.key(index): index for index in range(len(self._batch.prompts))}
        if len(indices) < len(self._batch.prompts):
            raise InvalidRequestError(
                "two prompts have the same id: --resume cannot distinguish them"
            )
        done = [
            self._index(number, line, indices) for number, line in enumerate(lines, start=1) if line
        ]
        if cut:
            os.ftruncate(self._descriptor, os.fstat(self._descriptor).st_size - len(cut))
        self.done = frozenset(done)

    def _index(self, number: int, line: bytes, indices: Mapping[tuple[str, Any], int]) -> int:
        """The position of the prompt that a line answers."""
        try:
            record = json.loads(line)
            key = ("id", record["id"]) if "id" in record else ("index", record["index"])
            fingerprint = record["fingerprint"]
            index = indices.get(key)
        except (ValueError, KeyError, TypeError, RecursionError):
            raise self._mismatch(number, "it is not a result of pyengine") from None
        if index is None:
            raise self._mismatch(number, f"no prompt of this run has the {key[0]} {key[1]!r}")
        if fingerprint != self._batch.fingerprint(index):
            raise self._mismatch(
                number,
                f"the prompt with the {key[0]} {key[1]!r}, the model, the seed or the sampling "
                "parameters were different",
            )
        return index

    def _mismatch(self, number: int, why: str) -> InvalidRequestError:
        return InvalidRequestError(
            f"{self._path}, line {number} does not belong to this run: {why}; give another --output"
        )

    def put(self, index: int, result: RequestOutput) -> None:
        """Write the result of the prompt at this position."""
        if result.error is not None:  # a later run retries it
            return
        prompt, answer = self._batch.prompts[index], result.outputs[0]
        record = {
            "index": index,
            **({} if prompt.id is None else {"id": prompt.id}),
            prompt.kind: prompt.content,
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
        """A message about the results so far."""
        count, total = self._count + len(self.done), len(self._batch.prompts)
        if failed and not count:
            return ""
        if not failed:
            earlier = f", {len(self.done)} of them from an earlier run" if self.done else ""
            return f"{count} results in {self._path}{earlier}"
        return f"{count} of {total} results are in {self._path}; --resume computes the others"


Results: TypeAlias = Printed | ResultFile


@contextmanager
def opened(path: Path, batch: Batch, *, resume: bool) -> Iterator[ResultFile]:
    """Open a file for results, before anything is computed.

    Raises `InvalidRequestError` for a file that is not empty, without `resume`. Removes a new file
    again if it stays empty.
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
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise _refused(path, "another run is writing to it") from error
        if status.st_size and not resume:
            raise InvalidRequestError(
                f"{path} is not empty: give another --output, or --resume to continue the run"
            )
    elif resume or stat.S_ISBLK(status.st_mode):
        raise _refused(path, "not a regular file")
    elif stat.S_ISCHR(status.st_mode) and not os.isatty(descriptor):
        try:
            os.write(descriptor, b"\n")  # /dev/full opens without an error
        except OSError as error:
            raise _refused(path, error.strerror) from error


def _refused(path: Path, why: str | None) -> InvalidRequestError:
    return InvalidRequestError(
        f"cannot write {path}: {why}; give a file in an existing, writable folder"
    )


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Add the file's name to an error of the system."""
    try:
        yield
    except OSError as error:
        error.filename = str(path)
        raise
