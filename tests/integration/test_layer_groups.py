"""Models that mix full and sliding layers, far past their windows: the reference's tokens, less KV.

Random small models. The pool is smaller than the requests together need, or not; prompts share a
beginning; they come in chunks, in samples, and again.
"""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import pytest

from pyengine import LLM, BlockManager, RequestOutput, SamplingParams
from tests.support.checkpoints import save_random
from tests.support.reference import Reference
from tests.support.soak import soak_cases
from tests.support.without_torch import needs_torch

LONGEST = 320
SMALL = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 512}
_SLIDING, _FULL = "sliding_attention", "full_attention"


def gemma4(layer_types: list[str], **settings: Any) -> tuple[str, dict[str, Any]]:
    """Layers of two sizes; those that slide have heads of 8."""
    return "gemma4_text", {
        "num_hidden_layers": len(layer_types),
        "layer_types": layer_types,
        "head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "sliding_window": 24,
        **settings,
    }


def _keys_alone(**settings: Any) -> dict[str, Any]:
    """Full layers with KV heads of their own number."""
    return {"attention_k_eq_v": True, "num_global_key_value_heads": 1, **settings}


GEMMA4 = {  # by the bytes of a token in a full layer, relative to one that slides
    "twice": gemma4(
        [*[_SLIDING] * 5, _FULL] * 2,
        global_head_dim=16,
        num_kv_shared_layers=4,
        use_double_wide_mlp=True,
        hidden_size_per_layer_input=6,
        vocab_size_per_layer_input=97,
    ),
    "half": gemma4(
        [*[_SLIDING] * 3, _FULL] * 3,
        **_keys_alone(global_head_dim=16),
        num_key_value_heads=4,
    ),
    "equal": gemma4([*[_SLIDING] * 2, _FULL] * 2, **_keys_alone(global_head_dim=16)),
    "three halves": gemma4([*[_SLIDING] * 3, _FULL] * 2, **_keys_alone(global_head_dim=24)),
    "uneven": gemma4([*[_SLIDING] * 3, _FULL], **_keys_alone(global_head_dim=26)),
}
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gemma3_text": (
        "gemma3_text",
        {
            "num_hidden_layers": 12,
            "head_dim": 16,
            "query_pre_attn_scalar": 16,
            "sliding_window": 24,
        },
        "6 groups of 2 layers: 2 full, 10 of window 24",
    ),
    "gpt_oss": (
        "gpt_oss",
        {
            "num_hidden_layers": 4,
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 16,
        },
        "2 groups of 2 layers: 2 full, 2 of window 16",
    ),
    "mistral": (
        "mistral",
        {"num_hidden_layers": 2, "sliding_window": 32},
        "1 group of 2 layers: 2 of window 32",
    ),
    "gemma4-twice": (*GEMMA4["twice"], "5 groups of 1 tensor: 1 full, 7 of window 24"),
    "gemma4-half": (*GEMMA4["half"], "10 groups of 2 tensors: 3 full, 9 of window 24"),
    "gemma4-equal": (*GEMMA4["equal"], "3 groups of 2 layers: 2 full, 4 of window 24"),
    "gemma4-three halves": (
        *GEMMA4["three halves"],
        "3 groups of 1 tensor: 2 full, 6 of window 24",
    ),
}


@dataclass
class Model:
    folder: Path
    reference: Reference
    said: str
    windows: tuple[int | None, ...]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    family, settings, said = MODELS[request.param]
    folder = tmp_path_factory.mktemp(family)
    save_random(folder, family, **{**SMALL, **settings})
    window = settings["sliding_window"]
    num_sliding = int(said.split()[0]) - ("full" in said)
    windows = (None,) * ("full" in said) + (window,) * num_sliding
    return Model(folder, Reference(folder, attention="eager", stop="at_length"), said, windows)


