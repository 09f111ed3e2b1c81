"""Requests of every kind by one seed, what each gets where it is alone, and steps that fail."""

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any, Literal

from pyengine.executor.model_runner import StepLogits
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from tests.support.engines import Bench, make_bench
from tests.support.fake_runner import VOCAB_SIZE, continued
from tests.support.tokenizers import Decoder, byte_level

POISON = VOCAB_SIZE - 1
_NO_TOKEN = 10**6
_STEMS = [[at, 7, at + 1, 3, 9, at, 11, 2, 6, 4, 8, 1] for at in range(4)]
"""Common beginnings of prompts."""

Leaving = Literal["stays", "closes", "is aborted", "has a deadline"]
Tokens = dict[int, list[int]]
"""Of each sample, by its index."""


@dataclass(frozen=True)
class Wish:
    """A request, and how long its caller waits for it."""

    prompt: tuple[int, ...]
    params: SamplingParams
    salt: str | None
    priority: float
    leaving: Leaving
    patience: int
    """Items that its caller reads before he goes, if he goes."""
    is_poisoned: bool = False
    """The forward pass fails on it, every time."""


@cache
def letters() -> Decoder:
    """A tokenizer whose first tokens are the letters of ASCII, more or less."""
    return byte_level(260)


def drawn(random: Random) -> Wish:
    """Any request that an engine of `small_engine` can serve."""
    is_poisoned = random.random() < 0.01
    stem = random.choice(_STEMS)[: random.choice([0, 4, 8, 12])]
    prompt = [*stem, *(random.randrange(POISON) for _ in range(random.randint(1, 10)))]
    is_greedy = random.random() < 0.5
    leaving: Leaving = random.choices(
        ["stays", "closes", "is aborted", "has a deadline"], [6, 2, 1, 1]
    )[0]
    params = SamplingParams(
        n=random.choice([1, 1, 1, 2, 3]),
        temperature=0 if is_greedy else random.choice([0.7, 1.5]),
        top_p=random.choice([1, 0.9]),
        seed=random.choice([0, -(2**63), 2**64 - 1, random.randrange(2**63)]),
        max_tokens=random.randint(3, 20) if leaving == "stays" else random.randint(8, 20),
        min_tokens=random.choice([0, 0, 3]) if leaving == "stays" else 0,
        ignore_eos=random.random() < 0.5,
        stop=random.sample("abcdefghijklmnopqrstuvwxyz", random.choice([0, 0, 2, 6])),
        stop_token_ids=random.choice([(), (), (5, 6)]),
        presence_penalty=random.choice([0, 0, 0, 1]),
        logprobs=random.choice([None, None, None, 2]),
        output_kind=random.choice(list(RequestOutputKind)),
    )
    return Wish(
        prompt=(*prompt, POISON) if is_poisoned else tuple(prompt),
        params=params,
        salt=random.choice([None, None, "a", "b"]),
        priority=random.choice([0, 0, 0, 1, -2.5]),
        leaving=leaving,
        patience=random.choice([0, 0, 1, 2, 5]),
        is_poisoned=is_poisoned,
    )


SMALL: dict[str, Any] = {
    "num_blocks": 40,
    "block_size": 4,
    "max_num_seqs": 12,
    "max_num_batched_tokens": 48,
    "max_model_len": 48,
}
"""Settings of a pool that is too small for as many as may run at once."""


class Alone:
    """The outputs of requests that run alone."""

    def __init__(self) -> None:
        self._bench = make_bench(256, 4, max_model_len=48, tokenizer=letters())
        never_poison(self._bench)

    def answer(self, wish: Wish) -> RequestOutput:
        """The whole of it."""
        (output,) = self._bench.generate([list(wish.prompt)], wish.params)
        params = wish.params
        if params.temperature == 0 and not params.presence_penalty and not params.min_tokens:
            for completion in output.outputs:  # and the same without any engine
                expected = continued(list(wish.prompt), len(completion.token_ids))
                assert completion.token_ids == expected or POISON in expected
        return output


def never_poison(bench: Bench) -> None:
    """No answer has the poison: whoever has it has it in his prompt."""
    run = bench.runner.run

    def harmless(*step: Any) -> StepLogits:
        logits = run(*step)
        logits.sampling[:, POISON] = -math.inf
        return logits

    bench.runner.run = harmless  # type: ignore[method-assign]


class Faults:
    """Lets steps fail: on the poisoned always, otherwise now and then, and leaves a mess behind."""

    def __init__(self, bench: Bench, random: Random, seen: Counter[str]) -> None:
        never_poison(bench)
        self._bench, self._random, self._seen = bench, random, seen
        self._run, self._calm = bench.runner.run, 0
        bench.runner.run = self._faulty  # type: ignore[method-assign]

    def _faulty(self, sizes: tuple[int, int, int], copies: Any, *rest: Any) -> StepLogits:
        arrays, total = self._bench.runner.arrays, sizes[0]
        is_poisoned = POISON in arrays["input_ids"][:total]
        self._calm += 1
        # A second one during the search for whoever is at fault would be taken for a proof.
        searches = self._bench.engine.recovery.faults.suspects
        by_chance = self._calm > 20 and not searches and self._random.random() < 0.05
        if not is_poisoned and not by_chance:
            return self._run(sizes, copies, *rest)
        self._calm = 0
        self._seen["steps that failed on a request" if is_poisoned else "steps that failed"] += 1
        slots = arrays["slot_mapping"][:, :total]
        self._bench.runner.slots[slots[slots >= 0]] = _NO_TOKEN
        for _, target in copies:
            self._bench.runner.block(self._bench.runner.slots, target)[:] = _NO_TOKEN
        raise ValueError("poison" if is_poisoned else "by chance")
