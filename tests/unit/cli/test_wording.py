"""Messages of the engine in the words of the command line; models by argument and by option."""

import pytest
from typer.testing import CliRunner

from pyengine.cli.app import app
from pyengine.cli.sampling import FORMS, SAMPLING, in_options
from pyengine.config import EngineSettings
from tests.unit.cli.fakes import FakeEngine


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("max_model_len=10: too short", "--max-model-len 10: too short"),
        ("(max_model_len=10)", "(--max-model-len 10)"),
        ("dtype='x' is not known", "--dtype x is not known"),
        ("model='my model'", "--model 'my model'"),
        ("uds=''", "--uds ''"),
        ("num_threads=3.", "--threads 3."),
        ("kv_cache_gib=nan: it", "--kv-cache-gib nan: it"),
        ("kv_cache_memory=1073741824 and", "--kv-cache-gib 1 and"),
        (
            "gpu_memory_utilization, kv_cache_memory or",
            "--gpu-memory-utilization, --kv-cache-gib or",
        ),
        ("enable_prefix_caching=False has none", "--no-prefix-caching has none"),
        ("compile=True does not", "--compile does not"),
        ("speculation=None and draft_model='x'", "no --speculation and --draft-model x"),
        ("give a token: token=..., or", "give a token: --token ..., or"),
        ("an integer, or None for as many as fit", "an integer"),
        ("an integer or 'auto' or None", "an integer or 'auto'"),
        ("structured_outputs.json has 9 bytes", "--json-schema has 9 bytes"),
        ("the model stops: no port", "the model stops: no port"),
        ("block_size_of(x), /a/num_blocks, `max_tokens`", None),
        ("unknown key 'max_tokens'", None),
        ("the stop= of a thing", None),
    ],
)
def test_settings_are_named_as_options(message: str, said: str | None) -> None:
    assert in_options(message) == (message if said is None else said)


def test_sampling_options_are_known() -> None:
    for name in (*SAMPLING, *FORMS):
        assert in_options(f"{name}=1") == f"--{name.replace('_', '-')} 1"


@pytest.mark.parametrize("command", ["generate", "chat", "info"])
@pytest.mark.parametrize("flag", ["--model", "-m", "--hf", "-hf"])
def test_an_option_names_the_model(command: str, flag: str) -> None:
    engine = FakeEngine()
    prompt = ["hi"] if command == "generate" else []
    result = CliRunner().invoke(app, [command, *prompt, flag, "a/b"], obj=engine.open, input="")
    assert result.exit_code == 0, result.output
    assert engine.settings == EngineSettings("a/b")


@pytest.mark.parametrize("command", ["chat", "info", "bench", "serve", "pull"])
def test_an_argument_names_it_where_there_are_no_prompts(command: str) -> None:
    result = CliRunner().invoke(app, [command, "/no/model", "--model", "/no/other"])
    assert result.exit_code == 2
    assert "two models are named, /no/model and --model /no/other" in result.stderr
    for words in (["/no/model"], ["-m", "/no/model"], ["/no/model", "--hf", "/no/model"]):
        result = CliRunner().invoke(app, [command, *words, *["--port=0"] * (command == "serve")])
        assert result.exit_code == 1
        assert "there is no model at '/no/model'" in result.stderr
