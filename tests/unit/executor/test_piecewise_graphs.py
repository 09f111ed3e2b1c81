"""Steps that are replayed in pieces give the logits of a plain forward pass."""

import gc
import logging
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from shutil import which
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pyengine.executor import cuda_graphs
from pyengine.executor.cuda_graphs import CudaGraphRecorder, unowned
from pyengine.executor.piecewise_graphs import piecewise_sizes
from pyengine.utils.tensors import tensor_of
from tests.support.graphs import EagerRecorder, TapeRecorder
from tests.support.static_attention import StaticBackend
from tests.unit.executor.hand_made import Entry, HandMadePlan, PagedRun, random_model
from tests.unit.executor.test_cuda_graphs import StubRecorder
from tests.unit.executor.test_model_runner import (
    FAMILIES,
    SLIDING,
    plain_logits,
    run_in_chunks,
    sequences,
)

NEAR = {"atol": 1e-4, "rtol": 1e-4}
WITH_ALL_ROWS = 8
"""Rows of logits per sequence: steps with all rows fit."""


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (8, [8]),
        (16, [16]),
        (100, [16, 32, 64, 96, 100]),
        (8192, [16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512]),
    ],
)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert piecewise_sizes(most) == sizes


def captured(run: PagedRun, recorder: Any = None) -> TapeRecorder:
    """Capture steps in pieces, of all sizes."""
    recorder = recorder or TapeRecorder()
    run.runner.capture_piecewise(recorder.pieces)
    return recorder


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_beside_decodes_give_the_logits_of_a_plain_forward(family: str) -> None:
    model = random_model(family, **FAMILIES[family])
    prompts = sequences()
    expected = [plain_logits(model, tokens) for tokens in prompts]
    run = PagedRun(model, rows_per_seq=WITH_ALL_ROWS)
    recorder = captured(run)
    assert run.runner.piecewise.sizes == [16, 32, 64]
    assert recorder.num_pieces == [1 + run.pool.num_layers] * 3
    run_in_chunks(run, prompts, expected)
    assert recorder.replays > 5


@pytest.mark.parametrize("family", SLIDING)
def test_groups_of_layers_give_the_same_logits(family: str) -> None:
    """Blocks that left a window are poisoned."""
    model = random_model(family, **FAMILIES[family])
    prompts = sequences()
    expected = [plain_logits(model, tokens) for tokens in prompts]
    run = PagedRun(model, num_blocks=80, grouped=True, rows_per_seq=WITH_ALL_ROWS)
    recorder = captured(run)
    assert run_in_chunks(run, prompts, expected) > 0
    assert recorder.replays > 5


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_attention_gets_the_angles_of_the_step(family: str) -> None:
    """Where layers leave the norm of heads and the rotation to the KV write."""
    model = random_model(family, **FAMILIES[family])
    prompts = sequences()
    expected = [plain_logits(model, tokens) for tokens in prompts]
    run = PagedRun(model, rows_per_seq=WITH_ALL_ROWS)
    recorder = captured(run)
    run_in_chunks(run, prompts, expected)
    assert recorder.replays > 5


@pytest.fixture
def no_graphs_of_others() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("no_graphs_of_others")
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_a_compiled_forward_pass_is_captured_as_well(family: str) -> None:
    """The operators that a compiler leaves are replayed."""
    model = random_model(family, **FAMILIES[family])
    prompts = sequences()
    expected = [plain_logits(model, tokens) for tokens in prompts]
    run = PagedRun(model, grouped=True, num_blocks=80, rows_per_seq=WITH_ALL_ROWS)
    run.runner.compile("aot_eager")
    recorder = captured(run)
    assert recorder.num_pieces == [1 + run.pool.num_layers] * 3
    run_in_chunks(run, prompts, expected)
    assert recorder.replays > 5


@pytest.mark.slow
@pytest.mark.usefixtures("no_graphs_of_others")
@pytest.mark.skipif(which("g++") is None, reason="inductor needs a C++ compiler")
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_real_compiler_gives_the_same_logits(family: str) -> None:
    model = random_model(family, **FAMILIES[family])
    prompts = sequences()
    expected = [plain_logits(model, tokens) for tokens in prompts]
    run = PagedRun(model, rows_per_seq=WITH_ALL_ROWS)
    run.runner.compile()
    captured(run, EagerRecorder())
    run_in_chunks(run, prompts, expected)


