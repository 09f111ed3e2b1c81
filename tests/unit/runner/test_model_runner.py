"""Every family that transformers ships should run paged with the logits of a plain forward."""

from random import Random
from typing import Any

import pytest
import torch

from pyengine.core.errors import ConfigurationError
from tests.unit.runner.hand_made import Entry, PagedRun, random_model

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
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 12,
        "qk_rope_head_dim": 8,
        "v_head_dim": 10,
        "first_k_dense_replace": 3,
    },
}
TOLERANCE = 1e-4


def sequences() -> list[list[int]]:
    rnd = Random(1)
    lengths = (19, 40, 2, 33)
    return [[rnd.randrange(3, 97) for _ in range(n)] for n in lengths]


@torch.no_grad()
def plain_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_chunked_prefill_and_decode_give_the_logits_of_a_plain_forward(family):
    model = random_model(family, **FAMILIES[family])
    prompts = sequences()
    expected = [plain_logits(model, tokens) for tokens in prompts]
    run = PagedRun(model)
    tables = [run.table(len(tokens)) for tokens in prompts]
    done = [0] * len(prompts)
    # chunks of 7 while more than 5 tokens are left, then one by one: steps mix both kinds
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
        assert next(samples, None) is None


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_a_shared_prefix_and_a_full_hit_need_no_second_computation(family):
    model = random_model(family, **FAMILIES[family])
    first = sequences()[1][:24]
    second = [*first[:16], 5, 6, 7, 8, 9]
    expected_second, expected_first = plain_logits(model, second), plain_logits(model, first)
    run = PagedRun(model)
    table = run.table(len(first))
    run.step([Entry(first, 0, len(first), table)])
    before = [t.clone() for t in (*run.pool.keys, *run.pool.values)]

    (again,), _ = run.step([Entry(first, len(first) - 1, len(first), table, writes=False)])
    torch.testing.assert_close(again, expected_first[-1:], atol=TOLERANCE, rtol=TOLERANCE)
    for tensor, was in zip((*run.pool.keys, *run.pool.values), before, strict=True):
        assert torch.equal(tensor[:-1], was[:-1]), "a full hit wrote outside of the trash block"

    shared = run.table(len(second), shared=table[:4])
    (rest,), _ = run.step([Entry(second, 16, len(second), shared)])
    torch.testing.assert_close(rest, expected_second[16:], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_sequence_reads_blocks_that_another_one_computes_in_the_same_step():
    model = random_model("llama")
    tokens = sequences()[1][:20]
    expected = plain_logits(model, tokens)
    run = PagedRun(model)
    table = run.table(len(tokens))
    reader = Entry(tokens, 19, 20, table, writes=False)  # planned first, on purpose
    (got, _), _ = run.step([reader, Entry(tokens, 0, 20, table)])
    torch.testing.assert_close(got, expected[19:], atol=TOLERANCE, rtol=TOLERANCE)


def test_a_step_without_samples_returns_no_rows():
    run = PagedRun(random_model("llama"))
    tokens = sequences()[0]
    _, sampling = run.step([Entry(tokens, 0, 7, run.table(len(tokens)))])
    assert sampling.shape == (0, 97)


def test_a_model_without_the_attention_interface_is_refused():
    model = random_model("llama")
    model._supports_attention_backend = False
    with pytest.raises(ConfigurationError, match="AttentionInterface"):
        PagedRun(model)


def test_layers_that_keep_their_state_elsewhere_are_noticed():
    model = random_model("llama")
    run = PagedRun(model)
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    with pytest.raises(ConfigurationError, match="2 of 3 layers"):
        run.step([Entry([3, 4], 0, 2, run.table(2))])


def test_a_switched_model_refuses_plain_calls():
    model = random_model("llama")
    PagedRun(model)
    with pytest.raises(ConfigurationError, match="paged=PagedContext"):
        model(torch.tensor([[1, 2, 3]]))
