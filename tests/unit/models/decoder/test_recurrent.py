"""Families with states compute what transformers computes, however steps divide tokens."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pyengine.models.decoder.loading import open_model
from pyengine.models.decoder.torch_kernels import TorchKernels
from tests.unit.models.decoder.steps import CPU, Runner, Running
from tests.unit.models.decoder.tiny_models import RECURRENT, Tiny

TOLERANCE = 3e-4
_MIN_SPREAD = 0.02
Saved = Callable[[Tiny], tuple[Path, Any]]
_LONG = 70
"""Tokens of a prompt that is longer than the chunks of transformers' delta rules."""


def runner_of(tiny: Tiny, saved: Saved) -> Runner:
    return Runner(open_model(saved(tiny)[0]).decoder(TorchKernels(CPU, torch.float32)))


def check(model: Any, sequence: Running) -> None:
    with torch.inference_mode():
        expected = model(input_ids=torch.tensor([sequence.tokens]), use_cache=False).logits[0]
    actual = torch.stack(sequence.logits)
    assert expected.std() > _MIN_SPREAD
    assert len(actual) == len(expected)
    assert (actual - expected).abs().max() <= TOLERANCE
    assert torch.equal(actual.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("chunk", [1, 3, 64, _LONG])
@pytest.mark.parametrize("tiny", RECURRENT, ids=lambda tiny: tiny.name)
def test_a_prompt_may_be_computed_in_chunks(tiny: Tiny, chunk: int, saved: Saved) -> None:
    tokens = torch.randint(3, 101, (_LONG,), generator=torch.Generator().manual_seed(2)).tolist()
    runner = runner_of(tiny, saved)
    sequence = runner.add(tokens)
    while left := len(tokens) - sequence.computed:
        runner.step((sequence, min(left, chunk)))
    check(saved(tiny)[1], sequence)


@pytest.mark.parametrize("tiny", RECURRENT, ids=lambda tiny: tiny.name)
def test_hidden_states_after_each_token_are_those_of_transformers(
    tiny: Tiny, saved: Saved, prompts: list[list[int]]
) -> None:
    model, runner = saved(tiny)[1], runner_of(tiny, saved)
    sequence = runner.add(prompts[0])
    inputs = runner._inputs([(sequence, len(prompts[0]))])
    states = runner._state_inputs(inputs, [(sequence, len(prompts[0]))])
    metadata = runner.backend.metadata(inputs)
    with torch.inference_mode():
        actual = runner.decoder.hidden_states(inputs.input_ids, inputs.positions, metadata, states)
        expected = model.model(input_ids=torch.tensor(prompts[:1]), use_cache=False)[0][0]
    assert (actual - expected).abs().max() <= TOLERANCE * expected.abs().max()


@pytest.mark.parametrize("tiny", RECURRENT, ids=lambda tiny: tiny.name)
def test_sequences_continue_from_a_copied_state(
    tiny: Tiny, saved: Saved, prompts: list[list[int]]
) -> None:
    runner, first = runner_of(tiny, saved), prompts[0]
    whole, cut = runner.add(first), runner.add(first)
    runner.step((cut, 9))
    snapshot = runner.new_slot()
    runner.states.copy([(cut.slot, snapshot)])
    runner.step((cut, 1))  # the live state moves on
    forks = [runner.add(first) for _ in range(2)]
    for fork in forks:
        fork.computed, fork.source, fork.tables = 9, snapshot, cut.tables
    runner.step(*((fork, len(first) - 9) for fork in forks))
    runner.step((whole, len(first)))
    for fork in forks:
        assert (torch.stack(fork.logits) - torch.stack(whole.logits[9:])).abs().max() <= TOLERANCE


def test_a_state_that_is_not_kept_leaves_its_slot(saved: Saved, prompts: list[list[int]]) -> None:
    runner = runner_of(RECURRENT[0], saved)
    sequence = runner.add(prompts[0])
    slot, sequence.slot = sequence.slot, -1
    runner.step((sequence, 5))
    for layer in runner.states.tensors:
        assert not layer.conv[slot].any()
        assert not layer.recurrent[slot].any()
