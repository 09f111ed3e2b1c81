"""Random requests by both kernel sets of the CPU: arrays of NumPy against tensors of torch.

The product computes over arrays; the oracle (`tests/support/torch_engine.py`) runs the same engine
over tensors. Both are in float32. `tests/integration/test_kernel_sets.py` compares them.

The models are small and have made-up weights. Prompts are random tokens, some with shared
beginnings. Half of the requests are greedy, the others are sampled with seeds. A part of them
reports log-probabilities.

A request is compared up to the first token that differs: later tokens continue another text. The
sets agree if no greedy token differs whose two best log-probabilities are more than 2e-5 apart, and
no log-probability by more than 1e-5. Drawn tokens that differ are counted only: a draw next to the
border of two tokens depends on the last bits of the logits.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

from pyengine import LLM, SamplingParams
from pyengine.outputs import Logprob, RequestOutput
from tests.support.torch_engine import torch_llm

MOST_GAP = 2e-5
"""The best two log-probabilities of a greedy token may be exchanged up to this distance."""
MOST_DIFFERENCE = 1e-5
"""Between two log-probabilities of the same token."""
LONGEST_PROMPT, MAX_TOKENS = 60, 12
SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "quantization": "none",
    "max_num_seqs": 64,
    "max_num_batched_tokens": 512,
    "max_model_len": 128,
    "num_blocks": 1024,
}
_BASE: dict[str, Any] = {
    "vocab_size": 509,
    "hidden_size": 72,
    "intermediate_size": 136,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
CONFIGURATIONS: Mapping[str, dict[str, Any]] = {
    "llama": {"model_type": "llama"},
    "gemma2": {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 4.0,
        "sliding_window": 11,
        "head_dim": 16,
    },
    "deepseek_v3": {
        "model_type": "deepseek_v3",
        "num_key_value_heads": 6,
        "kv_lora_rank": 20,
        "q_lora_rank": 18,
        "qk_nope_head_dim": 10,
        "qk_rope_head_dim": 6,
        "v_head_dim": 14,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 2,
        "routed_scaling_factor": 1.4,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 3,
    },
}
"""Models of two layers by their names."""


@dataclass(frozen=True)
class Requests:
    """Prompts and the parameters of each; `greedy` are the numbers of those without adjustments."""

    prompts: list[list[int]]
    params: list[SamplingParams]
    greedy: frozenset[int]


def random_requests(count: int, vocabulary: int, seed: int = 0) -> Requests:
    """Random requests, the same ones each time; every other one is greedy."""
    random = Random(seed)
    beginnings = [_tokens(random, 48, vocabulary) for _ in range(8)]
    prompts, params = [], []
    for number in range(count):
        prompt = _tokens(random, random.randint(1, LONGEST_PROMPT), vocabulary)
        if random.random() < 0.3:
            shared = random.choice(beginnings)[: random.randint(1, 48)]
            prompt = (shared + prompt)[:LONGEST_PROMPT]
        max_tokens = random.randint(1, MAX_TOKENS)
        sampling = {"temperature": 0.0} if number % 2 == 0 else _sampling(random, vocabulary)
        prompts.append(prompt)
        params.append(
            SamplingParams(
                max_tokens=max_tokens,
                seed=number,
                detokenize=False,
                logprobs=random.choice((None, None, 0, 1, 5, 20)),
                prompt_logprobs=random.choice((0, 1, 4)) if random.random() < 0.05 else None,
                **sampling,
            )
        )
    return Requests(prompts, params, frozenset(range(0, count, 2)))


def _tokens(random: Random, count: int, vocabulary: int) -> list[int]:
    return random.choices(range(3, vocabulary), k=count)


def _sampling(random: Random, vocabulary: int) -> dict[str, Any]:
    """Parameters of one request; a tenth of them adjusts logits and takes the largest."""

    def some(count: int) -> list[int]:
        return random.sample(range(vocabulary), count)

    several = {
        "top_p": random.uniform(0.3, 0.99),
        "top_k": random.randint(1, 60),
        "min_p": random.uniform(0.01, 0.3),
        "presence_penalty": random.uniform(-1.0, 2.0),
        "frequency_penalty": random.uniform(-1.0, 2.0),
        "repetition_penalty": random.uniform(0.7, 1.6),
        "logit_bias": {token: random.uniform(-5.0, 5.0) for token in some(6)},
        "allowed_token_ids": some(100),
        "stop_token_ids": some(9),
        "min_tokens": 1,
        "n": 3,
    }
    shares = {"allowed_token_ids": 0.05, "n": 0.05, "min_tokens": 0.1, "stop_token_ids": 0.1}
    chosen = {
        name: value for name, value in several.items() if random.random() < shares.get(name, 0.25)
    }
    chosen["temperature"] = 0.0 if random.random() < 0.1 else random.uniform(0.3, 1.6)
    if chosen["temperature"] == 0.0:
        chosen.pop("n", None)
    return chosen


@dataclass(frozen=True)
class FirstDifference:
    """The first token of an answer that differs; `prefix` are the tokens before it."""

    prefix: list[int]
    token: int
    expected: int
    gap: float = 0.0
    """The distance of the two best log-probabilities there, of greedy requests."""


@dataclass
class Comparison:
    """Answers of both kernel sets to the same requests. Tokens after a difference do not count."""

    name: str
    requests: int = 0
    tokens: int = 0
    logprobs: int = 0
    greedy: list[FirstDifference] = field(default_factory=list)
    drawn: list[FirstDifference] = field(default_factory=list)
    largest: float = 0.0
    """The largest difference of two log-probabilities."""
    at: str = ""
    """Where that is."""

    @property
    def widest_gap(self) -> float:
        """Of the greedy tokens that differ."""
        return max([difference.gap for difference in self.greedy], default=0.0)

    @property
    def agrees(self) -> bool:
        """True if greedy tokens and log-probabilities are within the limits."""
        return self.widest_gap <= MOST_GAP and self.largest <= MOST_DIFFERENCE

    def add(self, answers: tuple[RequestOutput, RequestOutput], *, is_greedy: bool) -> None:
        """Compare two answers to the next request."""
        actual, expected = answers
        number, prompt = self.requests, expected.prompt_token_ids
        self.requests += 1
        if expected.prompt_logprobs is not None:
            assert actual.prompt_logprobs is not None
            pairs = zip(actual.prompt_logprobs, expected.prompt_logprobs, strict=True)
            for position, (entry, other) in enumerate(pairs):
                if entry is not None and other is not None:
                    self._compare(entry, other, f"request {number}, prompt {position}")
        for answer, other_answer in zip(actual.outputs, expected.outputs, strict=True):
            pair = answer.token_ids, other_answer.token_ids
            same = _common(*pair)
            self.tokens += same
            if same < max(map(len, pair)):
                self.tokens += 1
                token, other_token = ([*ids, -1][same] for ids in pair)
                prefix = [*prompt, *answer.token_ids[:same]]
                difference = FirstDifference(prefix, token, other_token)
                (self.greedy if is_greedy else self.drawn).append(difference)
            if other_answer.logprobs is not None:
                assert answer.logprobs is not None
                entries = zip(answer.logprobs, other_answer.logprobs, strict=False)
                for position, (entry, other) in enumerate(entries):
                    if position <= same:
                        self._compare(entry, other, f"request {number}, token {position}")

    def _compare(
        self, actual: Mapping[int, Logprob], expected: Mapping[int, Logprob], where: str
    ) -> None:
        for token in actual.keys() & expected.keys():
            self.logprobs += 1
            difference = abs(actual[token].logprob - expected[token].logprob)
            if not difference <= self.largest:  # NaN, too
                self.largest = difference
                self.at = f"{where}, log-probability {expected[token].logprob:.3f}"


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens that both begin with."""
    pairs = list(zip(first, second, strict=False))
    return next(
        (position for position, (one, other) in enumerate(pairs) if one != other), len(pairs)
    )


