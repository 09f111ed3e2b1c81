"""Every family that transformers ships should run paged with the logits of a plain forward."""

from contextlib import nullcontext
from dataclasses import replace
from random import Random
from typing import Any

import pytest
import torch

from pyengine.errors import ConfigurationError
from pyengine.executor import model_runner
from pyengine.models.decoder.kernel_sets import KernelSettings
from pyengine.models.loaded import LoadedModel
from pyengine.utils.tensors import tensor_of
from tests.support import checkpoints
from tests.support.graphs import record_eagerly
from tests.support.models import BY_TORCH, as_fallback, as_loaded
from tests.support.static_attention import StaticBackend
from tests.unit.executor.hand_made import Entry, HandMadePlan, PagedRun, random_model

WINDOW = {"sliding_window": 6}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 1, **WINDOW},
    "qwen3": {"head_dim": 24},
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "decoder_sparse_step": 1,
    },
    "mistral": WINDOW,
    "mixtral": {"num_local_experts": 4, "sliding_window": 6},
    "gemma2": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 2.0,
        **WINDOW,
    },
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOW},
    "phi": {"num_key_value_heads": 4},
    "phi3": {},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **WINDOW},
    "cohere2": WINDOW,
    "smollm3": {},
    "olmo2": {},
    "granite": {},
    "deepseek_v3": checkpoints.FAMILIES["deepseek_v3"],
}
TOLERANCE = 1e-4
OPEN = nullcontext()


def sequences() -> list[list[int]]:
    rnd = Random(1)
    lengths = (19, 40, 2, 33)
    return [[rnd.randrange(3, 97) for _ in range(n)] for n in lengths]


@torch.no_grad()
def plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


def run_in_chunks(run: PagedRun, prompts: list[list[int]], expected: list[torch.Tensor]) -> int:
    """Chunks of 7 while more than 5 tokens are left, then one by one: steps mix both kinds.

    Compares every row's logits. Returns how many blocks slid out of a window and were poisoned.
    """
    tables = [run.tables(len(tokens)) for tokens in prompts]
    done, given = [0] * len(prompts), 0
    while any(d < len(t) for d, t in zip(done, prompts, strict=True)):
        entries, whose = [], []
        for i, tokens in enumerate(prompts):
            left = len(tokens) - done[i]
            if left:
                end = done[i] + (min(7, left - 5) if left > 5 else 1)
                entries.append(Entry(tokens, done[i], end, tables[i]))
                whose.append(i)
        rows, sampling = run.step(entries)
        samples = iter(sampling)
        for i, e, got in zip(whose, entries, rows, strict=True):
            torch.testing.assert_close(
                got, expected[i][e.start : e.end], atol=TOLERANCE, rtol=TOLERANCE
            )
            if e.samples:
                torch.testing.assert_close(next(samples), got[-1])
            done[i] = e.end
            given += run.slide(e.tables, e.end)
        assert next(samples, None) is None
    return given


def run_by_transformers(module: Any) -> LoadedModel:
    return replace(as_loaded(module), model=as_fallback(module))


@pytest.mark.parametrize("kernels", [BY_TORCH, KernelSettings()], ids=["torch", "default"])
@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_and_decode_give_the_logits_of_a_plain_forward(family, kernels):
    model = random_model(family, **FAMILIES[family])
    prompts = sequences()
    expected = [plain_logits(model, tokens) for tokens in prompts]
    assert run_in_chunks(PagedRun(model, kernels=kernels), prompts, expected) == 0


def test_a_module_that_runs_as_it_is_gives_the_logits_of_a_plain_forward():
    model = random_model("llama")
    prompts = sequences()
    expected = [plain_logits(model, tokens) for tokens in prompts]
    assert (
        run_in_chunks(PagedRun(run_by_transformers(random_model("llama"))), prompts, expected) == 0
    )


SLIDING = {
    "qwen2": ((None, 6, 6), 1),
    "mistral": ((6,), 3),
    "mixtral": ((6,), 3),
    "gemma2": ((None, 6, 6), 1),
    "gemma3_text": ((6,), 3),
    "gpt_oss": ((None, 6, 6), 1),
    "cohere2": ((6,), 3),
}


