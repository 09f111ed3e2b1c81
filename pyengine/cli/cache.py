"""`pyengine cache ls|verify|prune`: folders in which `KVStore` keeps blocks."""

import re
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

import typer

from pyengine.cli.display import print_rows, size_text
from pyengine.cli.options import Command, guarded
from pyengine.cli.status import FAILED
from pyengine.cli.terminal import note, write
from pyengine.config import store_key
from pyengine.errors import InvalidRequestError
from pyengine.kv_cache import KVStore, StoreError

NO_LIMIT = 2**62
"""Bytes; a limit below what is stored would evict it."""

PATIENCE = 60.0
"""Seconds that the writer has to end."""

SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
"""Units of --older-than."""

DIGITS = 16
"""Of a fingerprint, as `ls` shows it."""

cache = typer.Typer(name="cache", no_args_is_help=True)
_Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a KV store.")]


@cache.callback()
def root() -> None:
    """Folders with stored KV-cache blocks."""


@cache.command("ls", cls=Command, short_help="Print entries by model, and the totals.")
def list_entries(folder: _Folder) -> None:
    """Print the entries of DIR by the fingerprint of their model, and the totals."""
    with guarded(), _opened(folder, "read") as store:
        rows, stats = store.fingerprints(), store.stats()
        shown = {
            fingerprint.hex()[:DIGITS]: f"{_entries(entries)}, {size_text(size)}, last written "
            f"{datetime.fromtimestamp(written):%Y-%m-%d %H:%M}"
            for fingerprint, entries, size, written in rows
        }
        print_rows("fingerprints", shown or {"none": ""})
        totals = {
            "entries": f"{stats['readable_entries']:,}",
            "their size": size_text(stats["readable_bytes"]),
            "size of all files": size_text(stats["disk_bytes"]),
            "free on the disk": size_text(shutil.disk_usage(folder).free),
        }
        print_rows("total", totals)


@cache.command("verify", cls=Command, short_help="Read all entries and print damaged ones.")
def verify_entries(folder: _Folder) -> None:
    """Read all entries of DIR and print the keys of damaged ones; status 1 if there are any."""
    with guarded(), _opened(folder, "read") as store:
        started = time.perf_counter()
        whole, damaged = _verified(store)
        seconds = time.perf_counter() - started
        for notice in store.take_notices():
            note(notice)
        write("".join(f"damaged: {key}\n" for key in damaged))
        write(f"{_entries(whole)} whole, {len(damaged):,} damaged, {seconds:.1f} s\n", bold=True)
    if damaged:
        raise typer.Exit(FAILED)


@cache.command("prune", cls=Command, short_help="Remove entries.")
def prune_entries(
    folder: _Folder,
    older_than: Annotated[
        str | None,
        typer.Option(metavar="AGE", help="Only entries older than this: 30m, 12h, 7d, 2w."),
    ] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(metavar="HEX", help="Only entries of this fingerprint, or its first digits."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All entries.")] = False,
) -> None:
    """Remove entries from DIR. Refused while another process writes to it."""
    with guarded():
        if everything == bool(older_than or fingerprint):
            raise InvalidRequestError(
                "say what to remove: either --all, or one or both of --older-than and --fingerprint"
            )
        age = None if older_than is None else _seconds(older_than)
        with _opened(folder, "read") as store:
            known = [row[0] for row in store.fingerprints()]
        named = known if fingerprint is None else [_named(fingerprint, known)]
        if not known:
            write("no entries\n", bold=True)
            return
        with _opened(folder, "write") as store:
            before = store.stats()["disk_bytes"]
            count = store.prune(fingerprints=named, older_than=age)
            if not store.flush(PATIENCE):
                note(f"the disk does not answer: files may be left in {folder}")
            after = store.stats()
        write(
            f"{_entries(count)} removed, {_entries(after['readable_entries'])} left; "
            f"files: {size_text(before)} before, {size_text(after['disk_bytes'])} now\n",
            bold=True,
        )


@contextmanager
def _opened(folder: Path, access: Literal["read", "write"]) -> Iterator[KVStore]:
    if not folder.is_dir():  # opening it would make one
        raise InvalidRequestError(f"{folder} is not a folder: give the folder of a KV store")
    try:
        store = KVStore(folder, max_bytes=NO_LIMIT, access=access, auth_key=store_key())
    except StoreError as error:
        raise InvalidRequestError(str(error)) from error
    try:
        yield store
    finally:
        store.close(PATIENCE)


def _verified(store: KVStore) -> tuple[int, list[str]]:
    """`store.verify()` in a thread: Ctrl-C does not wait for it."""
    answers = list[tuple[int, list[str]]]()
    thread = threading.Thread(target=lambda: answers.append(store.verify()), daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
    return answers[0]


def _seconds(age: str) -> int:
    match = re.fullmatch(r"([0-9]+)([smhdw])", age)
    if match is None:
        raise InvalidRequestError(
            f"--older-than {age} is no age; give a number with a unit: 90s, 30m, 12h, 7d or 2w"
        )
    return int(match[1]) * SECONDS[match[2]]


def _named(digits: str, known: list[bytes]) -> bytes:
    """The only fingerprint that begins with these hexadecimal digits."""
    named = [fingerprint for fingerprint in known if fingerprint.hex().startswith(digits.lower())]
    if len(named) != 1 or not digits:
        raise InvalidRequestError(
            f"--fingerprint {digits} is that of {len(named)} models; "
            "`pyengine cache ls` lists the fingerprints"
        )
    return named[0]


def _entries(count: int) -> str:
    return "1 entry" if count == 1 else f"{count:,} entries"
