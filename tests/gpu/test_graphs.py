"""Decode steps replayed from CUDA graphs against the same launches made one by one."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from pyengine import LLM
from pyengine.executor import cuda_graphs
from pyengine.utils.tensors import tensor_of
from tests.gpu.answers import ask, oracle
from tests.gpu.compare import compare, rounded
from tests.gpu.conftest import InChild
from tests.gpu.models import ORACLE, Place, Refused, backends
from tests.support.graphs import record_eagerly

DTYPE = "bfloat16"


@pytest.mark.parametrize("backend", backends())
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_replay_is_its_launches(in_child: InChild, family: str, backend: str) -> None:
    """One table for all layers; groups of layers, windows and sinks."""
    in_child(replay_is_launches, family, backend)


def replay_is_launches(place: Place, family: str, backend: str) -> dict[str, Any]:
    """The bits of the launches, and the tokens of `enforce_eager` up to rounding."""
    if not place.on_cuda:
        raise Refused("CUDA graphs need a CUDA device")

    def build(**settings: Any) -> LLM:
        return place.llm(place.model(family), DTYPE, backend, async_scheduling=False, **settings)

    with warnings_of_ours() as said:
        captured = build(enforce_eager=False)
    if captured.describe()["cuda_graphs"] == "none":
        assert not said, said  # one whose capture failed has said so
        raise Refused("it has no graphs")
    replayed = recorded(captured)
    answers = ask(captured)
    with patch.object(cuda_graphs, "CudaGraphRecorder", lambda: record_eagerly):
        again = build(enforce_eager=False)
    launched = recorded(again)
    ask(again)
    wrong = differing(replayed, launched)
    assert not wrong, wrong
    bound = oracle(place, family, DTYPE).bounds.same
    found = compare(answers, ask(build(enforce_eager=True)), bound)
    assert not found.wrong, found.wrong
    return {
        "steps": len(replayed),
        "near_ties": len(found.near_ties),
        "error": rounded(found.largest),
        "bound": rounded(bound),
    }


def recorded(llm: LLM) -> list[torch.Tensor]:
    """The logits of every step that `llm` will run, in host memory; filled as it runs."""
    runner: Any = llm._engine._executor.runner
    prepare, found = runner.prepare, []

    def recording(*args: Any, **kwargs: Any) -> Any:
        forward = prepare(*args, **kwargs)

        def run(sampled: torch.Tensor | None) -> Any:
            logits = forward(sampled)
            found.append(tensor_of(logits.sampling).detach().cpu().clone())
            return logits

        return run

    runner.prepare = recording
    return found


def differing(replayed: Sequence[torch.Tensor], launched: Sequence[torch.Tensor]) -> str:
    """In words, where any bit differs; else empty."""
    if len(replayed) != len(launched):
        return f"{len(replayed)} steps against {len(launched)}"
    pairs = list(zip(replayed, launched, strict=True))
    steps = [at for at, (pair, eager) in enumerate(pairs) if not torch.equal(pair, eager)]
    if not steps:
        return ""
    first, eager = pairs[steps[0]]
    error = float((first.float() - eager.float()).abs().max())
    return f"{len(steps)} steps differ, the first is step {steps[0]}, by {error:.3g} at most"


@contextmanager
def warnings_of_ours() -> Iterator[list[str]]:
    """Warnings of our loggers inside the block."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("pyengine")
    logger.addHandler(handler)
    try:
        yield said
    finally:
        logger.removeHandler(handler)


def test_every_step_s_logits_are_recorded(tmp_path: Path) -> None:
    place = Place("cpu", str(tmp_path))
    llm = place.llm(place.model("llama"), "float32", ORACLE)
    logits = recorded(llm)
    answers = ask(llm)
    assert len(logits) == len(answers[0].tokens)  # one prefill, then decodes
    for at, step in enumerate(logits):
        assert step.argmax(1).tolist() == [answer.tokens[at] for answer in answers]


def test_one_bit_is_a_difference() -> None:
    steps = [torch.ones(2, 3), torch.zeros(1, 3)]
    assert differing(steps, [step.clone() for step in steps]) == ""
    other = [steps[0], torch.tensor([[0.0, 0.0, 2.0**-100]])]
    assert differing(steps, other).startswith("1 steps differ, the first is step 1, by 7.89e-31")
    assert differing(steps, steps[:1]) == "2 steps against 1"
