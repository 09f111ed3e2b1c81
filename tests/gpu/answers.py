"""Requests to small models, and the oracle's answers to them with what rounding allows."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import torch

from pyengine import LLM, RequestOutput, SamplingParams
from tests.gpu.compare import Answer, Bounds, Comparison, compare
from tests.gpu.models import ORACLE, VOCABULARY, Place

MAX_TOKENS = 24
_TOP = 20
"""Tokens of each position whose log-probabilities are known: a near-tie is among them."""
GREEDY = SamplingParams(
    temperature=0, ignore_eos=True, max_tokens=MAX_TOKENS, logprobs=_TOP, detokenize=False
)
WITH_PROMPT = SamplingParams(
    temperature=0,
    ignore_eos=True,
    max_tokens=MAX_TOKENS,
    logprobs=_TOP,
    prompt_logprobs=0,
    detokenize=False,
)


def tokens(count: int, random: Random) -> list[int]:
    """Random tokens that no small model treats as special."""
    return random.choices(range(3, VOCABULARY), k=count)


def prompts() -> list[list[int]]:
    """Of several lengths, past every window and page; two begin alike."""
    random = Random(5)
    some = [tokens(count, random) for count in (3, 60, 150, 300)]
    return [*some, some[3][:128] + tokens(40, random)]


def ask(llm: LLM, params: SamplingParams = GREEDY) -> list[Answer]:
    """The answers to `prompts`."""
    return [answer(output) for output in llm.generate(prompts(), params, use_tqdm=False)]


def answer(output: RequestOutput) -> Answer:
    """The first completion of an output, as `compare` wants it."""
    given = output.outputs[0]
    prompt = [
        entry[token].logprob
        for token, entry in zip(output.prompt_token_ids, output.prompt_logprobs or (), strict=False)
        if entry is not None
    ]
    top = [{token: item.logprob for token, item in entry.items()} for entry in given.logprobs or ()]
    return Answer(prompt, given.token_ids, top)


@dataclass(frozen=True)
class Oracle:
    """The oracle's answers in the given format and in float32, and their tolerance."""

    same: list[Answer]
    exact: list[Answer]
    rounding: Comparison
    bounds: Bounds

    def compare(self, answers: Sequence[Answer]) -> tuple[Comparison, Comparison]:
        """Answers against the oracle of the same format, and against float32."""
        return (
            compare(answers, self.same, self.bounds.same, self.bounds.mean),
            compare(answers, self.exact, self.bounds.exact, self.bounds.mean),
        )


@cache
def oracle(place: Place, family: str, dtype: str, backend: str = ORACLE) -> Oracle:
    """Ask the backend about `prompts`, whole prompts in one step, blocks of 16."""

    def asked(kind: str) -> list[Answer]:
        folder = place.model(family)
        return ask(
            place.llm(folder, kind, backend, block_size=16, async_scheduling=False), WITH_PROMPT
        )

    exact = asked("float32")
    same = exact if dtype == "float32" else asked(dtype)
    rounding = compare(same, exact, float("inf"))
    bounds = Bounds.float32() if dtype == "float32" else Bounds.by_rounding(rounding)
    return Oracle(same, exact, rounding, bounds)


@torch.no_grad()
def plain_prompt_logprobs(place: Place, family: str) -> list[list[float]]:
    """transformers' own forward pass in float32, without any of our code, over `prompts`."""
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        place.model(family), dtype=torch.float32, attn_implementation="eager"
    )
    model.to(place.device).eval()
    found = []
    for prompt in prompts():
        ids = torch.tensor([prompt], device=place.device)
        logprobs = model(ids, use_cache=False).logits[0].float().log_softmax(-1)
        found.append(logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].tolist())
    return found
