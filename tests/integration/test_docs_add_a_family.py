"""The family that docs/guides/add-a-family.md adds computes what transformers computes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from pyengine.models.decoder import loading
from pyengine.models.decoder.families import TABLE, Family
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.support.docs import ROOT
from tests.unit.models.decoder.steps import CPU, Runner
from tests.unit.models.decoder.tiny_models import Tiny, save

PAGE = "docs/guides/add-a-family.md"
MOST_LINES = 40
_TOKENS = [9, 44, 3, 71, 5, 5, 90, 12, 33, 8]
_BLOCK = re.compile(r"^    ```python\n(.*?)^    ```$", re.MULTILINE | re.DOTALL)
ROW, MODELS = (
    re.sub(r"^    ", "", code, flags=re.MULTILINE)
    for code in _BLOCK.findall((ROOT / PAGE).read_text(encoding="utf-8"))
)


def run(code: str) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(compile(code, PAGE, "exec"), names)
    return names


def test_a_dense_family_takes_at_most_forty_lines() -> None:
    _, _, body = ROW.partition("\n\n\n")  # imports are those of every row
    assert 20 < len(body.replace("\n\n", "\n").splitlines()) <= MOST_LINES


def models() -> list[Tiny]:
    return list(run(MODELS)["MODELS"])


@pytest.mark.parametrize("tiny", models(), ids=lambda tiny: tiny.name)
def test_the_family_computes_what_transformers_computes(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family: Family = run(ROW)["ARCEE"]
    assert family.model_type == tiny.family not in TABLE
    monkeypatch.setattr(loading, "TABLE", {**TABLE, family.model_type: family})
    model = save(tiny, tmp_path)
    decoder = loading.open_model(tmp_path).decoder(TorchKernels(CPU, torch.float32))
    runner = Runner(decoder)
    sequence = runner.add(_TOKENS)
    runner.step((sequence, len(_TOKENS)))
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([_TOKENS])).logits[0]
    assert (torch.stack(sequence.logits) - expected).abs().max() <= 2e-4
