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
        ("max-num-seqs = {a = 1}", "must be a text, a number"),
        ("max-num-seqs 7", "is not valid TOML"),
        ("config = 'other.toml'", "unknown option 'config'"),
        ("max-num-seqs = 0", "max_num_seqs=0"),
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
