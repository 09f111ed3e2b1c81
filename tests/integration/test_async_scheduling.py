"""A real model in a separate thread while the next step is planned gives the same tokens."""

from pathlib import Path
from random import Random
from shutil import which
from typing import Any

import pytest

from pyengine import LLM, BlockManager, RequestOutput, SamplingParams
from pyengine.engine.core import Engine
from pyengine.engine.model_limits import ModelLimits
from pyengine.executor.executor import Executor
from pyengine.executor.input_buffers import RunnerLimits
from pyengine.executor.kv_cache_config import cache_specs
from pyengine.executor.model_runner import ModelRunner
from pyengine.kv_cache.pool import KVPool
from pyengine.models.loader import load_model
from pyengine.request.prompts import Prompt
from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits
from tests.support.checkpoints import save_model, save_tiny
from tests.support.engines import LazyQueue, make_processor
from tests.support.processes import run_python

SIZE: dict[str, Any] = {"hidden_size": 32, "vocab_size": 97, "max_position_embeddings": 256}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, **SIZE, initializer_range=0.5)
    return folder


def asked(count: int) -> tuple[list[list[int]], list[SamplingParams]]:
    random = Random(1)
    prompts = [[random.randrange(3, 9) for _ in range(random.randint(1, 40))] for _ in range(count)]
    params = [
        SamplingParams(
            n=random.choice([1, 1, 1, 1, 1, 2]),
            temperature=random.choice([0, 1]),
            seed=random.randrange(5),
            max_tokens=random.randint(1, 24),
            stop_token_ids=random.sample(range(97), 4),
        )
        for _ in range(count)
    ]
    return prompts, params


def test_the_tokens_are_those_of_one_step_at_a_time(folder: Path) -> None:
    prompts, params = asked(200)
    outputs: list[list[RequestOutput]] = []
    for ahead in (False, True):
        llm = LLM(
            folder,
            device="cpu",
            num_blocks=48,
            block_size=4,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            async_scheduling=ahead,
        )
        assert llm.describe()["async_scheduling"] is ahead
        outputs.append(llm.generate(prompts, params, use_tqdm=False))
        usage = llm.stats().usage
        assert (usage.active, usage.pinned) == (0, 0)
        assert llm.stats().num_preemptions > 0
    for plain, overlapped in zip(*outputs, strict=True):
        assert plain.outputs == overlapped.outputs


def test_a_stream_that_is_left_early_leaves_nothing_behind(folder: Path) -> None:
    llm = LLM(folder, device="cpu", num_blocks=64, async_scheduling=True)
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=50)
    for output in llm.stream([5, 6, 7], params):
        if len(output.outputs[0].token_ids) >= 5:
            break
    assert llm.stats().usage.active == 0
    (whole,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    found = output.outputs[0].token_ids
    assert whole.outputs[0].token_ids[: len(found)] == found


def run_by_hand(
    folder: Path,
    *,
    graphs: bool,
    depth: int,
    compiler: str | None = None,
    pieces: Any = None,
) -> dict[str, RequestOutput]:
    """The engine put together as `LLM` does it, with attention that a graph can hold.

    `pieces` is a recorder of `tests.support.graphs`.
    """
    from tests.support.graphs import record_eagerly
    from tests.support.models import BY_TORCH
    from tests.support.static_attention import StaticBackend

    loaded = load_model(folder, device="cpu", kernels=BY_TORCH)
    manager = BlockManager(48, 4)
    limits = SchedulerLimits(max_num_batched_tokens=32, max_num_seqs=8)
    pool = KVPool(cache_specs(loaded, loaded.dtype), 48, 4, loaded.device)
    runner_limits = RunnerLimits(max_num_batched_tokens=32, max_num_seqs=8, max_blocks_per_seq=48)
    recorder = record_eagerly if graphs else None
    runner = ModelRunner(loaded, pool, StaticBackend(pool), runner_limits, record=recorder)
    if compiler is not None:
        runner.compile(compiler)
    runner.capture()
    assert (runner.graphs.sizes if runner.graphs else []) == runner.graph_sizes
    assert graphs == (runner.graphs is not None)
    if pieces is not None:
        runner.capture_piecewise(pieces.pieces)
        assert runner.piecewise.sizes == runner.piecewise_sizes
    model_limits = ModelLimits(
        vocab_size=97,
        eos_token_ids=frozenset({2}),
        max_model_len=48 * 4,
        limited_by="the pool",
        max_num_seqs=8,
    )
    executor = Executor(runner, LazyQueue(), depth=depth)
    engine = Engine(manager, Scheduler(manager, limits), executor)
    processor = make_processor(manager, model_limits)
    for name, (prompt, params) in enumerate(zip(*asked(60), strict=True)):
        engine.add(processor.request(str(name), Prompt(token_ids=prompt), params))
    done: dict[str, RequestOutput] = {}
    while engine.has_work:
        done.update((item.request_id, item.output()) for item in engine.step().finished)
        manager.check()
    assert manager.usage().active == 0
    assert engine.stats().num_preemptions > 0
    assert manager.stats().cached_tokens > 0
    return done


def test_graphs_and_pending_tokens_together_give_the_tokens_of_neither(folder: Path) -> None:
    plain = run_by_hand(folder, graphs=False, depth=1)
    both = run_by_hand(folder, graphs=True, depth=2)
    for name, item in plain.items():
        assert item.outputs == both[name].outputs


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
def test_steps_in_pieces_and_pending_tokens_give_the_tokens_of_neither(
    folder: Path, depth: int, graphs: bool
) -> None:
    """Without graphs of decodes, decodes are replayed in pieces, too."""
    from tests.support.graphs import TapeRecorder

    plain, recorder = run_by_hand(folder, graphs=False, depth=1), TapeRecorder()
    in_pieces = run_by_hand(folder, graphs=graphs, depth=depth, pieces=recorder)
    assert recorder.replays > 30
    for name, item in plain.items():
        assert item.outputs == in_pieces[name].outputs


FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "sliding_window": 12},
}


