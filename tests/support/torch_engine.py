"""The oracle of whole engines on the CPU: torch's tensors in the decoder and in the sampler.

The decoder runs by `TorchKernels`, attention by the backend "gather", and the sampler by its tensor
operations. The scheduler, the block manager and the executor are the product's.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from pyengine import LLM
from pyengine.executor import executor
from pyengine.models import loader
from pyengine.models.decoder.kernel_sets import KernelSettings
from pyengine.models.decoder.torch_kernels import TorchKernels
from pyengine.sampling.logprobs import PendingLogprobs
from pyengine.sampling.sampler import Sampled, sample
from pyengine.utils.devices import Device
from pyengine.utils.dtypes import DType, torch_dtype
from pyengine.utils.tensors import array_of, tensor_of

_prompt_logprobs = executor._prompt_logprobs


@contextmanager
def torch_llm(model: Any = None, **settings: Any) -> Iterator[LLM]:
    """An `LLM` that computes with tensors of torch on the CPU.

    It patches the loader and the executor of this process: while it is open, no other engine may
    load or run.
    """
    with (
        patch.object(loader, "kernel_set", _torch_kernels),
        patch.object(executor, "sample", _sample_from_tensors),
        patch.object(executor, "_prompt_logprobs", _prompt_logprobs_of_tensors),
        LLM(model, device="cpu", attention_backend="gather", **settings) as llm,
    ):
        yield llm


def _torch_kernels(
    _device: Device, dtype: DType, _settings: KernelSettings, _num_threads: int
) -> TorchKernels:
    return TorchKernels(torch.device("cpu"), torch_dtype(dtype))


def _sample_from_tensors(logits: Any, *rest: Any) -> Sampled:
    sampled = sample(tensor_of(logits), *rest)
    # The next step may take them before they are waited for, and its inputs are arrays.
    sampled.token_ids = array_of(sampled.token_ids)
    return sampled


def _prompt_logprobs_of_tensors(parts: Sequence[Any], logits: Any) -> PendingLogprobs:
    return _prompt_logprobs(parts, tensor_of(logits))
