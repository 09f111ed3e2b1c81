"""`lm_eval` against the server: its log-probabilities are the model's, its second run is cheap."""

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from benches.engine.float_model import float_folder
from pyengine import LLM, SamplingParams
from pyengine.async_engine import AsyncEngine
from tests.integration.test_tokens_bbh import ARCHIVE, read
from tests.support.clients import needs_clients, run
from tests.support.serving import RunningServer

pytestmark = [
    pytest.mark.clients,
    needs_clients,
    pytest.mark.skipif(not ARCHIVE.is_file(), reason=f"{ARCHIVE} is not there"),
]
TASKS = ("sports_understanding", "snarks", "movie_recommendation")
QUESTIONS = 3
STOPS = ("\n\n", "Q:", ".", " so ", "however")


@dataclass(frozen=True)
class Answer:
    """What `lm_eval` has got of a choice: a text and its log-probability behind another."""

    context: str
    choice: str
    logprob: float
    is_greedy: bool


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tasks, YAML and JSON. Each question follows the same worked examples."""
    folder = tmp_path_factory.mktemp("tasks")
    with tarfile.open(ARCHIVE) as archive:
        for name in TASKS:
            head = read(archive, f"cot-prompts/{name}.txt").split("-----\n", 1)[-1].strip()
            examples = json.loads(read(archive, f"bbh/{name}.json"))["examples"]
            choices = sorted({example["target"] for example in examples})
            lines = [
                {
                    "text": f"{head}\n\nQ: {example['input']}\nA: So the answer is",
                    "question": example["input"],
                    "choices": choices,
                    "gold": choices.index(example["target"]),
                    "target": example["target"],
                }
                for example in examples[:QUESTIONS]
            ]
            data = folder / f"{name}.jsonl"
            data.write_text("".join(json.dumps(line) + "\n" for line in lines))
            write_task(
                folder / f"{name}.yaml",
                data,
                output_type="multiple_choice",
                doc_to_text="text",
                doc_to_choice="choices",
                doc_to_target="gold",
                metric_list=[{"metric": "acc"}],
            )
    write_task(
        folder / "written.yaml",
        folder / "snarks.jsonl",
        output_type="generate_until",
        doc_to_text="question",
        doc_to_target="target",
        generation_kwargs={"until": list(STOPS), "max_gen_toks": 48},
        metric_list=[{"metric": "exact_match"}],
    )
    return folder


def write_task(path: Path, data: Path, **fields: Any) -> None:
    """JSON is YAML."""
    dataset = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}}
    path.write_text(json.dumps({"task": path.stem, "test_split": "test", **dataset, **fields}))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    """The embedded model with float weights, which transformers loads, too."""
    with (
        AsyncEngine(float_folder(), dtype="float32", num_blocks=1024) as engine,
        RunningServer(engine, log_format="none") as server,
    ):
        yield server


@dataclass(frozen=True)
class Suite:
    """How `lm_eval` is called; `home` is where it keeps what it has read."""

    server: RunningServer
    tasks: Path
    home: Path

    def run(self, model: str, route: str, *names: str, **arguments: object) -> list[Any]:
        """The logged samples of each task."""
        out = self.home / f"out {len(list(self.home.iterdir()))}"
        folder = float_folder()
        settings = {"base_url": f"{self.server.address}{route}", "model": folder.name, **arguments}
        if "chat" not in model:
            settings |= {"tokenizer_backend": "huggingface", "tokenizer": folder}
        given = ",".join(f"{name}={value}" for name, value in settings.items())
        told_apart = ["--apply_chat_template"] if "chat" in model else []
        run(
            *("lm_eval", "run", "--model", model, "--model_args", given, *told_apart),
            *("--tasks", *names, "--include_path", str(self.tasks)),
            *("--output_path", str(out), "--log_samples"),
            HF_HOME=str(self.home / "hub"),
            OPENAI_API_KEY="",
        )
        files = sorted(out.rglob("samples_*.jsonl"))
        assert len(files) == len(names)
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    def answers(self) -> list[Answer]:
        """All choices of all questions, by their log-probabilities."""
        samples = self.run("local-completions", "/v1/completions", *TASKS, num_concurrent=4)
        return [
            Answer(asked["arg_0"], asked["arg_1"], float(logprob), is_greedy == "True")
            for sample in samples
            for asked, [[logprob, is_greedy]] in zip(
                sample["arguments"].values(), sample["resps"], strict=True
            )
        ]

    def computed_tokens(self) -> int:
        return self.server.engine.stats().counters["computed_tokens"]


@pytest.fixture
def suite(server: RunningServer, tasks: Path, tmp_path: Path) -> Suite:
    return Suite(server, tasks, tmp_path)


def test_log_probabilities_are_those_of_the_model_and_come_from_the_cache(suite: Suite) -> None:
    first = suite.answers()
    before = suite.computed_tokens()
    second = suite.answers()
    computed = suite.computed_tokens() - before

    tokenizer = suite.server.engine.tokenizer
    contexts = [tokenizer.encode(request.context) for request in first]
    whole = [tokenizer.encode(request.context + request.choice) for request in first]
    total = sum(map(len, whole))
    print(f"{len(first)} choices, {total} prompt tokens, {computed} computed in the second run")
    assert computed < 0.05 * total

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    with LLM(float_folder(), dtype="float32", num_blocks=1024) as llm:
        outputs = llm.generate([{"prompt_token_ids": ids} for ids in whole], params, use_tqdm=False)
    model = AutoModelForCausalLM.from_pretrained(float_folder(), dtype=torch.float32).eval()
    for request, again, begin, ids, output in zip(
        first, second, contexts, whole, outputs, strict=True
    ):
        length = len(begin)
        assert ids[:length] == begin
        assert output.prompt_logprobs is not None
        pairs = zip(ids[length:], output.prompt_logprobs[length:], strict=True)
        offline = sum(entry[token].logprob for token, entry in pairs if entry is not None)
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, length - 1 : -1]
        scores, asked = logits.log_softmax(-1), torch.tensor(ids[length:])
        reference = float(scores.gather(-1, asked[:, None]).sum())
        assert request.logprob == pytest.approx(offline, abs=1e-4)
        assert request.logprob == pytest.approx(reference, abs=1e-4)
        assert request.is_greedy == bool((scores.argmax(-1) == asked).all())
        assert (again.context, again.choice) == (request.context, request.choice)
        assert again.is_greedy == request.is_greedy
        assert again.logprob == pytest.approx(request.logprob, abs=1e-4)


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_five_stop_strings(model: str, suite: Suite) -> None:
    """Chats get four of them: `lm_eval` itself leaves the rest out."""
    route = "/v1/chat/completions" if "chat" in model else "/v1/completions"
    samples = suite.run(model, route, "written", num_concurrent=2)
    assert len(samples) == QUESTIONS
    said = [sample["resps"][0][0] for sample in samples]
    known = STOPS[:4] if "chat" in model else STOPS
    assert not any(stop in text for text in said for stop in known)
    with LLM(float_folder(), dtype="float32", num_blocks=512) as llm:
        params = SamplingParams(temperature=0, max_tokens=48, stop=list(known))
        asked = [sample["doc"]["question"] for sample in samples]
        if "chat" in model:
            chats = [[{"role": "user", "content": question}] for question in asked]
            outputs = llm.chat(chats, params, use_tqdm=False)
        else:
            outputs = llm.generate(asked, params, use_tqdm=False)
    assert said == [output.outputs[0].text for output in outputs]
    suite.server.is_well()
