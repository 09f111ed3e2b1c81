"""Layers for multi-token prediction compute what transformers' `MtpModel` computes."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from pyengine.attention.backend import StepInputs
from pyengine.attention.gather import GatherBackend
from pyengine.cpu import CpuAttention
from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.kv_cache.layer_groups import LayerGroups
from pyengine.kv_cache.pool import KVPool
from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.model import DecoderModel
from pyengine.utils.tensors import array_of, tensor_of
from tests.support.attention import step_inputs
from tests.support.mtp import LAYERS, Reference, save_with_mtp_layers
from tests.unit.models.decoder.steps import BLOCK, CPU
from tests.unit.models.decoder.test_families import SETS, TOLERANCE, Saved
from tests.unit.models.decoder.tiny_models import MODELS

TOKENS = [9, 44, 3, 71, 5, 90, 12, 33, 60, 17, 8]
needs_reference = pytest.mark.skipif(
    not hasattr(MtpModel, "forward_layer"), reason="needs transformers 5.20"
)
Tensors = dict[str, torch.Tensor]


def opened(folder: Path, kernels: str = "torch") -> DecoderModel:
    opened = open_model(folder, with_mtp_layers=True)
    decoder = opened.decoder(SETS[kernels][0]())
    return DecoderModel(decoder, CPU, opened.mtp_layers(decoder))


@torch.inference_mode()
def ours(folder: Path, kernels: str = "torch") -> list[tuple[torch.Tensor, torch.Tensor]]:
    """States and logits of each MTP layer at the positions that it computes."""
    model = opened(folder, kernels)
    spec = open_model(folder).spec
    specs = [*spec.cache_specs("float32")]
    specs += [layer.mixer.cache("float32") for layer in spec.mtp_layers]
    pool = KVPool(specs, 8, BLOCK, CPU, LayerGroups.single(len(specs)))
    inputs = _inputs(len(TOKENS))
    ids, positions, backend = inputs.input_ids, inputs.positions, GatherBackend(pool)
    as_input = array_of if model.takes_arrays else (lambda tensor: tensor)
    ids, positions = as_input(ids), as_input(positions)
    states = tensor_of(model.hidden_states(ids, positions, backend.metadata(inputs)))
    results = []
    for layer in range(len(spec.mtp_layers)):
        metadata = backend.metadata(inputs, first_key=layer + 1)
        previous = as_input(states.roll(1, 0))
        states = tensor_of(model.mtp_states(layer, ids, previous, positions, metadata))
        logits = tensor_of(model.mtp_logits(layer, as_input(states)))
        results.append((states[layer + 1 :], logits[layer + 1 :]))
    return results


def _inputs(count: int) -> StepInputs:
    starts, lens = np.array([0, count], np.int32), np.array([count], np.int32)
    tables = np.arange(-(-count // BLOCK), dtype=np.int32)[None, None] + 1
    positions, ids = np.arange(count), torch.tensor(TOKENS)
    slots, rows = positions[None] + BLOCK, torch.arange(count)
    return step_inputs(starts, lens, tables, positions, slots, input_ids=ids, logits_indices=rows)


@torch.inference_mode()
def theirs(folder: Path, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    reference = Reference(folder, count)
    ids = torch.tensor([TOKENS])
    states = reference.model.model(ids, use_cache=False).last_hidden_state
    cache = MtpCache(config=reference.model.config.get_mtp_config())
    results = []
    for layer in range(count):
        states, first = states[:, :-1], layer + 1
        states = reference.mtp_layers.forward_layer(
            *(layer, states, torch.arange(first, len(TOKENS))[None], cache),
            input_ids=ids[:, first:],
        )
        results.append((states[0], reference.model.lm_head(states[0])))
    return results


@needs_reference
@pytest.mark.parametrize("kernels", SETS)
@pytest.mark.parametrize(("family", "count"), [("deepseek_v3", 2), ("glm4_moe", 3)])
def test_states_and_logits_are_those_of_transformers(
    family: str, count: int, kernels: str, tmp_path: Path
) -> None:
    if kernels == "cpu" and not CpuAttention.is_fast():
        pytest.skip("this processor has no AVX2 with FMA")
    save_with_mtp_layers(family, tmp_path, count, vocab_size=101)
    expected = theirs(tmp_path, count)
    for actual, expected_states in zip(ours(tmp_path, kernels), expected, strict=True):
        for actual_row, expected_row in zip(actual, expected_states, strict=True):
            assert actual_row.shape == expected_row.shape and expected_row.std() > 0.02
            assert (actual_row - expected_row).abs().max() <= TOLERANCE


@pytest.fixture
def deepseek(tmp_path: Path) -> Path:
    save_with_mtp_layers("deepseek_v3", tmp_path, 1, vocab_size=101)
    return tmp_path


def edit(folder: Path, change: Callable[[Tensors], object], **values: Any) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
    settings = json.loads((folder / "config.json").read_text())
    settings.update(values)
    settings = {key: value for key, value in settings.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(settings))


def test_a_family_with_other_layer_types_has_the_same_form(deepseek: Path) -> None:
    [(before, _)] = ours(deepseek)
    sparse = ["dense"] * LAYERS  # as first_k_dense_replace says
    edit(
        deepseek,
        lambda _: None,
        model_type="glm4_moe_lite",
        mlp_layer_types=sparse,
        first_k_dense_replace=...,
        head_dim=...,
        num_nextn_predict_layers=1,
        num_mtp_layers=...,
        rms_norm_eps=1e-6,  # the family's defaults are others
        routed_scaling_factor=2.5,
    )
    [(after, _)] = ours(deepseek)
    assert torch.equal(before, after)


def test_tables_of_a_layer_count_if_they_differ_from_the_models(deepseek: Path) -> None:
    prefix = f"model.layers.{LAYERS}."
    [(states, logits)] = ours(deepseek)

    def add(tensors: Tensors, factor: float) -> None:
        head, embedding = tensors["lm_head.weight"], tensors["model.embed_tokens.weight"]
        tensors[f"{prefix}shared_head.head.weight"] = head * factor
        tensors[f"{prefix}embed_tokens.weight"] = embedding.clone()

    edit(deepseek, lambda tensors: add(tensors, 1.0))
    [(same, same_logits)] = ours(deepseek)
    assert torch.equal(same, states) and torch.equal(same_logits, logits)
    edit(deepseek, lambda tensors: add(tensors, 2.0))
    [(same, other_logits)] = ours(deepseek)
    assert torch.equal(same, states) and torch.allclose(other_logits, 2 * logits)
    name = f"{prefix}embed_tokens.weight"
    edit(deepseek, lambda tensors: tensors.update({name: tensors[name].roll(1, 0)}))
    [(other, _)] = ours(deepseek)
    assert not torch.allclose(other, states, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda tensors, at: tensors.pop(f"{at}enorm.weight"), "lack .*enorm"),
        (lambda tensors, at: tensors.pop(f"{at}mlp.gate.weight"), "lack .*mlp.gate"),
        (
            lambda tensors, at: tensors.update({f"{at}gate.weight": torch.ones(3)}),
            r"have .*layers\.2\.gate\.weight",
        ),
        (
            lambda tensors, at: tensors.update({f"{at}eh_proj.weight": torch.ones(64, 64)}),
            r"eh_proj.weight .* \[64, 64\], and config.json asks for \[64, 128\]",
        ),
    ],
)
def test_every_tensor_is_part_of_a_layer_or_refused(
    change: Callable[[Tensors, str], object], words: str, deepseek: Path
) -> None:
    open_model(deepseek, with_mtp_layers=True)
    edit(deepseek, lambda tensors: change(tensors, f"model.layers.{LAYERS}."))
    open_model(deepseek)  # without speculation the layer is not part of the model
    with pytest.raises(ModelLoadError, match=words):
        open_model(deepseek, with_mtp_layers=True)


def test_the_number_of_layers_is_by_default_that_of_transformers(deepseek: Path) -> None:
    edit(deepseek, lambda _: None, num_nextn_predict_layers=..., num_mtp_layers=...)
    assert len(open_model(deepseek, with_mtp_layers=True).spec.mtp_layers) == 1


def test_a_layer_of_the_model_is_not_taken_for_one(saved: Saved, tmp_path: Path) -> None:
    """A model is never cut by one layer silently."""
    folder, _ = saved(next(tiny for tiny in MODELS if tiny.name == "deepseek_v3"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    edit(tmp_path, lambda _: None, num_hidden_layers=2)
    with pytest.raises(ModelLoadError, match=r"layers\.2\."):
        open_model(tmp_path)


def test_layers_of_another_form_are_refused_by_name(saved: Saved, tmp_path: Path) -> None:
    folder, _ = saved(next(tiny for tiny in MODELS if tiny.name == "mimo_v2_flash"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(ConfigurationError, match=r"has no MTP layers.* 7 layers"):
        open_model(tmp_path, with_mtp_layers=True)
    layer = "model.mtp.layers.0.enorm.weight"
    edit(tmp_path, lambda tensors: tensors.update({layer: torch.ones(48)}))
    open_model(tmp_path)
    with pytest.raises(ConfigurationError, match=rf"{layer}.*another form.*deepseek_v3, glm4_moe"):
        open_model(tmp_path, with_mtp_layers=True)


@pytest.mark.parametrize("count", [-1, 65, 10**9, "one", 1.5])
def test_numbers_of_layers_that_no_model_has_are_refused(count: object, deepseek: Path) -> None:
    edit(deepseek, lambda _: None, num_nextn_predict_layers=count, num_mtp_layers=...)
    with pytest.raises(ModelLoadError, match="num_nextn_predict_layers"):
        open_model(deepseek)