@pytest.mark.slow
@pytest.mark.skipif(which("g++") is None, reason="torch's compiler needs a C++ compiler")
@pytest.mark.parametrize(
    ("family", "compiler"),
    [("gpt_oss", "inductor"), ("qwen3", "aot_eager"), ("gemma3_text", "aot_eager")],
)
def test_compiled_graphs_with_pending_tokens_give_the_tokens_of_plain_steps(
    family: str, compiler: str, tmp_path: Path
) -> None:
    """The default configuration on CUDA: prompts in chunks beside decodes, cached prefixes, seeds.

    Here a graph makes its launches again, and the slow part of the compiler works for one family.
    """
    from tests.support.graphs import EagerRecorder

    size = {**SIZE, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    settings = {**FAMILIES[family], "intermediate_size": 32, "initializer_range": 0.5}
    save_model(tmp_path, family, **size, **settings)
    plain = run_by_hand(tmp_path, graphs=False, depth=1)
    default = run_by_hand(tmp_path, graphs=True, depth=2, compiler=compiler, pieces=EagerRecorder())
    tokens = {tuple(sample.token_ids) for output in plain.values() for sample in output.outputs}
    assert len(tokens) > len(plain) / 2
    for name, item in plain.items():
        assert item.outputs == default[name].outputs


def test_a_step_that_samples_nothing_is_followed_by_one_that_does(folder: Path) -> None:
    """A prompt of one token more than a step takes, alone and beside what decodes."""
    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
    prompts = [[3 + at % 7 for at in range(33)], [5, 6, 7], [4 + at % 5 for at in range(65)]]
    sizes: dict[str, Any] = {
        "num_blocks": 64,
        "block_size": 4,
        "max_num_batched_tokens": 32,
        "max_num_seqs": 8,
    }
    outputs = []
    for ahead in (False, True):
        llm = LLM(folder, device="cpu", **sizes, async_scheduling=ahead)
        alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs for prompt in prompts]
        together = llm.generate(prompts, params, use_tqdm=False)
        outputs.append((alone, [item.outputs for item in together]))
    assert outputs[0] == outputs[1]


OPEN_STREAM = """
import sys
from pyengine import LLM, SamplingParams

llm = LLM(sys.argv[1], num_blocks=64, block_size=4, max_model_len=200, async_scheduling=True)
stream = llm.stream([3, 4], SamplingParams(max_tokens=190, ignore_eos=True, detokenize=False))
print(next(stream).finished)
"""


def test_python_ends_quietly_in_an_open_stream(folder: Path) -> None:
    done = run_python(OPEN_STREAM, folder, timeout=100)
    assert (done.stdout, done.stderr) == ("False\n", "")