def compare(name: str, model: Mapping[str, Any], requests: Requests) -> Comparison:
    """Answer by both kernel sets, and compare."""
    settings = {**SETTINGS, **model}
    over_arrays = partial(LLM, device="cpu", **settings)
    with over_arrays() as llm:
        actual = llm.generate(requests.prompts, requests.params, use_tqdm=False)
    with torch_llm(**settings, num_threads=1) as llm:  # torch's threads would wait for each other
        expected = llm.generate(requests.prompts, requests.params, use_tqdm=False)
    result = Comparison(name)
    for number, pair in enumerate(zip(actual, expected, strict=True)):
        result.add(pair, is_greedy=number in requests.greedy)
    if result.greedy:
        with over_arrays() as llm:
            result.greedy = _with_gaps(llm, result.greedy)
    return result


def _with_gaps(llm: LLM, differences: Sequence[FirstDifference]) -> list[FirstDifference]:
    """The differences of greedy requests, with the gaps of their two best log-probabilities."""
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=2, detokenize=False)
    outputs = llm.generate(
        [difference.prefix for difference in differences], params, use_tqdm=False
    )
    measured = []
    for difference, output in zip(differences, outputs, strict=True):
        (best,) = output.outputs[0].logprobs or []
        first, second = sorted((entry.logprob for entry in best.values()), reverse=True)[:2]
        measured.append(
            FirstDifference(
                difference.prefix, difference.token, difference.expected, first - second
            )
        )
    return measured


@contextmanager
def made_up_models(names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Settings of each model's engine, by the model's name."""
    with TemporaryDirectory(prefix="pyengine-") as folder:
        models = {}
        for name in names:
            own = Path(folder) / name
            own.mkdir()
            (own / "config.json").write_text(json.dumps({**_BASE, **CONFIGURATIONS[name]}))
            models[name] = {"model": own, "load_format": "dummy"}
        yield models
