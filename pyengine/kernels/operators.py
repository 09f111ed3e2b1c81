"""Operators that torch's compiler does not look into."""

from collections.abc import Callable, Sequence

import torch


def define_operator(
    schema: str,
    compute: Callable[..., torch.Tensor],
    shape: Callable[..., torch.Tensor],
    devices: Sequence[str] = ("CPU", "CUDA"),
) -> None:
    """Define the operator `pyengine::...`; `schema` begins with its name.

    `shape` returns an empty tensor like the result. Not `custom_op`, which costs several
    microseconds more for each of some hundred layers.
    """
    name = f"pyengine::{schema.partition('(')[0]}"
    torch.library.define(name, schema[schema.index("(") :])
    torch.library.impl(name, devices)(compute)
    torch.library.register_fake(name)(shape)


def kept(rows: torch.Tensor) -> torch.Tensor:
    """The same rows; a compiled graph computes them once, and not again wherever they are used."""
    if not torch.compiler.is_compiling():
        return rows
    result: torch.Tensor = torch.ops.pyengine.kept(rows)
    return result


define_operator("kept(Tensor rows) -> Tensor", torch.clone, torch.empty_like)
