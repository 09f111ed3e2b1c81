"""Decode steps replayed from CUDA graphs against the same launches made one by one."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch

from benches.gpu_check.answers import ask, family_folder, oracle, small_llm
from benches.gpu_check.backends import DTYPE
from benches.gpu_check.compare import compare
from benches.gpu_check.first_use import refusal
from benches.gpu_check.names import backends, families
from benches.gpu_check.rows import Part, Row, Setup, checked, rounded
from pyengine import LLM
from pyengine.core.errors import ConfigurationError
from pyengine.runner.graphs import EagerRecorder

_FAMILIES = ("llama", "gpt_oss")
"""One table for all layers; groups of layers, windows and sinks."""


def parts(setup: Setup) -> list[Part]:
    """See `Part`."""
    return [
        (f"{family}: {backend}", partial(_graphs, setup, family, backend))
        for family in _FAMILIES
        if family in families(setup)
        for backend in backends(setup)
    ]


def _graphs(setup: Setup, family: str, backend: str) -> Iterator[Row]:
    same_bits = f"{family}: {backend}: a replay gives the bits of the launches"
    if not setup.on_cuda:
        yield Row(same_bits, "skip", {}, "CUDA graphs need a CUDA device")
        return
    folder = family_folder(setup, family)

    def build(**settings: Any) -> LLM:
        return small_llm(folder, setup, DTYPE, backend, async_scheduling=False, **settings)

    with _warnings() as said:
        try:
            captured = build(enforce_eager=False)
        except ConfigurationError as error:
            yield refusal(same_bits, error)
            return
    if captured.describe()["cuda_graphs"] == "none":
        # a backend without graphs is no failure, one whose capture failed has said so
        yield Row(same_bits, "fail" if said else "skip", {}, "; ".join(said) or "it has no graphs")
        return
    replayed = recorded(captured)
    answers = ask(captured)
    with patch("pyengine.engine.builder.CudaRecorder", EagerRecorder):
        again = build(enforce_eager=False)
    launched = recorded(again)
    ask(again)
    yield _bits(same_bits, replayed, launched)
    eager = ask(build(enforce_eager=True))
    bound = oracle(folder, setup.device, DTYPE).bounds.same
    found = compare(answers, eager, bound)
    numbers = {
        "equal": found.num_equal,
        "of": found.num_answers,
        "near_ties": len(found.near_ties),
        "error": rounded(found.largest),
        "bound": rounded(bound),
    }
    yield checked(f"{family}: {backend}: graphs against enforce_eager", _some(found.wrong), numbers)


def recorded(llm: LLM) -> list[torch.Tensor]:
    """The logits of every step that `llm` will run, in host memory; filled as it runs."""
    runner: Any = llm._engine._executor.runner
    prepare, found = runner.prepare, []

    def recording(*args: Any, **kwargs: Any) -> Any:
        forward = prepare(*args, **kwargs)

        def run(sampled: torch.Tensor | None) -> Any:
            logits = forward(sampled)
            found.append(logits.sampling.detach().cpu().clone())
            return logits

        return run

    runner.prepare = recording
    return found


def _bits(check: str, replayed: list[torch.Tensor], launched: list[torch.Tensor]) -> Row:
    differing = [
        at
        for at, (one, other) in enumerate(zip(replayed, launched, strict=False))
        if not torch.equal(one, other)
    ]
    wrong = ""
    if len(replayed) != len(launched):
        wrong = f"{len(replayed)} steps against {len(launched)}"
    elif differing:
        at = differing[0]
        error = float((replayed[at].float() - launched[at].float()).abs().max())
        wrong = f"{len(differing)} steps differ, the first is step {at}, by {error:.3g} at most"
    return checked(check, wrong, {"steps": len(replayed), "differing": len(differing)})


def _some(wrong: list[str]) -> str:
    return "; ".join(wrong[:3])


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """What our loggers warn of meanwhile."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pyengine")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)
