"""Each key of a configuration has the effect that it has in transformers, or is refused by name."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.decoder.families import NO_EFFECT, TABLE
from pyengine.models.decoder.loading import open_model, spec_of
from pyengine.models.transformers_calls import quiet_transformers
from tests.support.without_torch import needs_torch
from tests.unit.models.decoder.test_rotary_forms import configuration, newest
from tests.unit.models.decoder.tiny_models import (
    MODELS,
    Folders,
    Tiny,
    configuration_in,
    text_of,
    with_text,
)

if TYPE_CHECKING:
    import torch

_TOKENS = [9, 44, 3, 71, 5, 5, 90, 12, 33, 8, 60, 17, 28, 41, 4, 99]
Path_ = tuple[str, ...]


def changes(values: dict[str, Any], path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    """Each number, flag and list of a configuration, with another value."""
    for key, value in values.items():
        here = (*path, key)
        if isinstance(value, bool):
            yield here, not value
        elif isinstance(value, int):
            yield from ((here, other) for other in (value + 1, 0))
        elif isinstance(value, float):
            yield from ((here, other) for other in (value * 2 + 0.5, 0.0))
        elif isinstance(value, list) and value and isinstance(value[0], int | float):
            yield here, [*value[:-1], value[-1] * 2 + 1]
        elif isinstance(value, list) and {"full_attention", "sliding_attention"} & set(value):
            swapped = "sliding_attention" if value[0] == "full_attention" else "full_attention"
            yield here, [swapped, *value[1:]]
        elif key in ("hidden_act", "hidden_activation", "activation_function"):
            yield from ((here, other) for other in ("relu", "gelu_new") if other != value)
        elif isinstance(value, dict) and here not in {("id2label",), ("label2id",)}:
            yield from changes(value, here)


def changed(values: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    changed_values = copy.deepcopy(values)
    inner = changed_values
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return changed_values


def ours(values: dict[str, Any], folder: Path) -> "torch.Tensor":
    import torch

    from pyengine.models.decoder.torch_kernels import TorchKernels
    from tests.unit.models.decoder.steps import CPU, Runner

    (folder / "config.json").write_text(json.dumps(values))
    runner = Runner(open_model(folder).decoder(TorchKernels(CPU, torch.float32)))
    sequence = runner.add(_TOKENS)
    runner.step((sequence, len(_TOKENS)))
    return torch.stack(sequence.logits)


def theirs(values: dict[str, Any], folder: Path) -> "torch.Tensor":
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    (folder / "config.json").write_text(json.dumps(values))
    reads_images = "vision_config" in values
    models: Any = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    with quiet_transformers():
        model, info = models.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    assert not any(info.values()), info
    with torch.inference_mode():
        logits: torch.Tensor = model.eval()(input_ids=torch.tensor([_TOKENS])).logits[0]
    return logits


_WALKED = [
    tiny if "-" not in tiny.name else pytest.param(tiny, marks=pytest.mark.slow) for tiny in MODELS
]
"""The first model of each family, and the others if time allows."""


@pytest.mark.parametrize("tiny", _WALKED, ids=lambda tiny: tiny.name)
def test_a_changed_value_changes_the_logits_as_in_transformers(
    tiny: Tiny, saved_folder: Folders, tmp_path: Path
) -> None:
    import torch

    from tests.unit.models.decoder.test_families import tolerance_of

    folder, tolerance = saved_folder(tiny), tolerance_of(tiny)
    values = configuration_in(folder)
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    no_effect = {*NO_EFFECT, *TABLE[tiny.family].no_effect} - TABLE[tiny.family].aliases.keys()
    before = ours(values, tmp_path)
    num_effects = 0
    walked = {key: value for key, value in values.items() if key not in _BOUNDS}
    for path, value in changes(walked):
        what = f"{'.'.join(path)}={value!r}"
        try:
            expected = theirs(changed(values, path, value), tmp_path)
        except Exception:  # any error of transformers is a refusal
            expected = None
        try:
            actual = ours(changed(values, path, value), tmp_path)
        except ModelLoadError as error:
            assert path[-1] not in no_effect, f"{what}: {error}"
            continue
        if expected is None or not expected.isfinite().all():
            continue  # transformers refuses more: it checks ids of tokens, for example
        assert (actual - expected).abs().max() <= tolerance, what
        num_effects += bool((actual - before).abs().max() > tolerance)
        if path[-1] in no_effect:
            assert torch.equal(actual, before), what
    assert num_effects >= 1, "no value had an effect: the walk saw nothing"


_BOUNDS = {"time_step_limit", "time_step_min"}
"""transformers bounds time steps in prompts and not afterwards; Nemotron-H's own code does not."""


@pytest.mark.parametrize("family", sorted(TABLE))
def test_an_unknown_key_is_refused_by_name(
    family: str, saved_folder: Folders, first_of_family: list[Tiny]
) -> None:
    folder = saved_folder(next(tiny for tiny in first_of_family if tiny.family == family))
    values = configuration_in(folder)
    text = text_of(values)
    for key, value in (("attention_temperature", 2.0), ("num_hidden_layer", 3), ("norm", {})):
        for other in ({**values, key: value}, with_text(values, {**text, key: value})):
            with pytest.raises(ModelLoadError, match=f"says {key}="):
                spec_of(other, "config.json")
    spec_of({**values, "attention_temperature": None}, "config.json")  # null says nothing


