"""Scales of an 8-bit KV cache in checkpoints: their names, and invalid numbers."""

from pathlib import Path

import numpy as np
import pytest

from pyengine.errors import ModelLoadError
from pyengine.models.checkpoint_files import check_weights
from pyengine.models.kv_scales import is_kv_scale, read_kv_scales
from pyengine.utils.dtypes import Rows, rounded
from tests.support.checkpoints import save_weights

LAYER = "model.layers.{}.self_attn."


def scales_of(folder: Path, tensors: dict[str, Rows]) -> object:
    norm = {"model.norm.weight": np.ones(4, np.float32)}
    save_weights(folder / "model.safetensors", {**norm, **tensors})
    return read_kv_scales(folder, check_weights(folder))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("k_scale", "v_scale"),  # compressed-tensors
        ("attn.k_scale", "attn.v_scale"),
        ("k_proj.k_scale", "v_proj.v_scale"),  # ModelOpt
        ("k_proj.output_scale", "v_proj.output_scale"),  # AutoFP8, Quark
    ],
)
def test_names_of_several_tools_are_known(tmp_path, key, value):
    tensors = {
        f"{LAYER.format(11)}{key}": np.array(0.5, np.float32),
        f"{LAYER.format(11)}{value}": rounded(np.array([0.25], np.float32), np.uint16),
        f"{LAYER.format(2)}{value}": np.array([2.0], np.float32),
    }
    assert scales_of(tmp_path, tensors) == {11: (0.5, 0.25), 2: (1.0, 2.0)}


def test_one_scale_can_be_that_of_both(tmp_path):
    assert scales_of(tmp_path, {f"{LAYER.format(0)}kv_scale": np.array(3.0, np.float32)}) == {
        0: (3.0, 3.0)
    }


def test_scales_of_weights_are_others(tmp_path):
    names = ("k_proj.weight_scale", "k_proj.input_scale", "q_proj.output_scale", "o_proj.k_scale")
    assert (
        scales_of(tmp_path, {f"{LAYER.format(0)}{name}": np.ones(1, np.float32) for name in names})
        == {}
    )
    assert not any(is_kv_scale(f"{LAYER.format(0)}{name}") for name in names)


@pytest.mark.parametrize("numbers", [[0.0], [-1.0], [float("nan")], [float("inf")], [1.0, 2.0]])
def test_a_scale_is_a_positive_number(tmp_path, numbers):
    with pytest.raises(ModelLoadError, match=r"self_attn\.k_scale in .* is the scale of a KV"):
        scales_of(tmp_path, {f"{LAYER.format(0)}k_scale": np.array(numbers, np.float32)})
