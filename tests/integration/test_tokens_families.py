"""Random small models of many families, from a folder to tokens: equal to transformers'."""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest

from pyengine import LLM, BlockManager, SamplingParams
from tests.support.layer_groups import groups_of
from tests.support.reference import Reference
from tests.unit.executor.hand_made import random_model
from tests.unit.executor.test_model_runner import FAMILIES

MAX_TOKENS = 20
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=MAX_TOKENS)
EVERYTHING: dict[str, dict[str, Any]] = {
    **FAMILIES,
    "starcoder2": {"sliding_window": 6},
    "gemma": {"head_dim": 16},
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "exaone4": {"sliding_window": 6, "sliding_window_pattern": 2},
}
NAMED_BY_THE_PROMISE = {
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "gemma3_text",
    "phi3",
    "gpt_oss",
}


@dataclass(frozen=True)
class Setup:
    block_size: int
    chunk: int
    caching: bool
    pool: int
    """In tokens of one sequence, or of many if it is roomy."""

    def num_blocks(self, groups: tuple[int | None, ...]) -> int:
        if self.pool == ROOMY:
            return len(groups) * ROOMY // self.block_size
        return BlockManager(1, self.block_size, groups=groups).blocks_for(self.pool, self.chunk)


ROOMY, TIGHT = 1024, 96
SETUPS = [  # one and the third after it differ in pool and caching: a family runs such a pair
    Setup(1, 8, True, TIGHT),
    Setup(4, 7, False, ROOMY),
    Setup(16, 50, True, ROOMY),
    Setup(1, 50, False, ROOMY),
    Setup(4, 8, True, TIGHT),
    Setup(16, 7, False, TIGHT),
]


def prompts() -> list[list[int]]:
    """Of several lengths; some share a beginning, two are the same, one is a single token."""
    rnd = Random(5)
    shared = [rnd.randrange(3, 97) for _ in range(33)]
    tails = [[rnd.randrange(3, 97) for _ in range(n)] for n in (1, 14, 14, 40, 7)]
    return [shared + tails[0], shared + tails[1], [9], tails[3], shared + tails[1], shared[:16]]


@pytest.fixture(scope="module", params=EVERYTHING)
def family(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, Reference, tuple[int | None, ...]]:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    model = random_model(name, **EVERYTHING[name])
    model.save_pretrained(folder)
    reference = Reference(folder, attention="eager", stop="at_length")
    return name, folder, reference, groups_of(folder)


def test_the_families_of_the_promise_are_here() -> None:
    assert set(EVERYTHING) >= NAMED_BY_THE_PROMISE


def test_generations_are_the_reference_s(
    family: tuple[str, Path, Reference, tuple[int | None, ...]],
) -> None:
    name, folder, reference, groups = family
    first = list(EVERYTHING).index(name)
    for setup in (SETUPS[(first + offset) % len(SETUPS)] for offset in (0, 3)):
        llm = LLM(
            folder,
            device="cpu",
            block_size=setup.block_size,
            num_blocks=setup.num_blocks(groups),
            max_num_seqs=6,
            max_num_batched_tokens=setup.chunk,
            enable_prefix_caching=setup.caching,
        )
        for again in (False, True):
            outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
            counts = reference.compare(outputs, [MAX_TOKENS] * len(outputs))
            print(f"{name}, {setup}: {counts}")
            counts.assert_same()
            assert all(len(output.outputs[0].token_ids) == MAX_TOKENS for output in outputs)
            cached = sum(output.num_cached_tokens for output in outputs)
            if not setup.caching:
                assert cached == 0
            elif again and setup.pool == ROOMY:
                assert cached >= sum(map(len, prompts())) // 2
            stats = llm.stats()
            assert (stats.usage.active, stats.usage.pinned) == (0, 0)
        assert (stats.num_preemptions > 0) == (setup.pool == TIGHT)


def test_a_reference_of_other_weights_is_told_apart(tmp_path: Path) -> None:
    """The comparison can fail: the same engine against a model that was changed a little."""
    model = random_model("llama")
    model.save_pretrained(tmp_path / "one")
    weights = model.model.layers[2].mlp.down_proj.weight
    weights.data[:] = weights.data.roll(1, 0)
    model.save_pretrained(tmp_path / "other")
    llm = LLM(tmp_path / "one", device="cpu", num_blocks=64)
    outputs = llm.generate(prompts(), GREEDY, use_tqdm=False)
    limits = [MAX_TOKENS] * len(outputs)
    same = Reference(tmp_path / "one", attention="sdpa", stop="at_length")
    other = Reference(tmp_path / "other", attention="sdpa", stop="at_length")
    assert same.compare(outputs, limits).equal == len(outputs)
    assert len(other.compare(outputs, limits).different) >= 3
