"""Decoders as they run on CUDA, without the numbers of their weights."""

import tempfile
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch

from pyengine.models.decoder.cuda_kernels import CudaKernels
from pyengine.models.decoder.dummy import open_dummy
from pyengine.models.decoder.model import DecoderModel
from pyengine.models.decoder.spec import DecoderSpec
from pyengine.models.decoder.torch_kernels import TorchKernels
from pyengine.models.transformers_calls import quiet_transformers


def unfilled_decoder(
    family: str,
    settings: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    quantization: Literal["none", "fp8"] = "none",
) -> tuple[DecoderModel, DecoderSpec]:
    """A decoder of a configuration, and its spec; its weights hold what was in memory.

    So it can be built on devices that have no numbers.
    """
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder, quiet_transformers():
        AutoConfig.for_model(family, **settings).save_pretrained(folder)
        opened = open_dummy(Path(folder))
    with patch.object(TorchKernels, "_fill", lambda *_: None):
        decoder = opened.decoder(CudaKernels(device, dtype, quantization))
    return DecoderModel(decoder, device), opened.spec
