"""The command line on terminals, pipes, full disks, odd encodings, and without streams."""

import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.docs import ROOT

FAKE = """
import sys
from pyengine.cli import main
from tests.unit.cli.fakes import FakeEngine
words, chat_template = eval(sys.argv.pop(1)), "t"
main(FakeEngine(words=words).open)
"""
WORDS = ("The", " answer", ".")
ESCAPES = ("\x1b[31mred\x1b[0m", "\x1b]0;title\x07", "\x9b31m", "\r\x08\x7f", "\tend\n")
WRITTEN_OUT = r"\x1b[31mred\x1b[0m\x1b]0;title\x07\x9b31m\x0d\x08\x7f"


LONG = "('word\\n',) * 10_000"


def command(*arguments: str, words: tuple[str, ...] | str = WORDS) -> list[str]:
    """The words of an answer, or an expression for them."""
    return [
        sys.executable,
        "-c",
        FAKE,
        words if isinstance(words, str) else repr(words),
        *arguments,
    ]


def environment(**more: str) -> dict[str, str]:
    plain = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "COLUMNS", "LC_ALL")}
    return {**plain, "TERM": "xterm", "PYTHONPATH": str(ROOT), **more}


def run(
    *arguments: str,
    words: tuple[str, ...] | str = WORDS,
    shell: str = "",
    typed: bytes = b"",
    **more: str,
) -> subprocess.CompletedProcess[bytes]:
    """Run it on what is `typed`; `shell` is what stands behind the command in a shell's line."""
    return subprocess.run(
        [
            "bash",
            "-o",
            "pipefail",
            "-c",
            f'"$@" {shell}',
            "bash",
            *command(*arguments, words=words),
        ],
        input=typed,
        capture_output=True,
        check=False,
        timeout=60,
        env=environment(**more),
        cwd=ROOT,
    )


class Terminal:
    """A command in a new terminal."""

    def __init__(self, *arguments: str, columns: int = 80, **settings: object) -> None:
        words = settings.pop("words", WORDS)
        assert isinstance(words, tuple)
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
        self.process = subprocess.Popen(
            command(*arguments, words=words),
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment(**{name: str(value) for name, value in settings.items()}),
            cwd=ROOT,
            start_new_session=True,
            preexec_fn=_take_terminal,  # noqa: PLW1509
        )
        os.close(slave)
        self.shown = b""

    def wait_for(self, seen: Callable[[bytes], bool]) -> None:
        while not seen(self.shown):
            assert self._read(), self.shown[-2000:]

    def _read(self, seconds: float = 20) -> bool:
        ready, _, _ = select.select([self.master], [], [], seconds)
        assert ready, f"nothing comes: {self.shown[-2000:]!r}"
        try:
            part = os.read(self.master, 65536)
        except OSError:  # what Linux says when the other end is closed
            return False
        self.shown += part
        return bool(part)

    def type(self, text: str) -> None:
        os.write(self.master, text.encode())

    def paste(self, text: str) -> None:
        """Written while what it shows is read, as terminals do; Enter again, if nothing comes."""
        pasted = memoryview(text.encode() + b"\r")
        while pasted:
            _, writable, _ = select.select([], [self.master], [], 0)
            if writable:
                pasted = pasted[os.write(self.master, pasted[:1024]) :]
            if select.select([self.master], [], [], 0.001)[0]:
                self._read()
        while b"error" not in self.shown and not select.select([self.master], [], [], 5)[0]:
            self.type("\r")

    def interrupt(self) -> None:
        """Ctrl-C, as a person does it: again, if nothing comes of it.

        CPython's `input()` looks at signals where its `select` is interrupted only: one that comes
        between the last key's echo and that `select` waits there until the next key.
        """
        for _ in range(10):
            self.type("\x03")
            if select.select([self.master], [], [], 2)[0]:
                return
        raise AssertionError(f"nothing comes of Ctrl-C: {self.shown[-2000:]!r}")

    def end(self) -> int:
        while self._read():
            pass
        os.close(self.master)
        return self.process.wait(timeout=30)


def _take_terminal() -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def no_traceback(output: bytes) -> None:
    assert b"Traceback" not in output and b"Exception ignored" not in output, output.decode()


def test_a_terminal_gets_no_escape_sequence_of_an_answer() -> None:
    terminal = Terminal("generate", "hi", words=ESCAPES, NO_COLOR="1")
    assert terminal.end() == 0
    assert terminal.shown.decode().startswith(f"{WRITTEN_OUT}\tend\r\n"), terminal.shown
    assert b"\x1b" not in terminal.shown


