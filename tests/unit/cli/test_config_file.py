"""`--config FILE` and environment variables: options that the command line overrides."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pyengine.cli.app import app
from pyengine.config import EngineSettings
from tests.unit.cli.fakes import FakeEngine


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return tmp_path / "config.toml"


def run(engine: FakeEngine, *arguments: str, **env: str) -> Result:
    return CliRunner().invoke(app, list(arguments), obj=engine.open, input="", env=env)


def test_a_file_sets_options_by_their_names(config: Path) -> None:
    config.write_text(
        'model = "org/name"\nkv-cache-gib = 0.5\nprefix-caching = false\nmax_num_seqs = 7\n'
    )
    engine = FakeEngine()
    result = run(engine, "info", "--config", str(config))
    assert result.exit_code == 0, result.output
    assert engine.settings == EngineSettings(
        "org/name", kv_cache_memory=1 << 29, enable_prefix_caching=False, max_num_seqs=7
    )


def test_the_command_line_overrides_the_environment_and_that_the_file(config: Path) -> None:
    config.write_text("block-size = 8\nnum-blocks = 8\nmax-num-seqs = 8\n")
    engine = FakeEngine()
    arguments = ["info", "--block-size", "32", "--config", str(config)]
    environment = {"PYENGINE_INFO_BLOCK_SIZE": "16", "PYENGINE_INFO_NUM_BLOCKS": "16"}
    assert run(engine, *arguments, **environment).exit_code == 0
    assert engine.settings == EngineSettings(block_size=32, num_blocks=16, max_num_seqs=8)


def test_one_file_serves_all_commands(config: Path) -> None:
    config.write_text(
        "model = 'org/name'\nmax-tokens = 3\nport = 9000\n"
        "[info]\nmax-num-seqs = 8\n[generate]\nmax-tokens = 4\n[serve]\napi-key = ['a']\n"
    )
    engine = FakeEngine()
    assert run(engine, "info", PYENGINE_CONFIG=str(config)).exit_code == 0
    assert engine.settings == EngineSettings("org/name", max_num_seqs=8)
    assert run(engine, "generate", "hi", "--config", str(config)).exit_code == 0
    assert engine.settings == EngineSettings("org/name")
    assert engine.params is not None and engine.params.max_tokens == 4
    assert run(engine, "generate", "hi", "-n", "5", "--config", str(config)).exit_code == 0
    assert engine.params.max_tokens == 5


def test_a_model_that_is_named_counts_more_than_that_of_the_file(config: Path) -> None:
    config.write_text("model = 'org/name'\n")
    for named in (["other"], ["-m", "other"]):
        engine = FakeEngine()
        assert run(engine, "info", *named, "--config", str(config)).exit_code == 0
        assert engine.settings == EngineSettings("other")


def test_repeatable_options_and_arguments_are_lists(config: Path) -> None:
    config.write_text(
        'prompt = ["first", "second"]\nstop = ["a", "b"]\nmax-tokens = 3\nchat = false\n'
    )
    engine = FakeEngine()
    assert run(engine, "generate", "--config", str(config)).exit_code == 0
    assert engine.seen == ["first", "second"]
    for params in engine.several:
        assert (params.stop, params.max_tokens) == (("a", "b"), 3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max-num-sqs = 7", "unknown option 'max-num-sqs'"),
        ("max-num-seqs = 7.5", "valid integer"),
        ("max-num-seqs = true", "valid integer"),
        ("max-num-seqs = [7, 8]", "must be a single value"),
        ("prt = 1", "unknown option 'prt': did you mean port?"),
        ("[serve]\nprt = 1", "[serve]: unknown option 'prt': did you mean port?"),
        ("[info]\nport = 1", "[info]: unknown option 'port'"),
        ("[generat]\nport = 1", "unknown option 'generat': did you mean generate?"),
        ("max-num-seqs = {a = 1}", "must be a text, a number"),
        ("max-num-seqs 7", "is not valid TOML"),
        ("config = 'other.toml'", "unknown option 'config'"),
        ("max-num-seqs = 0", "--max-num-seqs 0"),
    ],
)
def test_invalid_files_are_refused_before_a_model_is_opened(
    text: str, message: str, config: Path
) -> None:
    config.write_text(text)
    engine = FakeEngine()
    result = run(engine, "info", "--config", str(config))
    assert result.exit_code in (1, 2) and message in words(result)
    assert engine.settings is None


def test_a_missing_file_is_named(config: Path) -> None:
    result = run(FakeEngine(), "info", "--config", str(config))
    assert result.exit_code == 2 and "No such file" in words(result)


def words(result: Result) -> str:
    """The text of an error without its frame."""
    return " ".join(result.stderr.replace("│", " ").split())
