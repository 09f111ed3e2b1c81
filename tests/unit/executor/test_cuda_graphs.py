"""Graphs' bookkeeping with a capture that is none: sizes, padding, inputs that never move."""

import logging
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
import torch

from pyengine.attention.backend import StepInputs
from pyengine.attention.cascade import Cascade
from pyengine.attention.gather import GatherBackend
from pyengine.attention.paged import PageTable
from pyengine.errors import ConfigurationError
from pyengine.executor import input_buffers as buffers
from pyengine.executor.cuda_graphs import graph_sizes
from pyengine.executor.input_buffers import Padding
from pyengine.kv_cache.pool import KVPool
from tests.support.graphs import record_eagerly
from tests.support.static_attention import StaticBackend, StaticMetadata
from tests.unit.executor.hand_made import Entry, PagedRun, random_model
from tests.unit.executor.test_model_runner import FAMILIES


class StubRecorder:
    """Counts; replays by running again, into the tensor that the first run gave."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.recorded: list[int] = []
        self.replays = 0
        self._fails_at = fails_at

    def __call__(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        result = compute()
        if len(result) == self._fails_at:
            raise RuntimeError("operation not permitted when stream is capturing")
        self.recorded.append(len(result))

        def replay() -> torch.Tensor:
            self.replays += 1
            return result.copy_(compute())

        return replay


@pytest.mark.parametrize(
    ("most", "sizes"),
    [
        (1, [1]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
        (600, [1, 2, 4, *range(8, 257, 8), *range(288, 513, 32)]),
    ],
)
def test_sizes(most: int, sizes: list[int]) -> None:
    assert graph_sizes(most) == sizes


def decode(run: PagedRun, lengths: list[int], random: Random) -> tuple[list[Entry], list[int]]:
    """Prefill sequences, then return the entries of their next token."""
    entries = []
    for length in lengths:
        tokens = [random.randrange(3, 97) for _ in range(length + 1)]
        tables = run.tables(len(tokens))
        run.step([Entry(tokens, 0, length, tables)])
        entries.append(Entry(tokens, length, length + 1, tables))
    return entries, lengths


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma2", "qwen2"])
@pytest.mark.parametrize("grouped", [False, True])
def test_replayed_steps_give_what_eager_ones_give(family: str, grouped: bool) -> None:
    model = random_model(family, **FAMILIES[family])
    recorder = StubRecorder()
    run = PagedRun(model, num_blocks=120, grouped=grouped, backend=StaticBackend, record=recorder)
    assert recorder.recorded == [8, 4, 2, 1]  # the largest first
    assert run.runner.graphs.sizes == [1, 2, 4, 8]
    random = Random(1)
    for count in (3, 1, 5, 8, 2):
        before = recorder.replays
        entries, _ = decode(run, [random.randrange(1, 9) for _ in range(count)], random)
        _, replayed = run.step(entries, all_rows=False)
        assert recorder.replays == before + 1
        replayed = replayed.clone()
        logits, _ = run.step(entries)  # the same tokens again, with all rows wanted: not a graph
        assert recorder.replays == before + 1
        torch.testing.assert_close(replayed, torch.cat(logits), atol=1e-4, rtol=1e-4)
        for entry in entries:
            for table in entry.tables:
                run.free += [block for block in table if block != run.pool.num_blocks]


@pytest.mark.parametrize("grouped", [False, True])
def test_a_graph_takes_tables_as_wide_as_the_longest_of_the_step(
    grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest of the graph's tables is of an earlier, longer step."""
    monkeypatch.setattr(buffers, "_WIDTHS", 1)
    model = random_model("gpt_oss", **FAMILIES["gpt_oss"])
    run = PagedRun(
        model, num_blocks=120, grouped=grouped, backend=StaticBackend, record=StubRecorder()
    )
    backend = run.runner._backend
    assert isinstance(backend, StaticBackend)
    random, widths = Random(3), []
    for lengths in ([39, 30, 21], [3, 2, 1], [9, 1, 6]):
        entries, _ = decode(run, lengths, random)
        _, replayed = run.step(entries, all_rows=False)
        replayed = replayed.clone()
        logits, _ = run.step(entries)
        torch.testing.assert_close(replayed, torch.cat(logits), atol=1e-4, rtol=1e-4)
        (of_four,) = [graph for graph in backend.graphs if len(graph._inputs.seq_lens) == 4]
        inputs = of_four.refreshed[-1]
        widths.append((inputs.host_block_tables.shape[2], inputs.block_tables.shape[2]))
        for entry in entries:
            for table in entry.tables:
                run.free += [block for block in table if block != run.pool.num_blocks]
    assert widths == [(10, 16), (1, 16), (3, 16)]


