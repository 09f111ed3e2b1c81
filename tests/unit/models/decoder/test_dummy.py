"""Made-up weights run for every family, and are the same in every process."""

import json
from pathlib import Path

import pytest
import torch

from pyengine.models.decoder.dummy import open_dummy
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.test_families import Saved
from tests.unit.models.decoder.tiny_models import MODELS, Tiny, configuration_in


def logits(folder: Path) -> torch.Tensor:
    runner = Runner(open_dummy(folder).decoder(TorchKernels(CPU, torch.float32)))
    sequence = runner.add([5, 7, 9, 11])
    runner.step((sequence, 4))
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_every_model_runs_without_its_weights(tiny: Tiny, saved: Saved, tmp_path: Path) -> None:
    values = configuration_in(saved(tiny)[0])
    (tmp_path / "config.json").write_text(json.dumps(values))
    found = logits(tmp_path)
    assert found.shape == (4, values["vocab_size"])
    assert found.isfinite().all() and found.std() > 0
    assert torch.equal(found, logits(tmp_path))


def test_a_configuration_of_packed_weights_is_run_in_floats(saved: Saved, tmp_path: Path) -> None:
    values = configuration_in(saved(MODELS[0])[0])
    values["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert logits(tmp_path).isfinite().all()