def greedy(max_tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(temperature=0, ignore_eos=True, max_tokens=max_tokens, **fields)


def prompts() -> list[list[int]]:
    """Three share 70 tokens, two of them are equal; one shares no prefix."""
    random = Random(5)
    shared, own = ([random.randrange(3, 97) for _ in range(n)] for n in (70, 110))
    tail = [random.randrange(3, 97) for _ in range(30)]
    return [[*shared, *tail], own, [*shared, *tail], [*shared, 4, 5]]


class Watched:
    """An engine, and the most blocks that were in use while one of its steps ran."""

    def __init__(self, model: Model, *, spare: int | None = None, **settings: Any) -> None:
        """`spare`: blocks beside those that the longest request takes; None: plenty."""
        chunk, size = settings.get("max_num_batched_tokens", 64), settings.get("block_size", 4)
        enough = BlockManager(1, size, groups=model.windows).blocks_for(LONGEST, chunk)
        defaults = {
            "device": "cpu",
            "block_size": size,
            "num_blocks": 9000 if spare is None else enough + spare,
            "max_num_batched_tokens": chunk,
            "max_num_seqs": 4,
            "max_model_len": LONGEST,
        }
        self.llm = LLM(model.folder, **{**defaults, **settings})
        self.peak = 0
        runner = self.llm._engine._executor.runner
        prepare = runner.prepare

        def watched(plan: Any, **rows: Any) -> Any:
            self.peak = max(self.peak, self.llm.stats().usage.active)
            return prepare(plan, **rows)

        runner.prepare = watched  # type: ignore[method-assign]

    @property
    def peak_bytes(self) -> int:
        about: dict[str, Any] = self.llm.describe()
        return self.peak * about["kv_cache_bytes"] // (about["num_blocks"] + 1)

    def generate(self, asked: list[list[int]], params: SamplingParams) -> list[RequestOutput]:
        outputs = self.llm.generate(asked, params, use_tqdm=False)
        usage = self.llm.stats().usage
        assert (usage.active, usage.pinned) == (0, 0)
        self.llm._engine._manager.check()
        return outputs


def assert_the_references(model: Model, outputs: list[RequestOutput], max_tokens: int) -> None:
    counts = model.reference.compare(outputs, [max_tokens] * len(outputs))
    print(counts)
    counts.assert_same()


def test_groups_hold_less_than_full_tables_and_give_the_same_tokens(model: Model) -> None:
    peaks = {}
    for layer_groups in (True, False):
        engine = Watched(model, layer_groups=layer_groups, enable_prefix_caching=False)
        said = str(engine.llm.describe()["layer_groups"])
        assert said == model.said if layer_groups else said.startswith("1 group of")
        assert_the_references(model, engine.generate(prompts(), greedy(200)), 200)
        assert engine.llm.stats().num_preemptions == 0
        peaks[layer_groups] = engine.peak_bytes
    print(f"{model.said}: at most {peaks[True]:,} bytes, {peaks[False]:,} without groups")
    assert peaks[True] < 0.75 * peaks[False]


@pytest.mark.parametrize(
    ("block_size", "chunk", "sharing"),
    [(1, 16, True), (4, 7, False), *soak_cases([(16, 64, True)])],
)
def test_prefixes_that_are_cached_or_computed_in_the_same_step(
    model: Model, block_size: int, chunk: int, sharing: bool
) -> None:
    engine = Watched(
        model, block_size=block_size, max_num_batched_tokens=chunk, in_flight_sharing=sharing
    )
    for again in (False, True):
        outputs = engine.generate(prompts(), greedy(60))
        assert_the_references(model, outputs, 60)
        if again:  # all but the last token, or the last block where that is not full
            for output, prompt in zip(outputs, prompts(), strict=True):
                assert output.num_cached_tokens >= len(prompt) - block_size


@pytest.mark.parametrize(("caching", "spare"), [(True, 0), (False, 8)])
def test_tight_pools(model: Model, caching: bool, spare: int) -> None:
    engine = Watched(model, spare=spare, max_num_batched_tokens=8, enable_prefix_caching=caching)
    short = [prompt[-11:] for prompt in prompts()]  # they come in together, and outgrow the pool
    assert_the_references(model, engine.generate(short, greedy(100)), 100)
    assert engine.llm.stats().num_preemptions > 0
    assert_the_references(model, engine.generate(prompts(), greedy(40)), 40)


def test_samples_of_one_prompt(model: Model) -> None:
    engine, full = Watched(model), Watched(model, layer_groups=False)
    drawn = SamplingParams(n=4, seed=3, ignore_eos=True, max_tokens=60)
    (output,), (expected,) = (item.generate(prompts()[:1], drawn) for item in (engine, full))
    assert [each_output.token_ids for each_output in output.outputs] == [
        each_output.token_ids for each_output in expected.outputs
    ]
    assert len({tuple(each_output.token_ids) for each_output in output.outputs}) == 4
    (output,) = engine.generate(prompts()[1:2], greedy(60, n=4))
    assert_the_references(model, [output], 60)
    assert len({tuple(each_output.token_ids) for each_output in output.outputs}) == 1
    assert engine.llm.stats().counters["copied_blocks"] > 0


UNEQUAL = ["twice", "half", "equal", "three halves"]


def saved(folder: Path, name: str) -> Path:
    family, settings = GEMMA4[name]
    return save_random(folder, family, **{**SMALL, **settings})


def tokens_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@needs_torch
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize(
    ("backend", "name", "num_tokens"),
    [*(("gather", name, 30) for name in UNEQUAL), ("flex", "twice", 3), ("flex", "half", 3)],
)
def test_unequal_layers_by_the_backends_of_torch(
    backend: str, name: str, num_tokens: int, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "device": "cpu",
        "block_size": 16,
        "num_blocks": 200,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
    }
    found = []
    for attention_backend in ("auto", backend):
        llm = LLM(saved(tmp_path, name), attention_backend=attention_backend, **settings)
        outputs = llm.generate(prompts(), greedy(num_tokens), use_tqdm=False)
        found.append(tokens_of(outputs))
    assert found[0] == found[1]


@pytest.mark.parametrize("name", UNEQUAL)
def test_unequal_layers_in_int8(name: str, tmp_path: Path) -> None:
    """Tokens of a cache in int8 are those of one block table, where a block has one layout."""
    found = []
    for layer_groups in (True, False):
        llm = LLM(
            saved(tmp_path, name),
            device="cpu",
            kv_cache_dtype="int8",
            layer_groups=layer_groups,
            block_size=4,
            max_num_seqs=4,
            max_num_batched_tokens=16,
        )
        assert str(llm.describe()["layer_groups"]).startswith("1 group") != layer_groups
        found.append(
            [tokens_of(llm.generate(prompts(), greedy(60), use_tqdm=False)) for _ in range(2)]
        )
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["twice", "half"])
@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_a_folder_restores_unequal_layers(name: str, dtype: str, tmp_path: Path) -> None:
    """And hits are verified: their blocks have the KV that is computed again."""
    settings: dict[str, Any] = {
        "device": "cpu",
        "block_size": 4,
        "kv_cache_dtype": dtype,
        "linear_backend": "pyengine",
        "kv_cache_dir": tmp_path / "kv",
        "verify_cache_hits": 1.0,
    }
    prompt, found = prompts()[0], []
    for restored in (0, 80):
        with LLM(saved(tmp_path / "model", name), **settings) as llm:
            for _ in range(2):
                (output,) = llm.generate([prompt], greedy(40), use_tqdm=False)
                found.append(output.outputs[0].token_ids)
                assert restored == 0 or output.num_cached_tokens >= restored
            deadline = monotonic() + 60
            while (verified := llm.stats().verification)["verified_hits"] < 1:
                assert monotonic() < deadline, verified
                sleep(0.01)
            assert verified["different_blocks"] == 0
            assert restored or verified["verified_blocks"] > 0
            assert llm._offloader is not None and llm._offloader.flush(60)
            assert llm.stats().store["restored_tokens"] >= restored
    assert found == [found[0]] * 4


def test_layers_of_uneven_sizes_stay_in_one_group(tmp_path: Path) -> None:
    folder = saved(tmp_path, "uneven")
    reference = Reference(folder, attention="eager", stop="at_length")
    model = Model(folder, reference, "1 group of 4 layers: 4 full", (None,))
    engine = Watched(model)
    assert str(engine.llm.describe()["layer_groups"]) == model.said
    assert_the_references(model, engine.generate(prompts(), greedy(60)), 60)
