"""Weights in 8-bit floats on the device: near the same models in float32."""

from statistics import fmean
from typing import Any

import pytest
import torch

from pyengine.models.decoder.float8 import OLDEST
from tests.gpu.answers import WITH_PROMPT, ask, oracle
from tests.gpu.compare import rounded
from tests.gpu.conftest import InChild
from tests.gpu.models import Place, Refused

DTYPE = "bfloat16"
NEAR = 1.2
"""Mean difference of a log-probability, of models of random weights. On the CPU, 8-bit floats made
0.5 (llama), 0.6 (mixtral) and 0.8 (gpt_oss) of it, weights in the wrong place 2."""


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_oss"])
def test_weights_in_8_bit_floats_are_near_those_in_float32(in_child: InChild, family: str) -> None:
    in_child(near, family)


def near(place: Place, family: str) -> dict[str, Any]:
    """Log-probabilities of the prompts, by quantised layers and experts and by float32."""
    if not place.on_cuda or torch.cuda.get_device_capability(place.device) < OLDEST:
        raise Refused(f"{place.device} does not multiply 8-bit floats")
    llm = place.llm(place.model(family), DTYPE, "auto", quantization="fp8")
    pairs = zip(ask(llm, WITH_PROMPT), oracle(place, family, DTYPE).exact, strict=True)
    differences = [
        abs(mine - exact)
        for got, want in pairs
        for mine, exact in zip(got.prompt, want.prompt, strict=True)
    ]
    mean = fmean(differences)
    assert mean < NEAR, mean
    return {"mean": rounded(mean), "positions": len(differences)}
