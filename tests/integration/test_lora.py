"""LoRA adapters: their tokens are those of merged weights, and of PEFT."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pyengine import LLM, LoRARequest, SamplingParams
from pyengine.errors import AdapterError, ConfigurationError
from tests.support.adapters import ALL_LINEAR, change_config, merged, save_adapter
from tests.support.checkpoints import FAMILIES, read_weights, save_random, save_weights
from tests.unit.models.gguf_of_model import write

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_blocks": 256, "block_size": 4}
PROMPTS = [[5, 9, 13, 17, 21, 25, 29], [40, 41, 42], [60 + at % 7 for at in range(19)], [3] * 9]


def lora_llm(model: Path, **settings: Any) -> LLM:
    """An engine for adapters."""
    return LLM(model, **{**SETTINGS, "enable_lora": True, **settings})


def tokens_of(llm: LLM, prompts: Any = PROMPTS, lora_request: Any = None) -> list[list[int]]:
    """Greedy tokens."""
    outputs = llm.generate(prompts, GREEDY, use_tqdm=False, lora_request=lora_request)
    return [list(output.outputs[0].token_ids) for output in outputs]


def tokens_of_model(model: Path, prompts: Any = PROMPTS) -> list[list[int]]:
    """Greedy tokens of a model without adapters."""
    with LLM(model, **SETTINGS) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


def _random(tmp_path: Path, family: str) -> Path:
    """A small model whose tokens depend on its layers, not on its embeddings alone."""
    settings = {**FAMILIES[family], "tie_word_embeddings": False}
    return save_random(tmp_path / "model", family, **settings)


@pytest.fixture(name="model")
def a_model(tmp_path: Path) -> Path:
    """A small Llama."""
    return save_random(tmp_path / "model", "llama")


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_tokens_in_one_batch_are_those_of_merged_weights(tmp_path: Path, family: str) -> None:
    model = _random(tmp_path, family)
    kinds: dict[str, dict[str, Any]] = {
        "all": {},
        "rs": {"targets": ("q_proj", "v_proj"), "rank": 7, "use_rslora": True, "lora_alpha": 5},
        "down": {"targets": ("down_proj", "up_proj", "k_proj"), "dtype": "bfloat16", "rank": 16},
    }
    requests, expected, prompts = [None] * len(PROMPTS), tokens_of_model(model), PROMPTS
    for seed, (name, kind) in enumerate(kinds.items()):
        adapter = save_adapter(tmp_path / name, model, seed=seed, **kind)
        requests = [*requests, *[LoRARequest(name, str(adapter))] * len(PROMPTS)]
        prompts = prompts + PROMPTS
        expected += tokens_of_model(merged(tmp_path / f"{name} merged", model, adapter))
    with lora_llm(model) as llm:
        assert tokens_of(llm, prompts, requests) == expected
        assert tokens_of(llm, prompts, requests) == expected  # from the cache
    assert len({str(tokens) for tokens in expected[:: len(PROMPTS)]}) == len(kinds) + 1


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text"])
def test_tokens_are_those_of_peft(tmp_path: Path, family: str) -> None:
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    folder = _random(tmp_path, family)
    requests, expected = [], []
    for seed, targets in enumerate((list(ALL_LINEAR), ["q_proj", "o_proj"])):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        config = peft.LoraConfig(
            r=4,
            lora_alpha=16,
            target_modules=targets,
            use_rslora=bool(seed),
            init_lora_weights=False,
            rank_pattern={"q_proj": 6},
            alpha_pattern={"layers.1.self_attn.q_proj": 40},
            task_type="CAUSAL_LM",
        )
        model = peft.get_peft_model(model, config)
        model.save_pretrained(tmp_path / f"adapter {seed}")
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            tokens = model.generate(
                input_ids=ids, max_new_tokens=12, min_new_tokens=12, do_sample=False
            )
            expected.append(tokens[0, len(prompt) :].tolist())
            requests.append(LoRARequest(f"adapter-{seed}", str(tmp_path / f"adapter {seed}")))
    base = tokens_of_model(folder)
    with lora_llm(folder) as llm:
        # `min_new_tokens` suppresses the end token
        params = SamplingParams(max_tokens=12, min_tokens=12, temperature=0.0)
        outputs = llm.generate(PROMPTS * 2, params, use_tqdm=False, lora_request=requests)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert expected[: len(base)] != base


def test_an_activated_adapter_counts_from_its_invocation_on(tmp_path: Path, model: Path) -> None:
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=16,
        target_modules=list(ALL_LINEAR),
        alora_invocation_tokens=[7, 8],
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    module = peft.get_peft_model(module, config)
    module.save_pretrained(tmp_path / "adapter")
    prompts = [[7, 8, 30, 31, 7, 8, 32, 33], [50, 51, 52, 7, 8], [60, 61, 62, 63]]
    expected = []
    for prompt in prompts:
        tokens = module.generate(
            input_ids=torch.tensor([prompt]), max_new_tokens=12, min_new_tokens=12, do_sample=False
        )
        expected.append(tokens[0, len(prompt) :].tolist())
    with lora_llm(model, max_num_batched_tokens=256) as llm:
        params = SamplingParams(max_tokens=12, min_tokens=12, temperature=0.0)
        request = LoRARequest("adapter", str(tmp_path / "adapter"))
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=request)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        base = llm.generate(prompts, params, use_tqdm=False)
    assert list(base[0].outputs[0].token_ids) != expected[0]
    assert list(base[2].outputs[0].token_ids) == expected[2]  # it was not invoked
    assert base[2].num_cached_tokens  # and shares the base's cache


def test_more_adapters_than_slots_take_turns(tmp_path: Path, model: Path) -> None:
    names = [f"a{seed}" for seed in range(5)]
    for seed, name in enumerate(names):
        save_adapter(tmp_path / name, model, seed=seed)
    requests = [LoRARequest(name, str(tmp_path / name)) for name in names]
    prompts = PROMPTS * len(names)
    own = [request for request in requests for _ in PROMPTS]
    with lora_llm(model, max_loras=8) as llm:
        expected = tokens_of(llm, prompts, own)
    order = np.random.default_rng(0).permutation(len(prompts))
    with lora_llm(model, max_loras=2) as llm:
        mixed = tokens_of(llm, [prompts[at] for at in order], [own[at] for at in order])
        assert mixed == [expected[at] for at in order]
        assert len(llm.list_loras()) == len(names)
    assert len({str(tokens) for tokens in expected}) > len(names)


def test_the_cache_is_shared_by_content(tmp_path: Path, model: Path) -> None:
    first, other = (save_adapter(tmp_path / f"{at}", model, seed=at) for at in range(2))
    prompt = [PROMPTS[2]]
    with lora_llm(model) as llm:

        def cached(name: str, path: Path) -> int:
            [output] = llm.generate(prompt, GREEDY, False, lora_request=LoRARequest(name, path))
            return output.num_cached_tokens

        tokens_of(llm, prompt)
        assert cached("a", first) == 0  # the base's blocks are not its own
        assert cached("a", first) > 0
        assert cached("b", first) > 0  # another name of one content
        assert cached("a", other) == 0
        before = tokens_of(llm, prompt, LoRARequest("a"))
        assert llm.remove_lora("a") and not llm.remove_lora("a")
        with pytest.raises(AdapterError, match="no adapter 'a' is loaded"):
            tokens_of(llm, prompt, LoRARequest("a"))
        weights = read_weights(other)  # a reload of other content under the same name
        save_weights(
            other / "adapter_model.safetensors", {name: -2 * weights[name] for name in weights}
        )
        assert llm.add_lora(LoRARequest("a", 1, str(other)))
        [output] = llm.generate(prompt, GREEDY, use_tqdm=False, lora_request=LoRARequest("a"))
        assert output.num_cached_tokens == 0
        assert list(output.outputs[0].token_ids) != before[0]
        assert [each.lora_name for each in llm.list_loras()] == ["b", "a"]


def test_requests_that_have_begun_keep_their_content(tmp_path: Path, model: Path) -> None:
    adapter = save_adapter(tmp_path / "adapter", model)
    with lora_llm(model) as llm:
        expected = tokens_of(llm, PROMPTS[:1], LoRARequest("a", adapter))
        stream = llm.stream(PROMPTS[0], GREEDY, lora_request=LoRARequest("a"))
        next(stream)
        llm.remove_lora("a")
        *_, last = stream
        assert [list(last.outputs[0].token_ids)] == expected


def test_quantised_bases_and_bfloat16_run_with_adapters(tmp_path: Path, model: Path) -> None:
    adapter = LoRARequest("a", save_adapter(tmp_path / "adapter", model))
    for settings in ({"quantization": "int8"}, {"dtype": "bfloat16"}):
        with lora_llm(model, **settings) as llm:
            alone = [tokens_of(llm, [prompt], adapter)[0] for prompt in PROMPTS]
        with lora_llm(model, **settings, enable_prefix_caching=False) as llm:
            both = tokens_of(llm, PROMPTS * 2, [adapter] * len(PROMPTS) + [None] * len(PROMPTS))
            assert both[: len(PROMPTS)] == alone  # a row has the same bits in every batch
            assert both[len(PROMPTS) :] != alone


def test_random_drafts_change_no_token(tmp_path: Path, model: Path) -> None:
    adapter = LoRARequest("a", save_adapter(tmp_path / "adapter", model))
    requests = [adapter, None] * 2
    with lora_llm(model) as llm:
        expected = tokens_of(llm, PROMPTS, requests)
    with lora_llm(model, speculation="ngram") as llm:
        assert tokens_of(llm, PROMPTS, requests) == expected


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "phi3"])
def test_gguf_files_have_the_tokens_of_their_models(tmp_path: Path, architecture: str) -> None:
    pytest.importorskip("transformers")
    module: Any = write(tmp_path / "model.gguf", architecture)
    module.save_pretrained(tmp_path / "model")
    targets = (*ALL_LINEAR, "qkv_proj", "gate_up_proj")
    folder = save_adapter(tmp_path / "adapter", tmp_path / "model", targets=targets)
    adapter = LoRARequest("a", folder)
    prompts = [[2, 3, 4, 5], [6, 7, 2], [3, 3, 4, 4, 5, 5]]
    params = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=8)
    found = []
    for name in ("model", "model.gguf"):
        with lora_llm(tmp_path / name) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=adapter)
            tops = [step for output in outputs for step in output.outputs[0].logprobs or ()]
            found.append([[top[token].logprob for token in sorted(top)] for top in tops])
            base = llm.generate(prompts, params, use_tqdm=False)
    np.testing.assert_allclose(found[1], found[0], atol=1e-4)
    assert [output.outputs[0].cumulative_logprob for output in outputs] != [
        output.outputs[0].cumulative_logprob for output in base
    ]


def _break(tmp_path: Path, model: Path, fault: str) -> Path:
    """A damaged adapter."""
    if fault == "other base":
        model = save_random(tmp_path / "other", "llama", hidden_size=32)
    folder = save_adapter(tmp_path / "bad", model)
    path = folder / "adapter_model.safetensors"
    weights = read_weights(folder)
    name = next(iter(weights))
    match fault:
        case "pickle":
            path.rename(folder / "adapter_model.bin")
        case "missing file":
            path.unlink()
        case "missing tensor":
            del weights[name]
            save_weights(path, weights)
        case "NaN":
            weights[name][0, 0] = np.nan
            save_weights(path, weights)
        case "double":
            save_weights(path, {**weights, name: weights[name].astype(np.float64)})
        case "unknown module":
            save_weights(path, {f"base_model.model.x.{key}": weights[key] for key in weights})
        case "truncated":
            path.write_bytes(path.read_bytes()[:-4])
        case "rank":
            change_config(folder, r=5)
        case "magnitude":
            save_weights(path, {**weights, "x.lora_magnitude_vector.weight": weights[name]})
    return folder


FAULTS = {
    "pickle": "can run code",
    "missing file": "no file adapter_model",
    "missing tensor": "lacks lora_A",
    "NaN": "NaN or infinity",
    "double": "as F64",
    "unknown module": "is no linear layer of this model",
    "truncated": "truncated",
    "rank": "rank 4 for .* says 5",
    "other base": "of another base",
    "magnitude": "magnitude",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_files_that_cannot_be_served_are_refused(tmp_path: Path, model: Path, fault: str) -> None:
    folder = _break(tmp_path, model, fault)
    with lora_llm(model) as llm:
        with pytest.raises(AdapterError, match=FAULTS[fault]):
            tokens_of(llm, PROMPTS, LoRARequest("bad", folder))
        assert not llm.list_loras()
        assert len(tokens_of(llm)) == len(PROMPTS)


SETTINGS_REFUSED: dict[str, Any] = {
    "peft_type": "IA3",
    "use_dora": True,
    "bias": "all",
    "modules_to_save": ["lm_head"],
    "megatron_config": {"a": 1},
    "init_lora_weights": "pissa_niter_4",
    "lora_bias": True,
    "alora_invocation_tokens": ["x"],
    "rank_pattern": {".*(q|k)": 3},
    "lora_alpha": -1,
    "r": "x",
    "unheard_of": 3,
}


@pytest.mark.parametrize("key", SETTINGS_REFUSED)
def test_settings_that_are_not_served_are_refused(tmp_path: Path, model: Path, key: str) -> None:
    folder = save_adapter(tmp_path / "bad", model)
    change_config(folder, **{key: SETTINGS_REFUSED[key]})
    with lora_llm(model) as llm, pytest.raises(AdapterError, match=f"says {key}="):
        llm.add_lora(LoRARequest("bad", folder))


def test_limits_are_those_of_the_settings(tmp_path: Path, model: Path) -> None:
    large = save_adapter(tmp_path / "large", model, rank=9)
    small = save_adapter(tmp_path / "small", model, rank=2)
    with lora_llm(model, max_lora_rank=8, max_cpu_loras=1) as llm:
        with pytest.raises(AdapterError, match="start with max_lora_rank=9"):
            llm.add_lora(LoRARequest("large", large))
        llm.add_lora(LoRARequest("small", small))
        llm.add_lora(LoRARequest("small", small))
        with pytest.raises(AdapterError, match="max_cpu_loras=1"):
            llm.add_lora(LoRARequest("other", small))
    with LLM(model, **SETTINGS) as llm, pytest.raises(ConfigurationError, match="enable_lora"):
        llm.generate(PROMPTS, GREEDY, lora_request=LoRARequest("small", small))


@pytest.mark.parametrize("name", ["../x", "/tmp/x", "", "a/b", "a b", 3])
def test_names_that_are_paths_are_refused(name: Any) -> None:
    with pytest.raises(AdapterError, match="no name of an adapter"):
        LoRARequest(name, "folder")


@pytest.mark.parametrize(
    "settings", [{"compile": True}, {"tensor_parallel_size": 2}, {"speculation": "mtp"}]
)
def test_settings_that_do_not_combine_are_refused(model: Path, settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="enable_lora"):
        lora_llm(model, **settings)
