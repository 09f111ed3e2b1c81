"""A compiled forward gives the logits of the plain one, by one graph for all batches."""

import gc
import weakref
from random import Random
from shutil import which

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from pyengine.attention.flex import FlexBackend
from pyengine.errors import ConfigurationError
from pyengine.executor import compiled
from pyengine.executor.compiled import CompiledForward
from pyengine.models.fallback import FallbackModel, attending_layers
from pyengine.utils.tensors import tensor_of
from tests.support.models import as_fallback
from tests.support.soak import soak_only
from tests.unit.executor.hand_made import Entry, HandMadePlan, PagedRun, random_model

NEAR = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(autouse=True)
def forget_graphs():
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def decode(run: PagedRun, lengths: list[int]) -> torch.Tensor:
    """Prefill all but the last token of each sequence, then decode it: the logits `[B, vocab]`."""
    random = Random(0)
    sequences = [[random.randrange(3, 97) for _ in range(length)] for length in lengths]
    tables = [run.tables(length) for length in lengths]
    logits = torch.empty(0)
    for is_decode in (False, True):
        entries = [
            Entry(tokens, length - 1 if is_decode else 0, length - 1 + is_decode, table)
            for tokens, table, length in zip(sequences, tables, lengths, strict=True)
        ]
        plan = HandMadePlan(entries, run.runner.buffers.arrays, run.block_size)
        logits = run.runner.prepare(plan)(None).sampling
    return tensor_of(logits).clone()


def prefill(run: PagedRun, lengths: list[tuple[int, bool]]) -> list[torch.Tensor]:
    """Prefill at once; `True`: to the end, which gives logits. Beside, the logits of row 0."""
    random = Random(1)
    entries = []
    for length, is_whole in lengths:
        tokens = [random.randrange(3, 97) for _ in range(length + (not is_whole))]
        entries.append(Entry(tokens, 0, length, run.tables(length)))
    found = []
    for extra in (None, np.array([0])):
        plan = HandMadePlan(entries, run.runner.buffers.arrays, run.block_size)
        logits = run.runner.prepare(plan, extra_rows=extra)(None)
        found += [tensor_of(logits.sampling).clone(), tensor_of(logits.extra).clone()]
    return found


PREFILLS = (
    [(9, True), (14, True)],
    [(5, True)],
    [(5, False)],
    [(1, True)],
    [(1, False)],
    [(3, True), (20, False), (1, True)],
)
BATCHES = ([9, 14], [5], [3, 20, 8, 11, 7], [17, 2, 6])


@pytest.mark.parametrize("family", ["llama", "gpt_oss", *soak_only(["gemma2"])])
def test_one_graph_serves_every_batch_and_one_a_single_token(family):
    settings = {"gemma2": {"sliding_window": 6}, "gpt_oss": {"num_local_experts": 4}}
    model = random_model(family, head_dim=16, num_hidden_layers=2, **settings.get(family, {}))
    plain = PagedRun(model, num_blocks=90)
    expected = [decode(plain, lengths) for lengths in BATCHES]
    run = PagedRun(model, num_blocks=90)
    run.runner.compile("aot_eager")
    assert counters["stats"]["unique_graphs"] == 2
    for lengths, logits in zip(BATCHES, expected, strict=True):
        torch.testing.assert_close(decode(run, lengths), logits, **NEAR)
    assert counters["stats"]["unique_graphs"] == 2


@pytest.mark.parametrize("family", ["gemma2", *soak_only(["llama"])])
def test_prefills_go_by_the_same_graphs(family, monkeypatch):
    model = random_model(family, num_hidden_layers=2)
    plain = PagedRun(model, num_blocks=90)
    expected = [prefill(plain, lengths) for lengths in PREFILLS]
    run = PagedRun(model, num_blocks=90)
    run.runner.compile("aot_eager")
    monkeypatch.setattr(run.runner, "_model", None)  # nothing goes by the plain one
    for lengths, logits in zip(PREFILLS, expected, strict=True):
        for found, right in zip(prefill(run, lengths), logits, strict=True):
            torch.testing.assert_close(found, right, **NEAR)
    assert counters["stats"]["unique_graphs"] == 2


def test_what_turns_positions_is_computed_once_a_step_and_not_in_each_layer():
    kept = []

    def record(graph, _inputs):
        kept.append(sum(node.target is torch.ops.pyengine.kept for node in graph.graph.nodes))
        return graph

    run = PagedRun(random_model("llama", num_hidden_layers=3))
    run.runner.compile(record)
    assert kept == [2, 2]  # cosines and sines, in each of the two graphs


