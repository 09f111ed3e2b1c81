"""Layers that leave norm and rotary embedding to attention compute what they did before."""

import logging

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from pyengine.models.cpu_kernels import fuse_norms
from pyengine.models.rotary import OwnRotation, take_over_rotations
from tests.support.graphs import record_eagerly
from tests.support.static_attention import StaticBackend
from tests.unit.executor.hand_made import Entry, PagedRun, random_model

WINDOW = {"sliding_window": 6}
SERVED = {
    "llama": (6, "halves", 1, None),
    "qwen2": (6, "halves", 1, None),
    "qwen3": (6, "halves", 1, 0.0),
    "mistral": (6, "halves", 1, None),
    "gemma2": (6, "halves", 1, None),
    "gemma3_text": (6, "halves", 1, 1.0),
    "gpt_oss": (6, "halves", 1, None),
    "cohere": (6, "pairs", 2, None),
    "glm4": (8, "pairs", 1, None),
    "granite": (6, "halves", 1, None),
}
SETTINGS = {
    "gpt_oss": {"num_local_experts": 4, "sliding_window": 6},
    "gemma2": WINDOW,
    "gemma3_text": WINDOW,
    "glm4": {"head_dim": 16},
}
CHUNKS = ((0, 11, 0, 5), (11, 17, 5, 6), (17, 18, 6, 7), (18, 19, 7, 8))


def logits(run: PagedRun) -> torch.Tensor:
    """Of prefills in chunks and decodes of two sequences, all rows."""
    sequences = [
        [(5 * at * at + 3) % 97 for at in range(19)],
        [(3 * at + 1) % 97 for at in range(8)],
    ]
    tables = [run.tables(len(sequence)) for sequence in sequences]
    found = []
    for first, end, other_first, other_end in CHUNKS:
        entries = [
            Entry(sequences[0][:end], first, end, tables[0]),
            Entry(sequences[1][:other_end], other_first, other_end, tables[1]),
        ]
        logits, sampling = run.step(entries)
        found += [*logits, sampling, run.step(entries, all_rows=False)[1].clone()]
    return torch.cat(found)


def layers_of(model) -> list[OwnRotation]:
    return [module for module in model.modules() if isinstance(module, OwnRotation)]


def random_norms(model) -> None:
    for name, parameter in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            torch.nn.init.normal_(parameter)


@pytest.mark.parametrize("family", SERVED)
@pytest.mark.parametrize("backend", [None, StaticBackend])
def test_a_model_gives_the_logits_that_it_gave(family, backend):
    settings = {"head_dim": 6, **SETTINGS.get(family, {})}
    if family == "cohere":
        settings["hidden_size"] = 24  # its heads have the size that follows
    model = random_model(family, **settings)
    random_norms(model)
    expected = logits(PagedRun(model, backend=backend))
    assert take_over_rotations(model) == model.config.num_hidden_layers
    size, order, step, offset = SERVED[family]
    for layer in layers_of(model):
        layout = layer.layout
        assert (layout.size, layout.order, layout.step, layer._offset) == (
            size,
            order,
            step,
            offset,
        )
    recorder = record_eagerly if backend else None
    found = logits(PagedRun(model, backend=backend, record=recorder))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
    assert take_over_rotations(model) == model.config.num_hidden_layers  # and nothing twice


def test_a_compiled_graph_hands_the_rotation_over():
    model = random_model("qwen3", head_dim=6, num_hidden_layers=1)
    random_norms(model)
    expected = logits(PagedRun(model))
    take_over_rotations(model)
    run = PagedRun(model)
    run.runner.compile("aot_eager")
    torch.testing.assert_close(logits(run), expected, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", ["smollm3", "cohere2", "olmo2", "phi3"])
def test_a_layer_that_does_something_else_stays_as_it_is(family, caplog):
    caplog.set_level(logging.INFO)
    model = random_model(family, num_hidden_layers=4)
    expected = logits(PagedRun(model))
    taken = take_over_rotations(model)
    assert taken == {"smollm3": 3, "cohere2": 3, "olmo2": 0, "phi3": 0}[family]
    assert len(layers_of(model)) == taken
    torch.testing.assert_close(logits(PagedRun(model)), expected, atol=2e-4, rtol=2e-4)
    assert len(caplog.records) == (family != "phi3")


def test_a_model_that_cannot_be_tried_stays_as_it_is(caplog):
    caplog.set_level(logging.INFO)
    with torch.device("meta"):
        config = AutoConfig.for_model(
            "llama",
            hidden_size=16,
            num_attention_heads=2,
            vocab_size=32,
            num_hidden_layers=1,
            intermediate_size=16,
        )
        model = AutoModelForCausalLM.from_config(config)
    assert take_over_rotations(model) == 0
    assert "was not tried" in caplog.text


@pytest.mark.parametrize("what", ["scaled by position", "clipped", "gated"])
def test_a_layer_with_a_difference_that_no_name_tells_is_found_out(what, monkeypatch):
    model = random_model("llama", head_dim=16)
    own = type(model.model.layers[0].self_attn)
    forward, module = own.forward, __import__(own.__module__, fromlist=["x"])
    if what == "scaled by position":  # late positions alone
        turn = module.apply_rotary_pos_emb

        def scaled(q, k, cos, sin):
            late = torch.where(torch.arange(cos.shape[1]) > 3, 1.5, 1.0)[None, None, :, None]
            q, k = turn(q, k, cos, sin)
            return q * late, k

        monkeypatch.setattr(module, "apply_rotary_pos_emb", scaled)
    elif what == "clipped":
        monkeypatch.setattr(
            own.__mro__[0],
            "forward",
            lambda self, *a, **k: (forward(self, *a, **k)[0].clamp(-0.01, 0.01), None),
        )
    else:
        monkeypatch.setattr(
            own,
            "forward",
            lambda self, hidden_states, **k: (
                forward(self, hidden_states=hidden_states, **k)[0] * hidden_states.sigmoid(),
                None,
            ),
        )
    PagedRun(model)  # which makes attention ours
    assert take_over_rotations(model) == 0


@pytest.mark.parametrize("backend", [None, StaticBackend])
@pytest.mark.parametrize("there", [True, False])
def test_a_runner_takes_over_where_there_is_a_kernel(there, backend, monkeypatch):
    run = PagedRun(random_model("llama", head_dim=6), backend=backend)  # None: the cpu backend
    monkeypatch.setattr("pyengine.executor.model_runner.has_kernels", lambda _: there)
    run.runner.take_over_rotations()
    assert len(layers_of(run.runner._model)) == (3 if there or backend is None else 0)


def test_norms_of_heads_that_are_one_pass_already_are_taken_over():
    model = random_model("qwen3", head_dim=6)
    random_norms(model)
    expected = logits(PagedRun(model))
    assert fuse_norms(model)
    assert take_over_rotations(model) == 3
    assert all(layer._offset == 0.0 for layer in layers_of(model))
    torch.testing.assert_close(logits(PagedRun(model)), expected, atol=2e-4, rtol=2e-4)
