"""Steps of GRPO with the embedded model: rollouts by pyengine, and by `generate` of transformers.

    .venv/bin/python -m benches.engine.grpo [--steps 40] [--compared 6] [--picture FILE]

The training is that of `examples/grpo.py`. Prints the reward of each step with rollouts by
pyengine, and the mean difference between the log-probabilities of sampler and trainer; then
`compared` steps of each in turns, with the same questions: medians of the seconds for drawing,
training and updating, the slowest in brackets.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from benches.engine.float_model import float_folder
from benches.peers.report import machine
from examples import grpo
from pyengine import LLM


def by_transformers(
    model: Any, tokenizer: Any, asked: Sequence[tuple[str, int]]
) -> list[list[grpo.Rollout]]:
    """A group of answers to each question, drawn by the trainer's own model."""
    chats = [[{"role": "user", "content": question}] for question, _ in asked]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    with torch.inference_mode():
        drawn = model.generate(
            **inputs,
            do_sample=True,
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=grpo.MAX_TOKENS,
            num_return_sequences=grpo.ANSWERS,
        )
    width, groups = inputs["input_ids"].shape[1], []
    for number, (_, expected) in enumerate(asked):
        prompt = inputs["input_ids"][number][inputs["attention_mask"][number].bool()].tolist()
        group = []
        for row in drawn[number * grpo.ANSWERS : (number + 1) * grpo.ANSWERS, width:].tolist():
            end = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else None
            text = tokenizer.decode(row[:end], skip_special_tokens=True)
            tokens = row[:end]
            got = grpo.reward(text, expected)
            group.append(grpo.Rollout(prompt, tokens, [float("nan")] * len(tokens), got))
        groups.append(group)
    return groups


class Trainer:
    """A model that is trained, and the seconds that each part of its steps took."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=grpo.RATE, weight_decay=0.0)
        self.seconds: dict[str, list[float]] = {"draw": [], "train": [], "update": []}
        self.rewards: list[float] = []
        self.differences: list[float] = []

    def step(self, llm: LLM | None, tokenizer: Any, asked: Any, seed: int) -> None:
        """One step, with rollouts by an engine or by the model itself."""
        begin = perf_counter()
        if llm is None:
            groups = by_transformers(self.model, tokenizer, asked)
        else:
            groups = grpo.rollouts(llm, asked, seed)
        drawn = perf_counter()
        chosen = [pair for group in groups for pair in grpo.advantages(group)]
        difference = grpo.train(self.model, self.optimizer, chosen) if chosen else 0.0
        trained = perf_counter()
        if llm is not None:
            llm.update_weights(self.model.named_parameters())
            self.differences.append(difference)
        parts = (drawn - begin, trained - drawn, perf_counter() - trained)
        for name, seconds in zip(self.seconds, parts, strict=True):
            self.seconds[name].append(seconds)
        self.rewards.append(mean(rollout.reward for group in groups for rollout in group))

    def median_step(self) -> float:
        """Seconds of a step."""
        return median(map(sum, zip(*self.seconds.values(), strict=True)))


def picture(rewards: Sequence[float], path: Path) -> None:
    """The reward of each step."""
    from matplotlib import pyplot as plt

    from benches.peers.plots import STYLE

    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(figsize=(6, 3))
        axes.plot(rewards, color="#d1495b")
        axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1))
        figure.savefig(path, bbox_inches="tight", metadata={"Date": None})


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--compared", type=int, default=6)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    folder, random = float_folder(), Random(0)
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    print(machine())
    with LLM(folder, **grpo.ROLLOUTS) as llm:
        ours = Trainer(folder)
        begin = perf_counter()
        for step in range(arguments.steps):
            ours.step(llm, tokenizer, grpo.questions(random), step)
            print(
                f"step {step}: reward {ours.rewards[-1]:.3f}, log-probabilities differ by "
                f"{ours.differences[-1]:.4f}, {perf_counter() - begin:.0f} s",
                flush=True,
            )
        if arguments.picture is not None:
            picture(ours.rewards, arguments.picture)
        if not arguments.compared:
            return
        ours, theirs = Trainer(folder), Trainer(folder)
        llm.update_weights(folder)
        for step in range(arguments.compared):
            asked = grpo.questions(random)
            ours.step(llm, tokenizer, asked, step)
            theirs.step(None, tokenizer, asked, step)
    print("\n| part of a step | pyengine | transformers |\n|---|---:|---:|")
    for name, seconds in ours.seconds.items():
        pairs = [seconds, theirs.seconds[name]]
        cells = [f"{median(own):.2f} s ({max(own):.2f})" for own in pairs]
        print(f"| {name} | {' | '.join(cells)} |")
    print(f"| step | {ours.median_step():.2f} s | {theirs.median_step():.2f} s |")
    print(f"ratio of steps: {ours.median_step() / theirs.median_step():.2f}")


if __name__ == "__main__":
    main()
