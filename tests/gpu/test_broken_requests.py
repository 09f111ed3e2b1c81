"""A request whose keys and values are not finite fails alone, and leaves nothing behind."""

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention

from pyengine import LLM
from pyengine.attention.choice import backend_class
from pyengine.errors import RequestFailedError
from pyengine.models.decoder.cpu_kernels import CpuKernels
from tests.gpu.answers import GREEDY, answer, ask, oracle, prompts
from tests.gpu.compare import Answer, rounded
from tests.gpu.conftest import InChild
from tests.gpu.models import Place, backends

BROKEN = 0
"""A token that no prompt and no answer has; its embedding is NaN."""
CHUNK = 200
"""Tokens of a step: several prompts, or a part of one beside decodes."""
POOL = 1536
"""Tokens of the pool: four broken requests fill it."""
Numbers = dict[str, Any]


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("backend", backends())
def test_a_broken_request_fails_alone(in_child: InChild, backend: str, family: str) -> None:
    in_child(fails_alone, family, backend)


def fails_alone(place: Place, family: str, backend: str) -> Numbers:
    """Beside others, then others in its blocks."""
    folder, size = place.model(family), backend_class(backend).block_size
    settings = {
        "block_size": size,
        "num_blocks": POOL // size,
        "max_model_len": 512,
        "max_num_batched_tokens": CHUNK,
        "enforce_eager": not place.on_cuda,
    }
    if not place.on_cuda:  # else torch traces each shape before it runs uncompiled
        flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True
    dtype = "bfloat16" if place.on_cuda else "float32"
    llm = place.llm(folder, dtype, backend, **settings)
    break_token(llm)
    expected = oracle(place, family, dtype)
    assert not any(BROKEN in item.tokens for item in expected.same)
    found = {"beside them": beside_broken(llm), "from the cache": ask(llm)}
    fill(llm)
    found["in their blocks"] = ask(llm)
    compared = {when: expected.compare(answers)[0] for when, answers in found.items()}
    for when, same in compared.items():
        assert not same.wrong, f"{when}: {same.wrong}"
        assert same.num_tokens > 0
    return {
        "dtype": dtype,
        "error": rounded(max(same.largest for same in compared.values())),
        "bound": rounded(expected.bounds.same),
    }


def break_token(llm: LLM) -> None:
    """Make the embedding of `BROKEN` NaN, as no file of weights may have it."""
    runner: Any = llm._engine._executor.runner
    decoder = runner._model._decoder
    if isinstance(decoder.kernels, CpuKernels):
        decoder._embedding = BrokenTable(decoder._embedding)
    else:
        with torch.no_grad():
            decoder._embedding.weight[BROKEN] = float("nan")


class BrokenTable:
    """A table over arrays, whose row `BROKEN` is NaN."""

    def __init__(self, table: Any) -> None:
        self._table = table

    def gather(self, ids: Any) -> Any:
        """See `Table.gather`."""
        found = self._table.gather(ids)
        found[ids == BROKEN] = float("nan")
        return found


def beside_broken(llm: LLM) -> list[Answer]:
    """The answers to `prompts` beside requests that are broken at their start, in the middle, at
    their end, and behind a prefix that others share."""
    some = prompts()
    broken = [
        [BROKEN],
        [*some[2][:70], BROKEN, *some[2][70:90]],
        [*some[1][:40], BROKEN],
        [*some[3][:150], BROKEN, *some[3][:20]],
    ]
    mixed = [prompt for pair in zip(broken, some, strict=False) for prompt in pair] + some[4:]
    with pytest.raises(RequestFailedError) as caught:
        llm.generate(mixed, GREEDY, use_tqdm=False)
    outputs = caught.value.outputs
    failed = [output.error is not None for output in outputs]
    assert failed == [BROKEN in prompt for prompt in mixed]
    assert all("BrokenLogitsError" in str(output.error) for output in outputs if output.error)
    return [answer(output) for output in outputs if output.error is None]


def fill(llm: LLM) -> None:
    """Have broken tokens in all blocks of the pool, and none of them cached."""
    llm._manager.evict_all()
    broken = [[BROKEN, at, *[BROKEN] * (POOL // 4 - 2)] for at in range(3, 7)]
    with pytest.raises(RequestFailedError) as caught:
        llm.generate(broken, GREEDY, use_tqdm=False)
    assert all(output.error is not None for output in caught.value.outputs)
    llm._manager.evict_all()
