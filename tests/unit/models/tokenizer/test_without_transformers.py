"""A tokenizer is opened and used, and a model answers, without importing transformers."""

import json
from pathlib import Path

from pyengine.models.source import embedded_gguf
from tests.support import chat
from tests.support.checkpoints import save_tiny
from tests.support.processes import run_python
from tests.unit.models.tokenizer.kinds import KINDS

_TOKENIZER = """
import sys
from pathlib import Path
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.tokenizer import eos_token_ids, load_tokenizer, tokenizer_of_gguf
path = Path(sys.argv[1])
if path.is_dir():
    tokenizer = load_tokenizer(path)
    assert eos_token_ids(path, tokenizer, 10**6)
else:
    with GGUFFile.open(path) as file:
        tokenizer, ends = tokenizer_of_gguf(file)
    assert ends
prompt = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
ids = tokenizer.encode(prompt)
assert tokenizer.decode(ids) == prompt and len(ids) > 3
print(*sorted({"torch", "transformers"} & sys.modules.keys()))
"""

_ANSWER = """
import sys
from pyengine import LLM, SamplingParams
from pyengine.sampling_params import StructuredOutputs
params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, stop=["zebra"], bad_words=["a"])
with LLM(sys.argv[1], device="cpu", num_blocks=64, compile=False) as llm:
    (chat,) = llm.chat([{"role": "user", "content": "Hi"}], params, use_tqdm=False)
    (text,) = llm.generate(["Hello"], params, use_tqdm=False)
    assert chat.finished and text.finished and llm.encode("Hello")
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="[0-9]{2}"))
    (digits,) = llm.generate(["Hello"], params, use_tqdm=False)
    assert digits.outputs[0].text.isdigit()
    llm.describe()
print(*sorted({"transformers"} & sys.modules.keys()))
"""


def run(code: str, path: Path) -> str:
    lines = run_python(code, path).stdout.strip().splitlines()
    return lines[-1] if lines else ""


def save_folder(folder: Path) -> None:
    tokenizer = KINDS["byte level"]()
    save_tiny(folder, vocab_size=tokenizer.get_vocab_size())
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|end|>", "chat_template": chat.CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def test_a_folder(tmp_path: Path) -> None:
    save_folder(tmp_path)
    assert run(_TOKENIZER, tmp_path) == ""


def test_a_gguf_file() -> None:
    assert run(_TOKENIZER, embedded_gguf()) == ""


def test_an_engine_that_answers(tmp_path: Path) -> None:
    save_folder(tmp_path)
    assert run(_ANSWER, tmp_path) == ""
