"""What the GPU check records of steps, and how it tells replays from launches."""

from pathlib import Path

import torch

from benches.gpu_check.answers import ask, family_folder, small_llm
from benches.gpu_check.graphs import _bits, recorded
from benches.gpu_check.rows import Setup


def test_every_step_s_logits_are_recorded(tmp_path: Path) -> None:
    setup = Setup(device="cpu", folder=str(tmp_path))
    llm = small_llm(family_folder(setup, "llama"), setup, "float32", "gather")
    logits = recorded(llm)
    answers = ask(llm)
    assert len(logits) == len(answers[0].tokens)  # one prefill, then decodes
    for at, step in enumerate(logits):
        assert step.argmax(1).tolist() == [answer.tokens[at] for answer in answers]


def test_one_bit_is_a_difference() -> None:
    steps = [torch.ones(2, 3), torch.zeros(1, 3)]
    assert _bits("x", steps, [one.clone() for one in steps]).status == "pass"
    other = [steps[0], torch.tensor([[0.0, 0.0, 2.0**-100]])]
    found = _bits("x", steps, other)
    assert found.status == "fail"
    assert found.detail.startswith("1 steps differ, the first is step 1, by 7.89e-31")
    assert _bits("x", steps, steps[:1]).detail == "2 steps against 1"