def prefill(run: PagedRun, length: int) -> torch.Tensor:
    """The logits of all rows of a new sequence's first step, which samples nothing."""
    tokens = [Random(length).randrange(3, 97) for _ in range(length + 1)]
    tables = run.tables(length + 1)
    plan = HandMadePlan(
        [Entry(tokens, 0, length, tables)], run.runner.buffers.arrays, run.block_size
    )
    rows = np.arange(length, dtype=np.int64)
    logits = tensor_of(run.runner.prepare(plan, extra_rows=rows)(None).extra).clone()
    for table in tables:
        run.free += table
    return logits


def test_a_step_runs_in_the_next_larger_size_and_a_larger_one_without() -> None:
    run = PagedRun(random_model("llama"), rows_per_seq=WITH_ALL_ROWS)
    plain = PagedRun(random_model("llama"))
    recorder = TapeRecorder()
    run.runner.capture_piecewise(recorder.pieces, [16, 40])
    for length, replays in ((1, 1), (16, 2), (17, 3), (40, 4), (41, 4), (60, 4), (3, 5)):
        torch.testing.assert_close(prefill(run, length), prefill(plain, length), **NEAR)
        assert recorder.replays == replays


def test_more_rows_of_logits_than_a_pass_has_run_without() -> None:
    run = PagedRun(random_model("llama"))
    recorder = captured(run)
    prefill(run, 8)
    assert recorder.replays == 1
    prefill(run, 9)
    assert recorder.replays == 1


def test_decodes_are_replayed_whole_and_others_in_pieces() -> None:
    run = PagedRun(random_model("llama"), backend=StaticBackend, record=StubRecorder())
    recorder = captured(run)
    tokens, tables = [3, 4, 5, 6], run.tables(4)
    run.step([Entry(tokens, 0, 3, tables)], all_rows=False)
    assert recorder.replays == 1
    run.step([Entry(tokens, 3, 4, tables)], all_rows=False)
    assert recorder.replays == 1


def test_padding_has_zeros_whatever_was_there() -> None:
    """A request whose numbers are not finite leaves them in the rows of its step."""
    run = PagedRun(random_model("llama"), rows_per_seq=WITH_ALL_ROWS)
    seen: list[torch.Tensor] = []

    class Watching(TapeRecorder):
        def pieces(self, compute: Any) -> Any:
            def watched(interrupt: Any) -> torch.Tensor:
                def watch(between: Any, sources: Any, shape: Any) -> torch.Tensor:
                    def attend(sources: Any, result: torch.Tensor) -> None:
                        result.fill_(float("inf"))
                        between(sources, result)
                        seen.append(result.clone())

                    return interrupt(attend, sources, shape)

                return compute(watch)

            return super().pieces(watched)

    captured(run, Watching())
    prefill(run, 9)
    assert len(seen) == run.pool.num_layers
    for result in seen:
        assert len(result) == 16
        assert result[:9].isfinite().all() and result[:9].any()
        assert not result[9:].any()


@pytest.mark.parametrize(("fails_at", "left"), [(0, []), (2, [32, 64])])
def test_a_capture_that_fails_is_the_last(
    fails_at: int, left: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    run = PagedRun(random_model("llama"), rows_per_seq=WITH_ALL_ROWS)
    plain = PagedRun(random_model("llama"))
    recorder = TapeRecorder(fails_at)
    with caplog.at_level(logging.WARNING):
        captured(run, recorder)
    missing = [size for size in (16, 32, 64) if size not in left]
    said = f"no piecewise CUDA graphs for steps of {missing} tokens, RuntimeError: operation not"
    assert said in caplog.text
    assert run.runner.piecewise.sizes == left
    torch.testing.assert_close(prefill(run, 9), prefill(plain, 9), **NEAR)
    assert recorder.replays == bool(left)


def test_none_follows_a_capture_of_decodes_that_failed() -> None:
    run = PagedRun(random_model("llama"), backend=StaticBackend, record=StubRecorder(2))
    assert run.runner.graphs.sizes == [4, 8]
    assert captured(run).num_pieces == []
    assert run.runner.piecewise is None


def test_attention_that_fails_leaves_the_next_step_right() -> None:
    run = PagedRun(random_model("llama"), rows_per_seq=WITH_ALL_ROWS)
    expected = prefill(run, 9)
    captured(run)
    metadata_of = run.runner._backend.metadata

    class Broken:
        def forward(self, *_: object) -> torch.Tensor:
            raise RuntimeError("no")

    run.runner._backend.metadata = lambda _inputs: Broken()  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="no"):
        prefill(run, 12)
    run.runner._backend.metadata = metadata_of  # type: ignore[method-assign]
    torch.testing.assert_close(prefill(run, 9), expected, **NEAR)
    assert run.runner.piecewise._step.metadata is None