def test_a_padded_batch_gives_the_bits_of_the_same_launches_without_a_capture() -> None:
    results = []
    for recorder in (StubRecorder(), record_eagerly):
        model = random_model("llama")
        run = PagedRun(model, backend=StaticBackend, record=recorder)
        entries, _ = decode(run, [5, 3, 7], Random(2))
        results.append(run.step(entries, all_rows=False)[1].clone())
    assert torch.equal(*results)


def test_padding_reads_the_null_block_and_writes_nowhere() -> None:
    run = PagedRun(random_model("llama"), backend=StaticBackend, record=StubRecorder())
    entries, _ = decode(run, [5, 3, 7], Random(2))
    run.step(entries, all_rows=False)
    backend = run.runner._backend
    assert isinstance(backend, StaticBackend)
    (of_four,) = [graph for graph in backend.graphs if len(graph._inputs.seq_lens) == 4]
    (inputs,) = of_four.refreshed
    assert inputs.seq_lens.tolist() == [6, 4, 8, 1]
    assert inputs.slot_mapping[0, 3] == -1
    assert inputs.block_tables[0, 3, 0] == run.pool.num_blocks
    assert inputs.host_block_tables[0, 3, 0] == run.pool.num_blocks
    assert inputs.query_start_loc.tolist() == [0, 1, 2, 3, 4]
    assert inputs.logits_indices.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(("fails_at", "left"), [(2, [4, 8]), (8, [])])
def test_a_capture_that_fails_is_the_last(
    caplog: pytest.LogCaptureFixture, fails_at: int, left: list[int]
) -> None:
    recorder = StubRecorder(fails_at)
    with caplog.at_level(logging.WARNING):
        run = PagedRun(random_model("llama"), backend=StaticBackend, record=recorder)
    assert run.runner.graphs.sizes == left
    missing = [size for size in (1, 2, 4, 8) if size not in left]
    said = f"no CUDA graphs for batches of {missing}, RuntimeError: operation not permitted"
    assert said in caplog.text
    assert recorder.recorded == left[::-1]
    for lengths in ([5, 3], [2, 3, 4, 5, 6]):  # the next larger graph, or none
        entries, _ = decode(run, lengths, Random(2))
        logits, _ = run.step(entries)
        before = recorder.replays
        torch.testing.assert_close(run.step(entries, all_rows=False)[1], torch.cat(logits))
        assert recorder.replays - before == (len(lengths) <= max(left, default=0))


def test_all_graphs_give_their_logits_in_the_same_memory() -> None:
    """Else each size keeps its own: 78 MB at 256 rows of 151,936 tokens in bfloat16."""
    run = PagedRun(random_model("llama"), backend=StaticBackend, record=StubRecorder())
    addresses = set()
    for lengths in ([5], [4, 3, 7], [1, 2, 3, 4, 5]):
        entries, _ = decode(run, lengths, Random(2))
        _, logits = run.step(entries, all_rows=False)
        assert len(logits) == len(lengths)
        addresses.add(logits.data_ptr())
    assert len(addresses) == 1


def test_no_graph_is_larger_than_a_step_may_be() -> None:
    run = PagedRun(
        random_model("llama"), backend=StaticBackend, record=StubRecorder(), max_tokens=5
    )
    assert run.runner.graphs.sizes == [1, 2, 4, 5]


