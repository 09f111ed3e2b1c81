"""Rotary embeddings that look at the positions of a step, for graphs, which cannot.

Some kinds of scaling take other frequencies for long sequences: in each step the host asks for the
largest position, which waits for the device and cannot be captured. Where no sequence may be so
long, the question is left out.
"""

from copy import deepcopy
from inspect import unwrap
from types import MethodType
from typing import Any

import torch
from torch import nn


def settle_rotary(model: nn.Module, longest: int) -> str | None:
    """Let the rotary embeddings of `model` be captured for sequences of up to `longest` tokens.

    Returns why one of them cannot be, in words for the caller; None: all can. What they compute
    for such sequences stays the same.
    """
    for module in model.modules():
        if not _is_rotary(module) or not _looks_at_numbers(module):
            continue
        limit = _short_positions(module)
        if limit is not None and longest <= limit:
            own: Any = module
            own.forward = MethodType(unwrap(type(module).forward), module)
            if not _looks_at_numbers(module):
                continue
            del own.forward
        way_out = (
            "" if limit is None or longest <= limit else f": set max_model_len={limit} at most"
        )
        return (
            f"{type(model).__name__} with a rotary embedding of type {_kind(module)} chooses its "
            f"frequencies anew in every step, which a CUDA graph cannot{way_out}"
        )
    return None


def _is_rotary(module: nn.Module) -> bool:
    return isinstance(getattr(module, "inv_freq", None), torch.Tensor)


def _looks_at_numbers(module: nn.Module) -> bool:
    """Whether a step of it depends on what positions there are: on torch's device "meta", which has
    shapes and no numbers, that is an error."""
    shapes: Any = deepcopy(module).to("meta")
    for name, value in vars(shapes).items():
        if isinstance(value, torch.Tensor):
            setattr(shapes, name, value.to("meta"))
    positions = torch.zeros(1, 2, dtype=torch.int64, device="meta")
    try:
        with torch.no_grad():
            shapes(torch.zeros(1, 2, 8, device="meta"), positions)
    except (RuntimeError, NotImplementedError):
        return True
    except TypeError:  # one that wants more than positions: the capture will say
        return False
    return False


def _short_positions(module: Any) -> int | None:
    """Up to how many positions its usual frequencies serve; None: it does not say."""
    parameters = getattr(module.config, "rope_parameters", None) or {}
    told = parameters.get("original_max_position_embeddings")
    if told is None and "dynamic" in _kind(module):
        told = getattr(module, "original_max_seq_len", None)
    return None if told is None else int(told)


def _kind(module: Any) -> str:
    return str(getattr(module, "rope_type", type(module).__name__))