def test_a_runner_is_freed_as_soon_as_it_is_dropped() -> None:
    """A reference cycle would wait for the collector."""
    run = PagedRun(random_model("llama"))
    captured(run)
    dropped = weakref.ref(run.runner)
    gc.collect()
    gc.disable()
    try:
        del run
        assert dropped() is None
    finally:
        gc.enable()


def test_memory_that_is_not_owned_is_the_same_memory() -> None:
    base = torch.arange(60.0).view(5, 12)
    for tensor in (base, base[1:4, 2:8], base.T, base[:, :1].expand(5, 3), base[2:3].long()):
        found = unowned(tensor)
        assert torch.equal(found, tensor)
        assert found.stride() == tensor.stride()
        assert found.data_ptr() == tensor.data_ptr()
    found = unowned(base[1:, 3:])
    base[1, 3] = -1
    assert found[0, 0] == -1
    memory = weakref.ref(base.untyped_storage())
    del base, tensor
    assert memory() is None


class Cuda:
    """Graphs whose captures and replays are listed."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.said: list[str] = []
        self.streams: list[str] = ["usual"]
        self.num_graphs = 0
        self.fails_at = fails_at

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        cuda = self

        class Graph:
            def __init__(self) -> None:
                self.number, cuda.num_graphs = cuda.num_graphs, cuda.num_graphs + 1

            def capture_begin(self, pool: object, capture_error_mode: str) -> None:
                cuda.said.append(f"begin {self.number} {pool} {capture_error_mode}")

            def capture_end(self) -> None:
                cuda.said.append(f"end {self.number}")
                if self.number == cuda.fails_at:
                    raise RuntimeError("operation failed due to a previous error during capture")

            def replay(self) -> None:
                cuda.said.append(f"replay {self.number}")

        class Context:
            """As in torch 2.11: an error leaves the stream of the capture."""

            def __init__(self, graph: Graph, pool: object, capture_error_mode: str) -> None:
                self.cuda_graph, self.settings = graph, (pool, capture_error_mode)

            def __enter__(self) -> None:
                cuda.streams[-1] = "capture"
                self.cuda_graph.capture_begin(*self.settings)

            def __exit__(self, *_: object) -> None:
                self.cuda_graph.capture_end()
                cuda.streams[-1] = "usual"

        @contextmanager
        def stream(name: str) -> Iterator[None]:
            try:
                yield
            finally:
                cuda.streams[-1] = name

        monkeypatch.setattr(
            cuda_graphs.torch,
            "cuda",
            SimpleNamespace(
                CUDAGraph=Graph,
                graph=Context,
                graph_pool_handle=lambda: "pool",
                synchronize=lambda: None,
                stream=stream,
                current_stream=lambda: self.streams[-1],
            ),
        )


class PassOfThree:
    """Two interruptions: what runs between pieces doubles the rows. It keeps all memory."""

    def __init__(self) -> None:
        self.doubled: list[int] = []
        self.memory = [torch.ones(4, 2)]

    def __call__(self, interrupt: Any) -> torch.Tensor:
        for number in range(2):

            def double(sources: Any, result: torch.Tensor, number: int = number) -> None:
                self.doubled.append(number)
                result.copy_(sources[0] + sources[1])

            self.memory.append(interrupt(double, self.memory[-1:] * 2, (4, 2)))
        return self.memory[-1]


def test_pieces_are_captured_in_one_pool_and_replayed_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda, captured_pass = Cuda(), PassOfThree()
    cuda.install(monkeypatch)
    replay = CudaGraphRecorder().pieces(captured_pass)
    parts = [(f"begin {graph} pool global", f"end {graph}") for graph in range(3)]
    assert cuda.said == [said for part in parts for said in part]
    assert captured_pass.doubled == []
    cuda.said.clear()
    assert torch.equal(replay(), torch.full((4, 2), 4.0))
    assert cuda.said == ["replay 0", "replay 1", "replay 2"]
    assert captured_pass.doubled == [0, 1]
    assert cuda.streams == ["usual"]


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_capture_that_fails_leaves_the_stream_as_it_was(
    fails_at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = Cuda(fails_at)
    cuda.install(monkeypatch)
    with pytest.raises(RuntimeError, match="during capture"):
        CudaGraphRecorder().pieces(PassOfThree())
    assert cuda.streams == ["usual"]
    cuda.fails_at = cuda.num_graphs
    with pytest.raises(RuntimeError, match="during capture"):
        CudaGraphRecorder()(lambda: torch.zeros(1))
    assert cuda.streams == ["usual"]