def test_nor_of_a_prompt_a_path_or_an_error() -> None:
    for arguments in (["generate", "\x1b[31mA", "\x1b[31mB"], ["generate", "--file", "\x1b[31mA"]):
        terminal = Terminal(*arguments, NO_COLOR="1")
        terminal.end()
        assert b"\x1b" not in terminal.shown and rb"\x1b[31mA" in terminal.shown


def test_a_pipe_gets_the_answer_as_it_is() -> None:
    done = run("generate", "hi", words=ESCAPES)
    assert done.returncode == 0
    assert done.stdout == "".join(ESCAPES).encode() + b"\n"


@pytest.mark.parametrize(("setting", "is_plain"), [({}, False), ({"NO_COLOR": "1"}, True)])
def test_no_color_is_honoured(setting: dict[str, str], is_plain: bool) -> None:
    for arguments in (["generate", "hi"], ["generate", "one", "two"], ["info"]):
        terminal = Terminal(*arguments, **setting)
        assert terminal.end() == 0
        assert (b"\x1b[" not in terminal.shown) == is_plain


@pytest.mark.parametrize(
    "arguments", [["generate", "hi"], ["generate", "--help"], ["chat", "--help"], ["info"]]
)
def test_a_terminal_of_20_columns(arguments: list[str]) -> None:
    terminal = Terminal(*arguments, columns=20)
    assert terminal.end() == 0
    no_traceback(terminal.shown)


@pytest.mark.parametrize(
    "arguments",
    [["generate", "hi"], ["generate", "one", "two"], ["info"], ["--help"], ["generate", "--help"]],
)
def test_a_reader_that_goes_away_is_no_error(arguments: list[str]) -> None:
    done = run(*arguments, words=LONG, shell="| head -1 > /dev/null")
    no_traceback(done.stderr)
    assert b"error" not in done.stderr


def test_a_closed_pipe_ends_the_answer_with_the_status_of_sigpipe() -> None:
    done = run("generate", "hi", words=LONG, shell="| head -1")
    assert (done.returncode, done.stdout) == (141, b"word\n")


