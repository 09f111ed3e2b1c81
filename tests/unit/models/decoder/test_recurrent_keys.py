"""Configurations of families with states: keys are read, have no effect, or are refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pyengine.errors import ConfigurationError, ModelLoadError
from pyengine.models.decoder.loading import fallback_reason, open_model, read_spec, spec_of
from pyengine.models.decoder.ranks import divided
from pyengine.models.decoder.torch_kernels import TorchKernels
from pyengine.models.loader import check_folder
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.tiny_models import RECURRENT, Tiny, configuration_in

TOLERANCE = 3e-4
Saved = Callable[[Tiny], tuple[Path, Any]]
_FIRST = {tiny.family: tiny for tiny in reversed(RECURRENT)}
_TOKENS = [5, 7, 9, 11, 4]


def logits(folder: Path) -> torch.Tensor:
    runner = Runner(open_model(folder).decoder(TorchKernels(CPU, torch.float32)))
    sequence = runner.add(_TOKENS)
    runner.step((sequence, len(_TOKENS)))
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_model_of_images_is_read(
    name: str, saved: Saved, tmp_path: Path
) -> None:
    folder = saved(next(tiny for tiny in RECURRENT if tiny.name == name))[0]
    text = configuration_in(folder)
    text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    values = {
        "model_type": name,
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {**text, "attn_output_gate": True, "mtp_num_hidden_layers": 1},
        "vision_config": {"depth": 2},
        "image_token_id": 7,
        "tie_word_embeddings": False,
    }
    tensors = load_file(folder / "model.safetensors")
    renamed = {key.replace("model.", "model.language_model."): of for key, of in tensors.items()}
    renamed |= {"model.visual.patch_embed.weight": torch.ones(3), "mtp.fc.weight": torch.ones(2)}
    save_file(renamed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert torch.equal(logits(tmp_path), logits(folder))
    assert read_spec(tmp_path).family == name
    values["text_config"]["attention_temperature"] = 2.0
    with pytest.raises(ModelLoadError, match="text_config, says attention_temperature"):
        spec_of(values, "config.json")


def test_tensors_of_a_released_olmo_hybrid_have_sizes_of_their_own(
    saved: Saved, tmp_path: Path
) -> None:
    folder = saved(_FIRST["olmo_hybrid"])[0]
    tensors, spec = load_file(folder / "model.safetensors"), read_spec(folder)
    delta = spec.layers[0].mixer
    names = [f"model.layers.0.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    whole = torch.cat([tensors[name] for name in names])
    sizes = delta.sizes  # type: ignore[union-attr]
    assert len(set(sizes)) > 1
    tensors |= {
        name: part.clone() for name, part in zip(names, whole.split(list(sizes)), strict=True)
    }
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert torch.equal(logits(tmp_path), logits(folder))


def test_time_steps_with_bounds_are_refused(saved: Saved) -> None:
    values = configuration_in(saved(_FIRST["granitemoehybrid"])[0])
    for limits in ([0.0, 1.0], [0.001, float("inf")], ["a", None], [0.0]):
        with pytest.raises(ModelLoadError, match="time_step_limit"):
            spec_of({**values, "time_step_limit": limits}, "config.json")
    spec_of({**values, "time_step_limit": [0.0, float("inf")]}, "config.json")


@pytest.mark.parametrize("tiny", RECURRENT, ids=lambda tiny: tiny.name)
def test_the_engine_opens_them_and_ranks_refuse_them(tiny: Tiny, saved: Saved) -> None:
    folder = saved(tiny)[0]
    assert fallback_reason(folder) is None
    check_folder(folder)
    with pytest.raises(ConfigurationError, match="keep a state"):
        divided(read_spec(folder), 2)
