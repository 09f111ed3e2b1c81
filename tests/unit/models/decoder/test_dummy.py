"""Dummy weights run for every family, and are the same in every process."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from pyengine.models.checkpoint_files import check_weights
from pyengine.models.decoder.cpu_numbers import as_floats
from pyengine.models.decoder.dummy import dummy_shapes, open_dummy
from pyengine.models.decoder.dummy_numbers import DummyStored
from pyengine.models.decoder.loading import read_spec
from pyengine.models.decoder.stored_weight import Weight
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.test_families import Saved
from tests.unit.models.decoder.tiny_models import MODELS, Tiny, configuration_in, text_of


def logits(folder: Path) -> torch.Tensor:
    runner = Runner(open_dummy(folder).decoder(TorchKernels(CPU, torch.float32)))
    sequence = runner.add([5, 7, 9, 11])
    runner.step((sequence, 4))
    return torch.stack(sequence.logits)


@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_every_model_runs_without_its_weights(tiny: Tiny, saved: Saved, tmp_path: Path) -> None:
    values = configuration_in(saved(tiny)[0])
    (tmp_path / "config.json").write_text(json.dumps(values))
    actual = logits(tmp_path)
    assert actual.shape == (4, text_of(values)["vocab_size"])
    assert actual.isfinite().all() and actual.std() > 0
    assert torch.equal(actual, logits(tmp_path))


@pytest.mark.parametrize("tiny", MODELS, ids=lambda tiny: tiny.name)
def test_as_many_weights_are_made_up_as_files_have(tiny: Tiny, saved: Saved) -> None:
    """A tied head counts once; some files have it twice. Layers for images do not count."""
    folder = saved(tiny)[0]
    count = sum(map(math.prod, dummy_shapes(open_dummy(folder).spec).values()))
    tensors, spec = check_weights(folder).tensors, read_spec(folder)
    text = [header for name, header in tensors.items() if ".visual." not in name]
    in_files = sum(math.prod(header.shape) for header in text)
    head = tensors.get("lm_head.weight")
    tied = math.prod(head.shape) if head is not None and spec.is_tied else 0
    assert count == in_files - tied


@pytest.mark.parametrize("shape", [(7,), (700, 1600), (3, 400, 1000)])
def test_numbers_are_the_same_whatever_makes_them(shape: tuple[int, ...]) -> None:
    """On a device they are computed there; a tensor may be longer than the drawn numbers."""
    kernels = TorchKernels(CPU, torch.float32)
    for number_format, start in [("F32", 0), ("F32", 64), ("BF16", 0), ("F16", 0)]:
        part = DummyStored(Path(), "a.weight", number_format, shape, start)
        parts = [part]
        if len(shape) == 2:
            parts += [
                part.transposed(),
                part.only(slice(1, None, 2)),
                part.only_columns(slice(3, 9)),
            ]
        for other in parts:
            floats = as_floats(other.read(), number_format)
            assert np.array_equal(kernels._part(other).numpy(), floats)
        first = as_floats(part.read(), number_format)
        assert np.isfinite(first).all() and (len(shape) == 1 or len(np.unique(first[:, 0])) > 2)


def test_the_host_makes_no_copy_for_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DummyStored, "read", lambda _self: pytest.fail("read on the host"))
    kernels = TorchKernels(torch.device("meta"), torch.bfloat16)
    monkeypatch.setattr(kernels, "_fill", lambda target, weight: [*weight.pieces(kernels._part)])
    weight = Weight((DummyStored(Path(), "a.weight", "F32", (64, 32), 0),), (64, 32))
    assert kernels.table(weight).weight.is_meta