@pytest.mark.parametrize("family", SLIDING)
def test_layer_groups_give_the_same_logits_and_release_blocks(family):
    """Blocks that left a window are poisoned: a row that still saw them would differ."""
    windows, size = SLIDING[family]
    model = random_model(family, **FAMILIES[family])
    prompts = sequences()
    expected = [plain_logits(model, tokens) for tokens in prompts]
    run = PagedRun(model, num_blocks=80, grouped=True)
    assert (run.groups.windows, run.groups.num_tensors) == (windows, size)
    assert len({tensor.data_ptr() for tensor in run.pool.keys}) == size
    given = run_in_chunks(run, prompts, expected)
    slid = sum((len(tokens) - 6 + 1) // 4 for tokens in prompts if len(tokens) > 6)
    assert given == slid * sum(window is not None for window in windows)


def test_a_layer_that_sees_further_than_its_group_keeps_is_refused():
    model = random_model("gpt_oss", **FAMILIES["gpt_oss"])
    run = PagedRun(run_by_transformers(model), grouped=True)
    layer = model.model.layers[2].self_attn
    tokens = sequences()[0]
    tables = run.tables(len(tokens))
    for window, words in ((None, "every position"), (7, "the last 7 positions")):
        layer.sliding_window = window
        with pytest.raises(ConfigurationError, match=rf"layer 2 .* {words}, .* the last 6 are"):
            run.step([Entry(tokens, 0, 7, tables)])
    layer.sliding_window = 5  # less than is kept: it is honoured
    run.step([Entry(tokens, 0, 7, tables)])


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_shared_prefix_and_a_full_hit_need_no_second_computation(family):
    model = random_model(family, **FAMILIES[family])
    first = sequences()[1][:24]
    second = [*first[:16], 5, 6, 7, 8, 9]
    expected_second, expected_first = plain_logits(model, second), plain_logits(model, first)
    run = PagedRun(model)
    tables = run.tables(len(first))
    run.step([Entry(first, 0, len(first), tables)])
    before = [t.clone() for t in (*run.pool.keys, *run.pool.values)]

    (again,), _ = run.step([Entry(first, len(first) - 1, len(first), tables, writes=False)])
    torch.testing.assert_close(again, expected_first[-1:], atol=TOLERANCE, rtol=TOLERANCE)
    for tensor, was in zip((*run.pool.keys, *run.pool.values), before, strict=True):
        assert torch.equal(tensor[:-1], was[:-1]), "a full hit wrote outside of the null block"

    shared = run.tables(len(second), shared=[table[:4] for table in tables])
    (rest,), _ = run.step([Entry(second, 16, len(second), shared)])
    torch.testing.assert_close(rest, expected_second[16:], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_sequence_reads_blocks_that_another_one_computes_in_the_same_step():
    model = random_model("llama")
    tokens = sequences()[1][:20]
    expected = plain_logits(model, tokens)
    run = PagedRun(model)
    tables = run.tables(len(tokens))
    reader = Entry(tokens, 19, 20, tables, writes=False)  # planned first, on purpose
    (got, _), _ = run.step([reader, Entry(tokens, 0, 20, tables)])
    torch.testing.assert_close(got, expected[19:], atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("kernels", [BY_TORCH, KernelSettings()], ids=["torch", "default"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_without_samples_returns_no_rows(family, kernels):
    run = PagedRun(random_model(family, **FAMILIES[family]), kernels=kernels)
    tokens = sequences()[0]
    _, sampling = run.step([Entry(tokens, 0, 7, run.tables(len(tokens)))])
    assert sampling.shape == (0, 97)


def test_a_model_without_the_attention_interface_is_refused():
    model = random_model("llama")
    model._supports_attention_backend = False
    with pytest.raises(ConfigurationError, match="AttentionInterface"):
        PagedRun(run_by_transformers(model))


def test_layers_that_keep_their_state_elsewhere_are_noticed():
    model = random_model("llama")
    run = PagedRun(run_by_transformers(model))
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    with pytest.raises(ConfigurationError, match="2 of 3 layers"):
        run.step([Entry([3, 4], 0, 2, run.tables(2))])


def test_a_switched_model_refuses_plain_calls():
    model = random_model("llama")
    PagedRun(run_by_transformers(model))
    with pytest.raises(ConfigurationError, match="paged=PagedContext"):
        model(torch.tensor([[1, 2, 3]]))


@pytest.mark.parametrize("with_graphs", [False, True])
def test_after_a_step_that_sampled_nothing_no_token_is_pending(with_graphs):
    """With two steps open the tokens of the first are fed to the second; there may be none."""
    extras = {"backend": StaticBackend, "record": record_eagerly} if with_graphs else {}
    run = PagedRun(random_model("llama"), **extras)
    tokens = sequences()[0]
    tables = run.tables(len(tokens))
    ((rows,), _) = run.step([Entry(tokens, 0, len(tokens), tables)])
    for start, end in ((0, 7), (7, len(tokens))):
        plan = HandMadePlan(
            [Entry(tokens, start, end, tables)], run.runner.buffers.arrays, run.block_size
        )
        logits = run.runner.prepare(plan)(torch.empty(0, dtype=torch.int64))
    last = tensor_of(logits.sampling)[0]
    torch.testing.assert_close(last, rows[-1], atol=TOLERANCE, rtol=TOLERANCE)


def test_kernels_of_a_second_device_are_launched_there(monkeypatch):
    """Triton, events and graphs go to the current device, not to that of their tensors."""
    entered = []
    monkeypatch.setattr(model_runner, "on_device", lambda device: entered.append(device) or OPEN)
    run = PagedRun(random_model("llama"), backend=StaticBackend, record=record_eagerly)
    assert entered == [run.pool.device]  # the capture
    run.runner._is_on_cuda = True
    run.step([Entry([3, 4], 0, 2, run.tables(2))])
    assert entered == [run.pool.device] * 2