@pytest.mark.parametrize(
    "arguments",
    [["generate", "hi"], ["generate", "one", "two"], ["info"], ["--help"], ["--version"]],
)
def test_full_standard_output_is_a_sentence(arguments: list[str]) -> None:
    done = run(*arguments, shell="> /dev/full")
    no_traceback(done.stderr)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith(b"error: ")]
    assert b"No space left on device" in line


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_full_standard_error_does_not_change_the_status(
    unbuffered: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONUNBUFFERED", unbuffered)  # else what was not written is tried again
    assert run("generate", shell="2> /dev/full").returncode == 2
    assert run("generate", "--kv-cache-gib", "nan", "hi", shell="2> /dev/full").returncode == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-", "<&-"])
@pytest.mark.parametrize("arguments", [["generate", "hi"], ["info"], ["chat"]])
def test_streams_that_are_closed(arguments: list[str], closed: str) -> None:
    done = run(*arguments, shell=closed)
    no_traceback(done.stderr)
    assert done.returncode == 0


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
@pytest.mark.parametrize("arguments", [["generate", "hi"], ["generate", "one é 語", "two"]])
def test_what_an_encoding_lacks_is_written_out(encoding: str, arguments: list[str]) -> None:
    done = run(*arguments, words=("é", " 語", " \ud800"), PYTHONIOENCODING=encoding)
    assert done.returncode == 0, done.stderr
    no_traceback(done.stderr)
    if len(arguments) == 2:
        expected = "é" if encoding == "latin-1" else r"\xe9"
        assert done.stdout.decode("latin-1") == rf"{expected} \u8a9e \ud800" + "\n"


def test_bytes_in_a_prompt_that_are_no_text() -> None:
    line = [*command("generate"), b"caf\xe9"]
    done = subprocess.run(line, capture_output=True, check=False, env=environment(), cwd=ROOT)
    assert done.returncode == 2
    assert b"error: prompt 1 contains '\\udce9'" in done.stderr


def chat(*typed: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        command("chat"),
        input=b"".join(typed),
        capture_output=True,
        check=False,
        timeout=60,
        env=environment(),
        cwd=ROOT,
    )


def test_a_line_of_a_chat_that_is_no_text_is_refused_alone() -> None:
    done = chat(b"caf\xe9 \xff\n", b"fine\n")
    assert done.returncode == 0
    no_traceback(done.stderr)
    assert done.stdout == b"The answer.\n"
    assert b"a lone surrogate" in done.stderr


def test_a_megabyte_and_nuls_in_a_chat() -> None:
    done = chat(b"word " * 200_000 + b"\n", b"a\0b\n", b"\n\n  \n", b"short\n")
    assert done.returncode == 0
    no_traceback(done.stderr)
    assert b"error: the prompt has 200001 tokens" in done.stderr
    assert done.stdout == b"The answer.\n" * 2


def test_a_chat_in_a_terminal() -> None:
    terminal = Terminal("chat", NO_COLOR="1")
    terminal.wait_for(lambda shown: b"> " in shown)
    terminal.type("\n\nhello\n")
    terminal.wait_for(lambda shown: shown.count(b"The answer.") == 1)
    terminal.wait_for(lambda shown: shown.endswith(b"> "))
    terminal.type("/reset\n")
    terminal.wait_for(lambda shown: b"a new conversation" in shown)
    terminal.wait_for(lambda shown: shown.endswith(b"> "))
    terminal.type("\x04")  # Ctrl-D
    assert terminal.end() == 0
    no_traceback(terminal.shown)


def test_ctrl_c_at_the_prompt_of_a_terminal() -> None:
    terminal = Terminal("chat")
    terminal.wait_for(lambda shown: b"> " in shown)
    terminal.type("half a li")
    terminal.wait_for(lambda shown: b"half a li" in shown)
    terminal.interrupt()
    assert terminal.end() == 0
    no_traceback(terminal.shown)


@pytest.mark.soak
def test_a_megabyte_is_pasted_into_a_terminal() -> None:
    """Read while it is written, as terminals do."""
    terminal = Terminal("chat", NO_COLOR="1")
    terminal.wait_for(lambda shown: b"> " in shown)
    terminal.paste("word " * 200_000)
    terminal.wait_for(lambda shown: b"error: the prompt has " in shown)
    terminal.wait_for(lambda shown: shown.endswith(b"> "))
    terminal.type("short\n")
    terminal.wait_for(lambda shown: b"The answer." in shown)
    terminal.type("\x04")
    assert terminal.end() == 0
    no_traceback(terminal.shown)


ON_A_FULL_DISK = """
mount -t tmpfs -o size=16k none "$1" && cd "$1" && head -c 8000 /dev/zero > filled || exit 1
shift
exec "$@"
"""


def test_a_disk_that_fills_keeps_what_was_whole(tmp_path: Path) -> None:
    """A small one, in a new mount namespace."""
    file = tmp_path / "prompts.txt"
    file.write_text("".join(f"prompt {at}\n" for at in range(200)))
    target = tmp_path / "disk"
    target.mkdir()
    alone = ["unshare", "-m", "sh", "-c", ON_A_FULL_DISK, "sh", str(target)]
    if subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount")
    show = ["sh", "-c", '"$@"; status=$?; cat out; exit $status', "sh"]
    done = subprocess.run(
        [*alone, *show, *command("generate", "--raw", "--file", str(file), "--output", "out")],
        capture_output=True,
        check=False,
        timeout=60,
        env=environment(),
    )
    no_traceback(done.stderr)
    assert done.returncode == 1
    [line] = [line for line in done.stderr.splitlines() if line.startswith(b"error: ")]
    assert b"No space left on device" in line
    whole = done.stdout.split(b"\n")[:-1]
    assert len(whole) > 5
    assert len({json.loads(line)["index"] for line in whole}) == len(whole)
    assert f"{len(whole)} of 200 results are in".encode() in done.stderr


@pytest.mark.parametrize(
    ("shell", "status", "error"),
    [
        ("> /dev/full", 1, b"error: No space left on device"),
        ("| head -1 > /dev/null", 141, None),  # SIGPIPE's
        ("<&-", 0, None),  # as after Ctrl-D
    ],
)
def test_a_chat_that_can_not_go_on(shell: str, status: int, error: bytes | None) -> None:
    done = run("chat", words=LONG, shell=shell, typed=b"hello\n")
    no_traceback(done.stderr)
    assert done.returncode == status
    assert [line for line in done.stderr.splitlines() if line.startswith(b"error")] == (
        [error] if error else []
    )
