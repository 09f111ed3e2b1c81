"""Options are made from the settings and the sampling parameters: none is declared by hand."""

import dataclasses
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner, Result

from pyengine.cli.app import app
from pyengine.config import EngineSettings
from pyengine.sampling_params import SamplingParams, StructuredOutputs
from pyengine.server.settings import ServerSettings
from pyengine.utils.settings import option_of
from tests.support.docs import ROOT, commands
from tests.unit.cli.fakes import FakeEngine
from tests.unit.cli.test_announcement import ABOUT

WIDE = {"COLUMNS": "200", "NO_COLOR": "1", "TERM": "dumb"}


def run(engine: FakeEngine, *arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments), obj=engine.open, input="")


def flags(field: "dataclasses.Field[object]") -> set[str]:
    option = option_of(field)
    return set(option.flag.split("/")) if option.flag else {f"--{field.name.replace('_', '-')}"}


@pytest.mark.parametrize("command", ["generate", "chat", "info"])
def test_every_setting_is_an_option_of_every_command(command: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"], env=WIDE).output
    for field in dataclasses.fields(EngineSettings):
        for flag in flags(field):
            is_listed = re.search(rf"{flag}\b", shown) is not None
            assert is_listed != option_of(field).hidden, flag


@pytest.mark.parametrize("command", ["generate", "chat", "info"])
def test_without_options_the_settings_have_their_defaults(command: str) -> None:
    engine = FakeEngine()
    run(engine, *(["generate", "hi"] if command == "generate" else [command]))
    assert engine.settings == EngineSettings()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--kv-cache-gib", "0.5"], {"kv_cache_memory": 1 << 29}),
        (["--no-prefix-caching"], {"enable_prefix_caching": False}),
        (["--async-scheduling"], {"async_scheduling": True}),
        (["--no-async-scheduling"], {"async_scheduling": False}),
        (["--enforce-eager"], {"enforce_eager": True}),
        (["--eviction", "2q"], {"eviction": "2q"}),
        (["--block-size", "auto"], {"block_size": "auto"}),
        (["--block-size", "32"], {"block_size": 32}),
        (["--revision", "v1", "--token", "t"], {"revision": "v1", "token": "t"}),
        (["--generation-config", "none"], {"generation_config": "none"}),
        (["--max-num-waiting", "7"], {"max_num_waiting": 7}),
    ],
)
def test_forms_that_differ_from_the_field(
    arguments: list[str], expected: dict[str, object]
) -> None:
    engine = FakeEngine()
    result = run(engine, "generate", "hi", *arguments)
    assert result.exit_code == 0, result.output
    assert engine.settings == EngineSettings(**expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--kv-cache-gib", "nan"], "--kv-cache-gib nan"),
        (["--kv-cache-gib", "inf"], "--kv-cache-gib inf"),
        (["--kv-cache-gib", "-1"], "--kv-cache-gib -1"),
        (["--kv-cache-gib", "1e300"], "--kv-cache-gib 1e+300"),
        (["--kv-cache-gib", "1e-12"], "--kv-cache-gib 1e-12"),
        (["--block-size", "x"], "--block-size x"),
        (["--num-blocks", "0"], "--num-blocks 0"),
        (["--max-model-len", "1"], "--max-model-len 1"),
        (["--gpu-memory-utilization", "nan"], "--gpu-memory-utilization nan"),
    ],
)
def test_settings_out_of_range_are_refused_before_a_model_is_opened(
    arguments: list[str], complaint: str
) -> None:
    engine = FakeEngine()
    result = run(engine, "generate", "hi", *arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ") and complaint in result.stderr
    assert engine.settings is None


def test_sampling_options_are_fields_of_the_sampling_parameters() -> None:
    engine = FakeEngine()
    result = run(engine, "chat", "--max-tokens", "9", "--stop", "a", "--stop", "b")
    assert result.exit_code == 0, result.output
    engine = FakeEngine()
    run(
        engine, "generate", "hi", "--max-tokens", "9", "--stop", "a", "--stop", "b", "--min-p", ".1"
    )
    assert engine.params == SamplingParams(temperature=0, max_tokens=9, stop=("a", "b"), min_p=0.1)


MACHINE = ("bench", "doctor", "list", "pull", "")
CACHE = ("cache ls", "cache verify", "cache prune")


def test_the_page_about_the_command_line_names_what_there_is() -> None:
    shown = {
        name: CliRunner().invoke(app, [*name.split(), "--help"], env=WIDE).output
        for name in ("generate", "chat", "info", "trace replay", "trace view", *CACHE, *MACHINE)
    }
    page = (ROOT / "docs/guides/command-line.md").read_text()
    for option in set(re.findall(r"--[a-z][a-z-]+", page)) - {"--help"}:
        assert any(option in text for text in shown.values()), option
    for line in commands("docs/guides/command-line.md"):
        words = line[line.index("pyengine") :]
        name = " ".join(words[1:3]) if words[1] in ("trace", "cache") else words[1]
        assert all(word in shown[name] for word in words if word.startswith("--")), words


def serve(monkeypatch: pytest.MonkeyPatch, *arguments: str, **env: str) -> list[object]:
    """What `pyengine serve` would open and serve."""
    lifetime = pytest.importorskip("pyengine.server.lifetime")
    seen: list[object] = []

    @contextmanager
    def engine(settings: object) -> Iterator[None]:
        seen.append(settings)
        yield SimpleNamespace(describe=lambda: ABOUT)

    monkeypatch.setattr("pyengine.cli.serve.open_async_engine", engine)

    def make(_: object, settings: object, *__: object) -> SimpleNamespace:
        seen.append(settings)
        return SimpleNamespace(run=lambda sockets: None)

    monkeypatch.setattr(lifetime, "make_server", make)
    result = CliRunner().invoke(app, ["serve", "--port", "0", *arguments], env=env)
    assert result.exit_code == 0, result.output
    return seen


def test_a_server_has_every_setting_as_an_option() -> None:
    shown = CliRunner().invoke(app, ["serve", "--help"], env=WIDE).output
    several = (*dataclasses.fields(EngineSettings), *dataclasses.fields(ServerSettings))
    for field in several:
        for flag in flags(field):
            assert re.search(rf"{flag}\b", shown) is not None, flag


def test_settings_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, server = serve(monkeypatch)
    assert engine == EngineSettings(max_num_waiting=1024)
    assert server == ServerSettings(port=0)
    options = "--max-num-waiting 7 --cors-origin * --api-key a --api-key b --share-prefix-cache"
    engine, server = serve(monkeypatch, "folder", *options.split())
    assert engine == EngineSettings("folder", max_num_waiting=7)
    assert server == ServerSettings(
        port=0, cors_origin=("*",), api_key=("a", "b"), share_prefix_cache=True
    )


def test_keys_may_be_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    _, server = serve(monkeypatch, PYENGINE_API_KEY="a b")
    assert server == ServerSettings(port=0, api_key=("a", "b"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--json-object"], StructuredOutputs(json_object=True)),
        (["--regex", "a+"], StructuredOutputs(regex="a+")),
        (["--choice", "yes", "--choice", "no"], StructuredOutputs(choice=["yes", "no"])),
        (["--json-schema", "{file}"], StructuredOutputs(json='{"const": "ü"}')),
        (["--grammar", "{file}"], StructuredOutputs(grammar='{"const": "ü"}')),
    ],
)
def test_the_form_of_an_answer(
    arguments: list[str], expected: StructuredOutputs, tmp_path: Path
) -> None:
    file = tmp_path / "form"
    file.write_text('{"const": "ü"}', encoding="utf-8")
    engine = FakeEngine()
    result = run(engine, "generate", "hi", *(argument.format(file=file) for argument in arguments))
    assert result.exit_code == 0, result.output
    assert engine.params is not None
    assert engine.params.structured_outputs == expected


@pytest.mark.parametrize(
    "arguments",
    [
        ["hi", "--choice", "red", "blue"],
        ["--choice", "red", "blue", "hi"],
        ["--choice", "red", "blue"],
        ["--choice", "red", "--file", "prompts"],
    ],
)
def test_a_choice_of_one_text_is_refused_with_how_several_are_given(arguments: list[str]) -> None:
    engine = FakeEngine()
    result = run(engine, "generate", *arguments)
    assert result.exit_code == 2
    assert "--choice red is the only choice" in result.stderr
    assert "--choice red --choice ..." in result.stderr
    assert engine.settings is None
    assert run(engine, "chat", "--choice", "red").exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--json-schema", "{folder}/none"], "cannot read {folder}/none: No such file"),
        (["--grammar", "{folder}"], "cannot read {folder}: Is a directory"),
        (["--grammar", "{folder}/bytes"], "{folder}/bytes is not UTF-8 text"),
        (["--json-schema", "{folder}/long"], "--json-schema has 65537 bytes: at most"),
        (["--json-schema", "{folder}/list"], "a JSON schema: an object, or its text"),
        (["--regex", "a", "--json-object"], "--json-object and --regex exclude each other"),
    ],
)
def test_a_form_that_cannot_be_read_is_refused_before_a_model_is_opened(
    arguments: list[str], complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff")
    (tmp_path / "long").write_bytes(b"a" * 1_000_000)
    (tmp_path / "list").write_bytes(b"[]")
    engine = FakeEngine()
    result = run(
        engine, "generate", "hi", *(argument.format(folder=tmp_path) for argument in arguments)
    )
    assert result.exit_code == 2
    assert complaint.format(folder=tmp_path) in result.stderr
    assert engine.settings is None
