"""The engine's promises on the device: overlap, sharing, late merge, samples, preemption."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pyengine import LLM, RequestOutput, SamplingParams
from pyengine.sampling.state import sample_seed
from tests.gpu.answers import GREEDY, answer, oracle, tokens
from tests.gpu.compare import compare, rounded
from tests.gpu.conftest import InChild
from tests.gpu.models import ORACLE, Place

DRAWN_DIFFERENT = 0.01
"""Share of requests with drawn tokens that may differ: a draw on the border of two tokens goes by
rounding, and log-probabilities do not show how near it was."""
Numbers = dict[str, Any]


@dataclass(frozen=True)
class Mode:
    """A number format and a backend: float32 over the oracle, where ties are rare, or as it is
    used: bfloat16 on CUDA, and the backend that the engine chooses."""

    place: Place
    is_used: bool

    @property
    def dtype(self) -> str:
        """The number format."""
        return "bfloat16" if self.is_used and self.place.on_cuda else "float32"

    @property
    def bound(self) -> float:
        """On greedy near-ties."""
        return oracle(self.place, "llama", self.dtype).bounds.same

    def llm(self, **settings: Any) -> LLM:
        """An engine in this mode, with graphs and overlap by default."""
        settings = {"enforce_eager": False, **settings}
        backend = "auto" if self.is_used else ORACLE
        return self.place.llm(self.place.model("llama"), self.dtype, backend, **settings)

    def same_tokens(
        self,
        got: Sequence[RequestOutput],
        want: Sequence[RequestOutput],
        is_greedy: Sequence[bool] | None = None,
    ) -> Numbers:
        """Greedy requests equal but for near-ties; of the drawn ones nearly all are equal."""
        triples = list(zip(got, want, is_greedy or [True] * len(got), strict=True))
        greedy = [(answer(item), answer(other)) for item, other, yes in triples if yes]
        found = compare([item for item, _ in greedy], [other for _, other in greedy], self.bound)
        assert not found.wrong, found.wrong
        assert found.num_tokens > 0
        drawn = [
            [a.token_ids for a in item.outputs] == [b.token_ids for b in other.outputs]
            for item, other, yes in triples
            if not yes
        ]
        if self.dtype == "float32":
            assert drawn.count(False) <= max(1, round(DRAWN_DIFFERENT * len(drawn)))
        return {
            "equal": found.num_equal,
            "of": found.num_answers,
            "near_ties": len(found.near_ties),
            "error": rounded(found.largest),
            "bound": rounded(self.bound),
            "drawn_equal": f"{drawn.count(True)} of {len(drawn)}",
        }


MODES = pytest.mark.parametrize("is_used", [False, True], ids=["float32", "as it is used"])


@MODES
def test_overlap_gives_the_same_tokens(in_child: InChild, is_used: bool) -> None:
    in_child(overlap, is_used)


@MODES
@pytest.mark.parametrize("shares", [True, False], ids=["in flight", "late merge"])
def test_equal_prompts_are_stored_once(in_child: InChild, shares: bool, is_used: bool) -> None:
    in_child(equal_prompts, is_used, shares)


@MODES
def test_n_draws_what_single_requests_draw(in_child: InChild, is_used: bool) -> None:
    in_child(samples, is_used)


@MODES
def test_preemption_changes_no_token(in_child: InChild, is_used: bool) -> None:
    in_child(preemption, is_used)


@MODES
def test_restored_prompts_change_no_token(in_child: InChild, is_used: bool) -> None:
    in_child(restores, is_used)


def overlap(place: Place, is_used: bool) -> Numbers:
    """The next step planned while one runs, for random requests of all kinds."""
    mode, random = Mode(place, is_used), Random(1)
    count = 200 if place.on_cuda else 40
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
    plain, ahead = (
        mode.llm(async_scheduling=ahead, max_num_batched_tokens=256).generate(
            prompts, params, use_tqdm=False
        )
        for ahead in (False, True)
    )
    return mode.same_tokens(ahead, plain, [param.is_greedy for param in params])


def equal_prompts(place: Place, is_used: bool, shares: bool) -> Numbers:
    """Equal prompts in one step: what was computed and stored, and the tokens of one alone."""
    mode, (count, length) = Mode(place, is_used), (32, 512) if place.on_cuda else (8, 256)
    prompt = tokens(length, Random(3))
    settings: dict[str, Any] = {"max_num_batched_tokens": count * length, "max_num_seqs": count}
    settings["in_flight_sharing"] = shares
    llm = mode.llm(**settings)
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    llm.generate([prompt] * count, once, use_tqdm=False)
    seen, usage = llm.stats().counters, llm.stats().usage
    full = length // int(str(llm.describe()["block_size"]))
    expected = {
        "computed_tokens": length + count - 1 if shares else count * length,
        "registered_blocks": full,
        "in_flight_blocks": (count - 1) * full if shares else 0,
        "merged_blocks": 0 if shares else (count - 1) * full,
    }
    assert {name: seen[name] for name in expected} == expected
    assert not usage.active and not usage.pinned
    together = mode.llm(**settings).generate([prompt] * count, GREEDY, use_tqdm=False)
    alone = mode.llm(in_flight_sharing=shares).generate([prompt], GREEDY, use_tqdm=False)
    return expected | mode.same_tokens(together, alone * count)


def samples(place: Place, is_used: bool) -> Numbers:
    """n=8 computes its prompt once and draws what eight requests draw, each with its own seed."""
    mode, prompt, seed, count = Mode(place, is_used), tokens(200, Random(4)), 7, 8

    def drawn(n: int, seed: int) -> SamplingParams:
        return SamplingParams(n=n, seed=seed, max_tokens=24, ignore_eos=True, detokenize=False)

    llm = mode.llm(enable_prefix_caching=False)
    (together,) = llm.generate([prompt], drawn(count, seed), use_tqdm=False)
    computed = llm.stats().counters["computed_tokens"]
    assert computed == len(prompt) + count * 23
    apart = mode.llm().generate(
        [prompt] * count, [drawn(1, sample_seed(seed, at)) for at in range(count)], use_tqdm=False
    )
    equal = [
        output.token_ids == other.outputs[0].token_ids
        for output, other in zip(together.outputs, apart, strict=True)
    ]
    if mode.dtype == "float32":
        assert equal.count(False) <= 1
    return {"computed_tokens": computed, "equal": equal.count(True), "of": count}


def preemption(place: Place, is_used: bool) -> Numbers:
    """A pool that four prompts fill, eight requests that grow: the tokens of a roomy pool."""
    mode, random = Mode(place, is_used), Random(6)
    prompts = [tokens(250, random) for _ in range(8)]
    roomy = mode.llm()
    want = roomy.generate(prompts, GREEDY, use_tqdm=False)
    block = int(str(roomy.describe()["block_size"]))
    tight = mode.llm(num_blocks=4 * -(-250 // block) + 1, block_size=block, max_model_len=275)
    got = tight.generate(prompts, GREEDY, use_tqdm=False)
    preempted = tight.stats().num_preemptions
    assert preempted > 0
    return {"preemptions": preempted} | mode.same_tokens(got, want)


def restores(place: Place, is_used: bool) -> Numbers:
    """Prompts that were evicted and are restored while others run: the tokens of computed ones.

    From host memory on CUDA; elsewhere from a folder.
    """
    mode, random = Mode(place, is_used), Random(8)
    prompts = [tokens(600, random) for _ in range(8)]
    want = mode.llm().generate(prompts, GREEDY, use_tqdm=False)
    once = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True, detokenize=False)
    with TemporaryDirectory() as folder:
        on_disk = {"kv_cache_dir": f"{folder}/kv", "kv_cache_disk": 2 << 30}
        store = {"kv_cache_host_memory": 2 << 30} if place.on_cuda else on_disk
        llm = mode.llm(kv_cache_memory=256 << 20, **store)
        llm.generate(prompts, once, use_tqdm=False)
        assert llm._offloader is not None
        assert llm._offloader.flush(60)
        llm._manager.evict_all()
        others = [tokens(40, random) for _ in range(4)]
        got = llm.generate([*others, *prompts], GREEDY, use_tqdm=False)[len(others) :]
        restored = sum(output.num_restored_tokens for output in got)
        llm.close()
    assert restored > 0
    return {"restored_tokens": restored} | mode.same_tokens(got, want)
