"""Hooks and beam search of the embedded model against transformers' `generate`."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from benches.engine.float_model import float_folder
from pyengine import LLM, BeamSearchParams, SamplingParams
from pyengine.utils.openmp import torch_threads
from tests.support.without_torch import needs_torch

pytestmark = [pytest.mark.slow, needs_torch]

PROMPTS = ["The capital of France is", "Once upon a time, there was a", "def add(a, b):\n    "]
BANNED = [253, 30, 28]


@pytest.fixture(scope="module")
def judge() -> Iterator[Any]:
    from transformers import AutoModelForCausalLM

    with torch_threads(2):
        yield AutoModelForCausalLM.from_pretrained(float_folder(), dtype="float32")


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(float_folder()), device="cpu", dtype="float32", num_blocks=256) as llm:
        yield llm


def generated(judge: Any, prompt: list[int], **options: Any) -> Any:
    import torch

    fixed = {"do_sample": False, "pad_token_id": 0, "return_dict_in_generate": True}
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        return judge.generate(
            ids, attention_mask=torch.ones_like(ids), **{**fixed, "output_scores": True, **options}
        )


@pytest.mark.parametrize("width", [2, 4])
def test_beams_without_an_end_are_those_of_transformers(judge: Any, llm: LLM, width: int) -> None:
    prompts = [llm.encode(text) for text in PROMPTS]
    found = llm.beam_search(prompts, BeamSearchParams(width, 20, ignore_eos=True))
    for prompt, output in zip(prompts, found, strict=True):
        expected = generated(
            judge,
            prompt,
            num_beams=width,
            num_return_sequences=width,
            max_new_tokens=20,
            eos_token_id=None,
        )
        assert [item.tokens for item in output.sequences] == expected.sequences.tolist()
        totals = [item.cum_logprob / 20 for item in output.sequences]
        assert totals == pytest.approx(expected.sequences_scores.tolist(), abs=1e-3)


def test_beams_with_an_end_are_those_of_transformers_without_a_length_penalty(
    judge: Any, llm: LLM
) -> None:
    asked = ["Say only: yes.", "What is 2 + 2? Answer with a number only."]
    prompts = [llm.apply_chat_template([{"role": "user", "content": text}]) for text in asked]
    params = BeamSearchParams(3, 24, length_penalty=0.0, include_stop_str_in_output=True)
    reasons = set()
    for prompt, output in zip(prompts, llm.beam_search(prompts, params), strict=True):
        expected = generated(judge, prompt, num_beams=3, max_new_tokens=24, length_penalty=0.0)
        best = output.sequences[0]
        assert best.tokens == expected.sequences[0].tolist()
        assert math.isclose(best.cum_logprob, float(expected.sequences_scores[0]), abs_tol=1e-3)
        reasons.add(best.finish_reason)
    assert "stop" in reasons


def test_processors_of_both_kinds_say_the_same(judge: Any, llm: LLM) -> None:
    from transformers import LogitsProcessor, LogitsProcessorList

    class Ban(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores = scores.clone()
            scores[:, [*BANNED, int(input_ids[0, -1])]] = -math.inf
            return scores

    def ban(prompt: list[int], output: list[int], logits: Any) -> None:
        logits[[*BANNED, (output or prompt)[-1]]] = -np.inf

    prompts = [llm.encode(text) for text in PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, logits_processors=[ban])
    outputs = llm.generate(prompts, params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = generated(
            judge,
            prompt,
            max_new_tokens=20,
            eos_token_id=None,
            logits_processor=LogitsProcessorList([Ban()]),
        )
        assert [*prompt, *output.outputs[0].token_ids] == expected.sequences[0].tolist()


def test_a_condition_stops_where_that_of_transformers_does(judge: Any, llm: LLM) -> None:
    from transformers import StoppingCriteria, StoppingCriteriaList

    class HasPeriod(StoppingCriteria):
        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            import torch

            done = "." in llm.decode(input_ids[0, self.start :].tolist())
            return torch.tensor([done])

        def __init__(self, start: int) -> None:
            self.start = start

    def has_period(output: list[int], text: str) -> bool:
        return "." in text

    params = SamplingParams(temperature=0, max_tokens=40, stop_when=has_period)
    for text in PROMPTS[:2]:
        prompt = llm.encode(text)
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        criteria = StoppingCriteriaList([HasPeriod(len(prompt))])
        expected = generated(judge, prompt, max_new_tokens=40, stopping_criteria=criteria)
        assert [*prompt, *output.outputs[0].token_ids] == expected.sequences[0].tolist()
        assert output.outputs[0].stop_reason == "has_period"
        assert output.outputs[0].text.endswith(".")