def test_a_backend_that_reads_the_host_has_no_metadata_for_graphs() -> None:
    run = PagedRun(random_model("llama"), backend=GatherBackend)
    assert not run.runner._backend.supports_graphs
    with pytest.raises(ConfigurationError, match=r"cannot be captured .* enforce_eager=True"):
        run.runner._backend.graph_metadata(run.runner.buffers.fixed_inputs(Padding(1, 0)))


_NONE = np.zeros(0, np.int32)
CASCADE = Cascade(
    group=0,
    rows=np.zeros(0, np.int64),
    starts=_NONE,
    lengths=_NONE,
    pages=PageTable(_NONE, _NONE, _NONE),
    own_blocks=_NONE,
    saved_tokens=0,
)


class SharingBackend(StaticBackend):
    """The static backend, with other metadata for steps that share blocks; it reads as much."""

    shared_group = 0
    is_worth_it = False

    def __init__(self, pool: KVPool) -> None:
        super().__init__(pool)
        self.sharing: list[StaticMetadata] = []
        self.cascades: list[Cascade | None] = []

    def cascade(self, inputs: StepInputs) -> Cascade | None:
        assert inputs.shared is not None
        self.cascades.append(CASCADE if self.is_worth_it else None)
        return self.cascades[-1]

    def sharing_graph_metadata(self, inputs: StepInputs) -> StaticMetadata | None:
        if len(inputs.seq_lens) == 1:
            return None
        self.sharing.append(StaticMetadata(self.pool, inputs))
        return self.sharing[-1]


def sharing_run(recorder: StubRecorder) -> tuple[PagedRun, SharingBackend]:
    run = PagedRun(random_model("llama"), backend=SharingBackend, record=recorder)
    backend = run.runner._backend
    assert isinstance(backend, SharingBackend)
    return run, backend


@pytest.mark.parametrize("is_worth_it", [False, True])
def test_a_size_has_a_second_graph_for_steps_that_share_blocks(is_worth_it: bool) -> None:
    recorder = StubRecorder()
    run, backend = sharing_run(recorder)
    assert recorder.recorded == [8, 4, 2, 1, 8, 4, 2]
    assert run.runner.graphs.sharing_sizes == [2, 4, 8]
    backend.is_worth_it = is_worth_it
    entries, _ = decode(run, [5, 3, 7], Random(2))
    replayed = run.step(entries, all_rows=False)[1].clone()
    (used,) = [graph for graph in backend.sharing + backend.graphs if graph.refreshed]
    assert used in (backend.sharing if is_worth_it else backend.graphs)
    assert backend.cascades == [CASCADE if is_worth_it else None], "computed once a step"
    assert used.refreshed[0].cascade is backend.cascades[0]
    torch.testing.assert_close(replayed, torch.cat(run.step(entries)[0]), atol=1e-4, rtol=1e-4)
    entries, _ = decode(run, [5], Random(2))
    run.step(entries, all_rows=False)
    assert [len(graph.refreshed) for graph in backend.graphs] == [0, not is_worth_it, 0, 1]


def test_a_second_graph_that_fails_leaves_the_first(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(StubRecorder):
        def __call__(self, compute: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
            if len(self.recorded) == 5:
                raise RuntimeError("out of memory")
            return super().__call__(compute)

    run, backend = sharing_run(Failing())
    backend.is_worth_it = True
    assert "no CUDA graphs with shared blocks for batches of [1, 2, 4], RuntimeError" in caplog.text
    assert run.runner.graphs.sizes == [1, 2, 4, 8]
    assert run.runner.graphs.sharing_sizes == [8]
    entries, _ = decode(run, [5, 3, 7], Random(2))
    run.step(entries, all_rows=False)
    assert [len(graph.refreshed) for graph in backend.graphs] == [0, 1, 0, 0]


@pytest.mark.parametrize("fails_at", [8, 2])
def test_no_second_graph_follows_a_capture_that_fails(fails_at: int) -> None:
    run, backend = sharing_run(StubRecorder(fails_at))
    assert not run.runner.graphs.sharing_sizes
    assert not backend.sharing