@pytest.mark.parametrize("family", sorted(TABLE))
def test_an_unknown_key_of_the_rotary_settings_is_refused_by_name(
    family: str, saved_folder: Folders, first_of_family: list[Tiny]
) -> None:
    folder = saved_folder(next(tiny for tiny in first_of_family if tiny.family == family))
    values = configuration_in(folder)
    layers = spec_of(values, "config.json").layers
    if not any(getattr(layer.attention, "rotary", None) for layer in layers):
        pytest.skip("no head rotates")
    text_of(values)["rope_parameters"]["short_mscale"] = 1.1
    with pytest.raises(ModelLoadError, match=r"short_mscale=1\.1"):
        spec_of(values, "config.json")


@pytest.mark.parametrize("family", sorted(TABLE))
def test_defaults_are_those_of_the_configuration_class(family: str) -> None:
    from transformers import CONFIG_MAPPING

    row, read = TABLE[family], dict[str, Any]()
    values = CONFIG_MAPPING[family]().to_dict()
    names = {key: alias for alias, key in row.aliases.items() if alias in values}
    for key, default in row.defaults.items():
        name = names.get(key, key)
        if key in _READ_OTHERWISE or name not in values:
            continue
        value = values[name]
        if default in (None, "auto") and key in _FILLED_IN:
            continue
        if key == "sliding_window" and row.defaults.get("use_sliding_window") is False:
            continue  # transformers removes it where it is not used
        if value != default:
            read[key] = (default, value)
    assert not read, "ours, and those of transformers"
    theta = values.get("rope_parameters") or {}
    if "rope_theta" in theta:
        assert theta["rope_theta"] == _theta(row.defaults)


def _theta(defaults: Any) -> float:
    nested = defaults.get("rope_parameters") or {}
    theta: float = nested.get("rope_theta", defaults["rope_theta"])
    return theta


_READ_OTHERWISE = {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}
_FILLED_IN = {
    *("full_attn_idxs", "head_dim", "layer_rope_theta", "layer_types", "layers_block_type"),
    *("linear_key_head_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_value_head_dim", "mamba_d_head", "mamba_dt_rank", "mlp_layer_types"),
    *("mlp_multipliers", "mlp_only_layers", "no_rope_layers", "num_key_value_heads"),
    *("per_layer_config", "ssm_multipliers", "time_step_limit"),
}
"""Keys whose default depends on others, or is a list."""


_WITHOUT_EFFECT = {
    "granitemoehybrid-dense": {"intermediate_size", "num_experts_per_tok"},
    "jamba-biases": {"num_experts_per_tok"},
    "lfm2-biases": {"block_ffn_dim_multiplier", "block_multiple_of"},
    "nemotron_h-dense": {
        *("moe_intermediate_size", "moe_shared_expert_intermediate_size", "n_group"),
        *("n_routed_experts", "norm_topk_prob", "num_experts_per_tok"),
        *("routed_scaling_factor", "topk_group"),
    },
}
"""Keys that another key switches off: those of experts in a model without any."""


@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_a_key_of_another_kind_is_refused_by_name(
    tiny: Tiny, saved_folder: Folders, other_values: Callable[[Any], list[Any]]
) -> None:
    folder = saved_folder(tiny)
    values, no_effect = configuration_in(folder), {*NO_EFFECT, *TABLE[tiny.family].no_effect}
    no_effect |= _WITHOUT_EFFECT.get(tiny.name, set())
    text = text_of(values)
    for key in text:
        if key in no_effect or text[key] is None:
            continue
        for value in other_values(text[key]):
            if (key, "layer_types" in values) == ("sliding_window_pattern", True):
                continue  # then it has no effect: released files have a text there
            with pytest.raises(ModelLoadError) as caught:
                spec_of(with_text(values, {**text, key: value}), "config.json")
            assert key in str(caught.value), (key, value)


@needs_torch
@pytest.mark.parametrize("family", sorted(TABLE))
def test_a_key_that_is_absent_or_null_means_what_transformers_reads(
    family: str, first_of_family: list[Tiny]
) -> None:
    values = configuration(next(tiny for tiny in first_of_family if tiny.family == family))
    accepted, text = 0, text_of(values)
    for key in text.keys() - {"model_type"}:
        absent = {name: value for name, value in text.items() if name != key}
        for form in (with_text(values, part) for part in (absent, {**text, key: None})):
            try:
                written, actual = newest(form), spec_of(form, "config.json")
            except Exception:  # refused by one of the two: transformers raises any kind
                continue
            expected = replace(spec_of(written, "newest"), saved_dtype=actual.saved_dtype)
            assert actual == expected, (key, text_of(form).get(key, "absent"))
            accepted += 1
    assert accepted >= 30


@pytest.fixture(scope="session")
def other_values() -> Callable[[Any], list[Any]]:
    """Values of other kinds than a given one."""

    def other_kinds(value: Any) -> list[Any]:
        kinds: list[Any] = ["no number", ["a", "b"]]
        if not isinstance(value, dict):
            kinds.append({"a": 1})
        return kinds

    return other_kinds
