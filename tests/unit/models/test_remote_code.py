"""Python in a model folder is never run, and no prompt asks to run it."""

import json
import sys
from pathlib import Path

import pytest

from tests.support.checkpoints import save_tiny
from tests.support.forked import run_forked
from tests.support.tokenizers import save_words
from tests.support.without_torch import needs_torch
from tests.unit.models.tiny_gguf import write_tiny_gguf

_LOAD = """
import sys
from pyengine.errors import PyEngineError
from pyengine.models.config import read_config
from pyengine.models.loader import load_model
from pathlib import Path
try:
    if sys.argv[1] == "config":
        read_config(Path(sys.argv[2]))
    elif sys.argv[1] == "worker_group":
        from pyengine.executor.tensor_parallel.distributed import WorkerGroup
        WorkerGroup(sys.argv[2], device="cpu", size=2).close()
    else:
        load_model(sys.argv[2], device="cpu")
except PyEngineError as error:
    print(type(error).__name__, error)
    sys.exit(3)
print("loaded")
"""


def add_code(folder: Path, file: str, **settings: object) -> None:
    """A Python file in `folder` that leaves a trace, and `file` that asks for it."""
    trace = folder / "ran"
    (folder / "evil.py").write_text(
        f"open({str(trace)!r}, 'w').close()\n"
        "from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast\n"
        "class EvilConfig(LlamaConfig):\n    model_type = 'evil'\n"
        "class EvilModel(LlamaForCausalLM):\n    config_class = EvilConfig\n"
        "class EvilTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    path = folder / file
    before = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**before, **settings}))


def load(what: str, path: Path, home: Path) -> tuple[int, str]:
    """Exit status and output of a process that answers every question with "y"."""
    done = run_forked(
        _LOAD,
        what,
        str(path),
        input="y\n" * 20,
        timeout=120,
        status=None,
        env={
            "PATH": "",
            "PYTHONPATH": ":".join(filter(None, sys.path)),
            "HOME": str(home),
            "HF_HUB_OFFLINE": "1",
        },
    )
    return done.returncode, done.stderr + done.stdout


MODEL_MAP = {"AutoConfig": "evil.EvilConfig", "AutoModelForCausalLM": "evil.EvilModel"}
TOKENIZER_MAP = {"AutoTokenizer": ["evil.EvilTokenizer", "evil.EvilTokenizer"]}


@needs_torch
@pytest.mark.parametrize("what", ["model", "config", "worker_group", "tokenizer"])
def test_a_folder_that_wants_code_is_refused(tmp_path, what):
    folder = tmp_path / "folder"
    save_tiny(folder)
    if what == "tokenizer":
        words = {"tokenizer_class": "EvilTokenizer", "auto_map": TOKENIZER_MAP}
        add_code(folder, "tokenizer_config.json", **words)
    else:
        add_code(folder, "config.json", model_type="evil", auto_map=MODEL_MAP)
    status, said = load("model" if what == "tokenizer" else what, folder, tmp_path)
    assert not (folder / "ran").exists()
    assert status == 3, said
    named = "evil.EvilTokenizer" if what == "tokenizer" else "evil.EvilConfig"
    assert "ModelLoadError" in said and named in said
    assert "never runs code out of model folders" in said
    assert "[y/N]" not in said and "trust_remote_code=True" not in said


@needs_torch
def test_a_folder_that_also_brings_code_is_loaded_without_it(tmp_path):
    folder = tmp_path / "folder"
    save_tiny(folder)
    save_words(folder)
    add_code(folder, "config.json", auto_map=MODEL_MAP)
    add_code(
        folder,
        "tokenizer_config.json",
        tokenizer_class="PreTrainedTokenizerFast",
        auto_map=TOKENIZER_MAP,
    )
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text((folder / "evil.py").read_text())
    status, said = load("model", folder, tmp_path)
    assert not (folder / "ran").exists()
    assert (status, said) == (0, "loaded\n")


def test_code_beside_a_gguf_file_is_not_run(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    write_tiny_gguf(folder / "tiny.gguf")
    add_code(folder, "config.json", model_type="evil", auto_map=MODEL_MAP)
    add_code(
        folder,
        "tokenizer_config.json",
        tokenizer_class="EvilTokenizer",
        auto_map=TOKENIZER_MAP,
    )
    status, said = load("model", folder / "tiny.gguf", tmp_path)
    assert not (folder / "ran").exists()
    assert status == 0 and said.endswith("loaded\n"), said