def test_a_step_checks_its_inputs_and_not_each_layer(monkeypatch):
    kept, asked = [], []
    chosen = compiled._of_inputs

    def record(guards):
        found = chosen(guards)
        kept.append(sum(found))
        asked.append(len(found))
        return found

    monkeypatch.setattr(compiled, "_of_inputs", record)
    for layers in (1, 3):
        PagedRun(random_model("llama", num_hidden_layers=layers)).runner.compile("aot_eager")
    assert asked[0] < asked[2]
    assert kept[0] == kept[2] > 0
    assert kept[1] == kept[3] > 0


def test_two_models_of_a_process_keep_their_own_graphs():
    models = [random_model("llama", num_hidden_layers=1) for _ in range(2)]
    torch.nn.init.normal_(models[1].lm_head.weight)
    expected = [decode(PagedRun(model), BATCHES[0]) for model in models]
    runs = [PagedRun(model) for model in models]
    for run in runs:
        run.runner.compile("aot_eager")
    for run, logits in zip(runs, expected, strict=True):
        torch.testing.assert_close(decode(run, BATCHES[0]), logits, **NEAR)
    assert not torch.allclose(*expected, atol=1e-2)


def test_a_process_compiles_any_number_of_models():
    """torch limits the graphs of a code object; each model has a code object of its own."""
    models = [random_model("llama", num_hidden_layers=1) for _ in range(7)]
    runs = []
    for number, model in enumerate(models):
        torch.manual_seed(number)
        torch.nn.init.normal_(model.lm_head.weight)
        runs.append(PagedRun(model))
        runs[-1].runner.compile("eager")
    assert counters["stats"]["unique_graphs"] == 2 * len(runs)
    for model, run in zip(models, runs, strict=True):
        expected = decode(PagedRun(model), BATCHES[0])
        torch.testing.assert_close(decode(run, BATCHES[0]), expected, **NEAR)
    assert counters["stats"]["unique_graphs"] == 2 * len(runs)


def test_the_graphs_of_a_deleted_model_are_deleted():
    graphs = []

    def record(graph, _inputs):
        graphs.append(weakref.ref(graph))
        return graph

    for _ in range(2):
        PagedRun(random_model("llama", num_hidden_layers=1)).runner.compile(record)
    gc.collect()
    assert [graph() for graph in graphs] == [None] * 4


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_real_compiler_gives_the_same_logits(capsys):
    model = random_model("llama", num_hidden_layers=1)
    expected = decode(PagedRun(model), BATCHES[0])
    run = PagedRun(model)
    run.runner.compile()
    said = capsys.readouterr().err
    assert "compiling llama" in said
    assert "is compiled (" in said
    torch.testing.assert_close(decode(run, BATCHES[0]), expected, **NEAR)


@pytest.mark.soak
@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
def test_the_real_compiler_reads_what_attention_gives_head_by_head(monkeypatch):
    """Of this family and backend: heads come first in memory, not as the graph expects."""
    library = pytest.importorskip("torch.nn.attention.flex_attention")
    monkeypatch.setattr(library, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    sizes = {
        "num_hidden_layers": 1,
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": None,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
    }
    model = random_model("deepseek_v3", **sizes)
    expected = decode(PagedRun(model, backend=FlexBackend), BATCHES[0])
    run = PagedRun(model, backend=FlexBackend)
    run.runner.compile()
    torch.testing.assert_close(decode(run, BATCHES[0]), expected, **NEAR)


def test_a_module_of_transformers_is_compiled_if_its_layers_attend():
    module = random_model("llama", num_hidden_layers=2)
    model = as_fallback(module)
    CompiledForward(model, 2, "aot_eager")
    assert counters["stats"]["unique_graphs"] == 2
    three = attending_layers(random_model("llama", num_hidden_layers=3))
    with pytest.raises(ConfigurationError, match="attended in 2 of 3 layers"):
        CompiledForward(FallbackModel(module, three, "a test"), 3, "aot_eager")


@pytest.mark.parametrize("compiler", [None, "/usr/bin/g++"])
def test_a_model_that_cannot_be_compiled_is_refused_with_the_reason(monkeypatch, compiler):
    def broken(_graph, _inputs):
        raise RuntimeError("no such instruction\nand more")

    monkeypatch.setattr(compiled.shutil, "which", lambda _name: compiler)
    run = PagedRun(random_model("llama", num_hidden_layers=1))
    words = "install g\\+\\+" if compiler is None else "no such instruction"
    with pytest.raises(ConfigurationError, match=f"compile llama here.*{words}.*set compile=False"):
        run.runner.compile(broken)
