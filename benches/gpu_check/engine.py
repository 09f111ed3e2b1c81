"""The engine's promises on the device: overlap, sharing, late merge, samples, preemption."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from benches.gpu_check.answers import (
    GREEDY,
    ORACLE,
    answer,
    family_folder,
    oracle,
    small_llm,
    tokens,
)
from benches.gpu_check.compare import Comparison, compare
from benches.gpu_check.rows import Part, Row, Setup, checked, rounded
from pyengine import LLM, RequestOutput, SamplingParams

_DRAWN_DIFFERENT = 0.01
"""Share of requests with drawn tokens that may differ: a draw on the border of two tokens goes by
rounding, and how near it was cannot be told from log-probabilities."""


@dataclass(frozen=True)
class Mode:
    """A number format and a backend, the bound on greedy near-ties, and the model."""

    dtype: str
    backend: str
    bound: float
    folder: Path
    setup: Setup

    @property
    def name(self) -> str:
        """As the report says it."""
        return f"{self.dtype}, {self.backend}"

    def llm(self, **settings: Any) -> LLM:
        """An engine in this mode, with graphs and overlap unless told otherwise."""
        settings = {"enforce_eager": False, **settings}
        return small_llm(self.folder, self.setup, self.dtype, self.backend, **settings)


def parts(setup: Setup) -> list[Part]:
    """Each check in float32 over the oracle, where ties are rare, and as it will be used."""
    kinds = [("float32", ORACLE), ("bfloat16" if setup.on_cuda else "float32", "auto")]
    checks = {
        "overlap": _overlap,
        "sharing": _sharing,
        "late merge": _late_merge,
        "n": _samples,
        "preemption": _preemption,
    }
    return [
        (f"{name}, {dtype}, {backend}", partial(_in_mode, check, setup, dtype, backend))
        for name, check in checks.items()
        for dtype, backend in kinds
    ]


def _in_mode(check: Any, setup: Setup, dtype: str, backend: str) -> Iterator[Row]:
    folder = family_folder(setup, "llama")
    bound = oracle(folder, setup.device, dtype).bounds.same
    yield from check(Mode(dtype, backend, bound, folder, setup))


def _overlap(mode: Mode) -> Iterator[Row]:
    """The next step planned while one runs: the same tokens, for random requests of all kinds."""
    count, random = (200 if mode.setup.on_cuda else 40), Random(1)
    prompts = [tokens(random.randint(1, 120), random) for _ in range(count)]
    params = [
        SamplingParams(
            n=random.choice((1, 1, 1, 1, 2)),
            temperature=random.choice((0, 0, 1)),
            seed=random.randrange(5),
            max_tokens=random.randint(1, 24),
            stop_token_ids=tokens(4, random),
            ignore_eos=True,
            logprobs=8,
            detokenize=False,
        )
        for _ in range(count)
    ]
    outputs = [
        mode.llm(async_scheduling=ahead, max_num_batched_tokens=256).generate(
            prompts, params, use_tqdm=False
        )
        for ahead in (False, True)
    ]
    is_greedy = [one.is_greedy for one in params]
    yield same_tokens("overlap on and off", mode, (outputs[1], outputs[0]), is_greedy)


def same_tokens(
    check: str,
    mode: Mode,
    pair: tuple[Sequence[RequestOutput], Sequence[RequestOutput]],
    is_greedy: Sequence[bool],
    **numbers: Any,
) -> Row:
    """Greedy requests equal but for near-ties; of the drawn ones nearly all are equal."""
    got, want = (
        [one for one, greedy in zip(side, is_greedy, strict=True) if greedy] for side in pair
    )
    found = compare([answer(one) for one in got], [answer(one) for one in want], mode.bound)
    drawn = [
        [a.token_ids for a in one.outputs] == [b.token_ids for b in other.outputs]
        for one, other, greedy in zip(*pair, is_greedy, strict=True)
        if not greedy
    ]
    wrong = list(found.wrong[:3])
    allowed = max(1, round(_DRAWN_DIFFERENT * len(drawn)))
    if mode.dtype == "float32" and drawn.count(False) > allowed:
        wrong.append(f"{drawn.count(False)} of {len(drawn)} drawn ones differ, {allowed} may")
    numbers |= _figures(found, mode)
    if drawn:
        numbers |= {"drawn_equal": drawn.count(True), "of_drawn": len(drawn)}
    return checked(f"{check} ({mode.name})", "; ".join(wrong), numbers)


def _figures(found: Comparison, mode: Mode) -> dict[str, Any]:
    return {
        "equal": found.num_equal,
        "of": found.num_answers,
        "near_ties": len(found.near_ties),
        "error": rounded(found.largest),
        "bound": rounded(mode.bound),
    }


def _equal_prompts(mode: Mode) -> tuple[int, int, list[int]]:
    """How many, of how many tokens, and the prompt."""
    count, length = (32, 512) if mode.setup.on_cuda else (8, 256)
    return count, length, tokens(length, Random(3))


def _alone_and_together(mode: Mode, **settings: Any) -> Iterator[Row]:
    """Equal prompts in one step: what was computed and stored, and the tokens of one alone."""
    count, length, prompt = _equal_prompts(mode)
    llm = mode.llm(max_num_batched_tokens=count * length, max_num_seqs=count, **settings)
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([prompt] * count, once, use_tqdm=False)
    seen, ledger = llm.stats().counters, llm.stats().ledger
    block = int(str(llm.describe()["block_size"]))
    full = length // block
    sharing = settings["in_flight_sharing"]
    expected = {
        "computed_tokens": length + count - 1 if sharing else count * length,
        "registered_blocks": full,
        "in_flight_blocks": (count - 1) * full if sharing else 0,
        "merged_blocks": 0 if sharing else (count - 1) * full,
    }
    found = {name: seen[name] for name in expected}
    wrong = "" if found == expected else f"expected {expected}"
    if ledger.active or ledger.leased:
        wrong = f"{wrong} blocks are left: {ledger}".strip()
    name = "equal prompts share in flight" if sharing else "equal prompts merge late"
    check = f"{count} {name}: counters ({mode.name})"
    yield checked(check, wrong, found)
    fresh = mode.llm(max_num_batched_tokens=count * length, max_num_seqs=count, **settings)
    together = fresh.generate([prompt] * count, GREEDY, use_tqdm=False)
    alone = mode.llm(**settings).generate([prompt], GREEDY, use_tqdm=False)
    yield same_tokens(
        f"{count} {name}: tokens of one alone", mode, (together, alone * count), [True] * count
    )


def _sharing(mode: Mode) -> Iterator[Row]:
    yield from _alone_and_together(mode, in_flight_sharing=True)


def _late_merge(mode: Mode) -> Iterator[Row]:
    yield from _alone_and_together(mode, in_flight_sharing=False)


def _samples(mode: Mode) -> Iterator[Row]:
    """n=8 computes its prompt once and draws what eight requests draw, each with its own seed."""
    prompt, seed, count = tokens(200, Random(4)), 7, 8

    def drawn(n: int, seed: int) -> SamplingParams:
        return SamplingParams(n=n, seed=seed, max_tokens=24, ignore_eos=True, detokenize=False)

    llm = mode.llm(enable_prefix_caching=False)
    (together,) = llm.generate([prompt], drawn(count, seed), use_tqdm=False)
    computed = llm.stats().counters["computed_tokens"]
    expected = len(prompt) + count * 23
    wrong = "" if computed == expected else f"expected {expected} computed tokens"
    apart = mode.llm().generate(
        [prompt] * count, [drawn(1, seed + at) for at in range(count)], use_tqdm=False
    )
    equal = [
        one.token_ids == other.outputs[0].token_ids
        for one, other in zip(together.outputs, apart, strict=True)
    ]
    if mode.dtype == "float32" and equal.count(False) > 1:
        wrong = f"{wrong} {equal.count(False)} of {count} samples differ, 1 may".strip()
    numbers = {"computed_tokens": computed, "equal": equal.count(True), "of": count}
    yield checked(f"n={count} ({mode.name})", wrong, numbers)


def _preemption(mode: Mode) -> Iterator[Row]:
    """A pool that four prompts fill, eight requests that grow: the tokens of a roomy pool."""
    random = Random(6)
    prompts = [tokens(250, random) for _ in range(8)]
    roomy = mode.llm()
    want = roomy.generate(prompts, GREEDY, use_tqdm=False)
    block = int(str(roomy.describe()["block_size"]))
    tight = mode.llm(num_blocks=4 * -(-250 // block) + 1, block_size=block, max_model_len=275)
    got = tight.generate(prompts, GREEDY, use_tqdm=False)
    preempted = tight.stats().num_preemptions
    yield checked(
        f"a tight pool preempts ({mode.name})",
        "" if preempted else "nobody was preempted",
        {"preemptions": preempted},
    )
    yield same_tokens("preemption", mode, (got, want), [True] * len(got))
