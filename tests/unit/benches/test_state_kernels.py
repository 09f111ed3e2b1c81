"""The checks of recurrent layers' kernels in the first run on a GPU: each finds what is wrong."""

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch

from tests.support.kernels import in_interpreter


def results(result: torch.Tensor, _state: torch.Tensor) -> torch.Tensor:
    """One more rounding."""
    return result * 1.004


def states(result: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A state in 16 bits."""
    state.copy_(state.half())
    return result


def slots(result: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """A number of the last slot, which nothing writes."""
    state[-1].view(-1)[0] += 1
    return result


@in_interpreter
def test_what_is_wrong_with_a_kernel_is_recorded() -> None:
    """In the interpreter: results, states, and slots that must keep their bits."""
    from benches.gpu.first_run import state_kernels
    from benches.gpu.first_run.context import Context
    from pyengine.kernels import short_conv

    own = short_conv.short_conv
    with TemporaryDirectory() as folder:
        context = Context("cpu", folder, "state_kernels", Path(folder))
        mixer = state_kernels.mixers(context)["short convolution"]

        def checked(spoil: Callable[..., torch.Tensor] | None) -> list[str]:
            def spoilt(
                rows: Any, weight: Any, bias: Any, state: Any, *of: Any, **named: Any
            ) -> Any:
                result = own(rows, weight, bias, state, *of, **named)
                return result if spoil is None else spoil(result, state)

            with patch.object(short_conv, "short_conv", spoilt):
                state_kernels.check(context, "a model", mixer, "mixed", [1, 2, 1, 1])
            lines = (Path(folder) / "results.jsonl").read_text().splitlines()
            wrong: list[str] = json.loads(lines[-1])["wrong"]
            return wrong

        assert checked(None) == []
        assert checked(results) == ["results"]
        assert checked(states) == ["states", "slots of others"]
        assert checked(slots) == ["slots of others"]
        assert context.wrong == ["short convolution"] * 3
