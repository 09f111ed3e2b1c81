"""Reinforcement learning with a reward: rollouts by pyengine, which gets the new weights each step.

Group relative policy optimisation (GRPO, arXiv:2402.03300) of the embedded model, which learns to
answer sums with the number alone::

    python examples/grpo.py 40  # steps

For each question a group of answers is drawn. An answer's advantage is its reward, relative to the
others of its group. The trainer raises the probability of answers that are better than the rest.
"""

import re
import sys
from collections.abc import Sequence
from random import Random
from statistics import mean
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any, NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from pyengine import LLM, SamplingParams
from pyengine.models.source import embedded_gguf

QUESTIONS, ANSWERS, MAX_TOKENS, RATE = 8, 32, 24, 2e-5
ROLLOUTS: dict[str, Any] = {"dtype": "bfloat16", "quantization": "int8", "max_model_len": 256}
"""Settings of the engine, which draws in 8 bits: the trainer corrects for the difference."""
TRAINED = 4
"""Of each group, the answers with the highest and the lowest rewards (arXiv:2504.13818)."""


class Rollout(NamedTuple):
    """A drawn answer."""

    prompt: list[int]
    tokens: list[int]
    logprobs: list[float]
    """By the engine that drew it."""
    reward: float


def reward(text: str, expected: int) -> float:
    """1 for the number alone; less for each further word before it; 0 for another number."""
    numbers = re.findall(r"\d+", text)
    is_right = bool(numbers) and int(numbers[-1]) == expected
    return 1 / len(text.split()) if is_right else 0.0


def questions(random: Random) -> list[tuple[str, int]]:
    """Sums and their results."""
    pairs = [(random.randint(1, 9), random.randint(1, 9)) for _ in range(QUESTIONS)]
    return [(f"What is {first} + {second}?", first + second) for first, second in pairs]


def rollouts(llm: LLM, asked: Sequence[tuple[str, int]], seed: int) -> list[list[Rollout]]:
    """A group of answers to each question, by the engine."""
    params = SamplingParams(n=ANSWERS, max_tokens=MAX_TOKENS, logprobs=0, seed=seed)
    chats = [[{"role": "user", "content": question}] for question, _ in asked]
    groups = []
    for output, (_, expected) in zip(llm.chat(chats, params, use_tqdm=False), asked, strict=True):
        group = []
        for answer in output.outputs:
            assert answer.logprobs is not None
            pairs = zip(answer.logprobs, answer.token_ids, strict=True)
            logprobs = [entries[token].logprob for entries, token in pairs]
            got = reward(answer.text, expected)
            group.append(Rollout(output.prompt_token_ids, answer.token_ids, logprobs, got))
        groups.append(group)
    return groups


def advantages(group: Sequence[Rollout]) -> list[tuple[Rollout, float]]:
    """The answers of a group that are trained on, with their advantages."""
    rewards = torch.tensor([rollout.reward for rollout in group])
    relative = ((rewards - rewards.mean()) / (rewards.std() + 1e-4)).tolist()
    pairs = sorted(zip(group, relative, strict=True), key=lambda pair: pair[1])
    return [] if rewards.std() == 0 else pairs[: TRAINED // 2] + pairs[-TRAINED // 2 :]


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, chosen: list[tuple[Rollout, float]]
) -> float:
    """One step of the policy gradient; the mean difference of both sides' log-probabilities."""
    longest = max(len(rollout.prompt) + len(rollout.tokens) for rollout, _ in chosen)
    ids = torch.zeros(len(chosen), longest, dtype=torch.long)
    weights, drawn = torch.zeros(len(chosen), longest), torch.zeros(len(chosen), longest)
    for row, (rollout, advantage) in enumerate(chosen):
        begin, end = len(rollout.prompt), len(rollout.prompt) + len(rollout.tokens)
        ids[row, :end] = torch.tensor(rollout.prompt + rollout.tokens)
        weights[row, begin:end] = advantage
        drawn[row, begin:end] = torch.tensor(rollout.logprobs)
    first = min(len(rollout.prompt) for rollout, _ in chosen) - 1
    logits = model(ids, attention_mask=(ids > 0).long(), logits_to_keep=longest - first).logits
    following = ids[:, first + 1 :, None]
    logprobs = logits[:, :-1].float().log_softmax(-1).gather(2, following)[:, :, 0]
    weights, drawn = weights[:, first + 1 :], drawn[:, first + 1 :]
    # The engine's arithmetic is not the trainer's: the ratio corrects for it, up to a limit.
    ratio = (logprobs.detach() - drawn).exp().clamp(max=2.0).nan_to_num(1.0)
    is_answer = weights != 0
    loss = -(weights * ratio * (logprobs - logprobs.detach()).exp())[is_answer].mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return float((logprobs.detach() - drawn)[is_answer].abs().mean())


def save_embedded(folder: str) -> Any:
    """The embedded model of a GGUF file, saved as a folder of floats, whose weights can change."""
    file = embedded_gguf()
    where = {"gguf_file": file.name, "trust_remote_code": False}
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    del model.config.quantization_config
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(file.parent, **where).save_pretrained(folder)
    return model


def main(folder: str, steps: int) -> list[float]:
    """Train; the mean reward of each step."""
    model = save_embedded(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    random, rewards = Random(0), []
    with LLM(folder, **ROLLOUTS) as llm:
        for step in range(steps):
            begin = monotonic()
            groups = rollouts(llm, questions(random), seed=step)
            drawn = monotonic()
            chosen = [pair for group in groups for pair in advantages(group)]
            difference = train(model, optimizer, chosen) if chosen else 0.0
            trained = monotonic()
            llm.update_weights(model.named_parameters())
            rewards.append(mean(rollout.reward for group in groups for rollout in group))
            print(
                f"step {step}: reward {rewards[-1]:.3f}, log-probabilities differ by "
                f"{difference:.4f}; drawn in {drawn - begin:.1f} s, trained in "
                f"{trained - drawn:.1f} s, updated in {monotonic() - trained:.1f} s"
            )
    return rewards


if __name__ == "__main__":
    with TemporaryDirectory() as temporary:
        main(temporary, int(sys.argv[1]))
