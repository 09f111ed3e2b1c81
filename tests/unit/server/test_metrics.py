"""/metrics: the names that vLLM's dashboards read, and figures that match the run."""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from time import monotonic

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families

from pyengine.engine.stats import StepResult
from pyengine.kv_cache import KVStore
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams
from pyengine.server.histograms import one_two_five
from pyengine.server.metrics import EngineMetrics, metrics_router
from tests.support.callers import FakeModel
from tests.support.docs import ROOT
from tests.support.drafters import MixedDrafter, speculate
from tests.support.engines import EOS, GREEDY
from tests.unit.engine.test_offloading import with_store
from tools.docs_tables import metrics_table

GAUGES = {"num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"}
COUNTERS = {
    "prefix_cache_queries",
    "prefix_cache_hits",
    "num_preemptions",
    "prompt_tokens",
    "prompt_tokens_cached",
    "generation_tokens",
}
FIRST = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
GAP = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
WHOLE = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
LENGTHS = "1 2 5 10 20 50 100 200 500 1000 2000 5000 10000 20000 50000 100000"
BUCKETS = {
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": GAP,
    "request_time_per_output_token_seconds": GAP,
    "e2e_request_latency_seconds": WHOLE,
    "request_queue_time_seconds": WHOLE,
    "request_inference_time_seconds": WHOLE,
    "request_prefill_time_seconds": WHOLE,
    "request_decode_time_seconds": WHOLE,
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
    "request_prompt_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
    "request_params_n": "1 2 5 10 20",
}
LABELS = {"model_name": "tiny", "engine": "0"}


class Scraped:
    """Metrics of an engine, by name and labels."""

    def __init__(self, metrics: EngineMetrics) -> None:
        app = FastAPI()
        app.include_router(metrics_router(metrics))
        answer = TestClient(app).get("/metrics")
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith("text/plain; version=")
        self.text = answer.text
        self.families = list(text_string_to_metric_families(answer.text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def value(self, name: str, **labels: str) -> float:
        [metric] = [
            sample.value
            for sample in self.samples
            if sample.name == name and sample.labels == {**LABELS, **labels}
        ]
        return float(metric)

    def bounds(self, name: str) -> list[str]:
        return [sample.labels["le"] for sample in self.samples if sample.name == f"{name}_bucket"]


class Run:
    """Requests on an engine whose metrics are watched, and their results."""

    def __init__(self, patch: pytest.MonkeyPatch, **settings: object) -> None:
        self.model = FakeModel(patch, **settings)
        self.bench = self.model.bench
        self.llm = self.model.llm()
        self.metrics = EngineMetrics(self.llm, model_name="tiny")
        self.llm.close()  # its thread would run steps too
        self.outputs: dict[str, RequestOutput] = {}

    def finish(self) -> Scraped:
        self.outputs |= self.bench.run()
        return Scraped(self.metrics)

    def tokens(self) -> list[int]:
        """Of each sample."""
        several = [output.outputs for output in self.outputs.values()]
        return [len(sample.token_ids) for samples in several for sample in samples]


@pytest.fixture(params=[1, 2], ids=["one step", "two steps"])
def depth(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def agree(run: Run, scraped: Scraped) -> None:
    """The figures of requests that have all ended are those of their outputs."""
    outputs, lengths = list(run.outputs.values()), run.tokens()
    begun = [output for output in outputs if output.metrics.first_token_time is not None]
    computed = [*begun, *(output for output in outputs if output.request_id == "none")]
    stats = run.bench.engine.stats()
    expected = {
        "vllm:generation_tokens_total": sum(lengths),
        "vllm:inter_token_latency_seconds_count": sum(length - 1 for length in lengths if length),
        "vllm:time_to_first_token_seconds_count": len(begun),
        "vllm:prompt_tokens_total": sum(len(output.prompt_token_ids) for output in computed),
        "vllm:prompt_tokens_cached_total": sum(output.num_cached_tokens for output in computed),
        "vllm:e2e_request_latency_seconds_count": len(outputs),
        "vllm:request_prefill_time_seconds_count": len(begun),
        "vllm:request_prompt_tokens_sum": sum(len(output.prompt_token_ids) for output in outputs),
        "vllm:request_generation_tokens_sum": sum(lengths),
        "vllm:num_preemptions_total": stats.num_preemptions,
        "vllm:iteration_tokens_total_sum": stats.counters["computed_tokens"],
        "vllm:iteration_tokens_total_count": stats.counters["committed_steps"],
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:kv_cache_usage_perc": 0,
        "pyengine:prefill_tokens_saved_total": stats.counters["cached_tokens"]
        + stats.counters["forked_tokens"],
        "pyengine:kv_merged_blocks_total": stats.counters["merged_blocks"],
    }
    assert {name: scraped.value(name) for name in expected} == expected
    reasons = Counter(max(o.finish_reason or "" for o in output.outputs) for output in outputs)
    ends = {
        reason: scraped.value("vllm:request_success_total", finished_reason=reason)
        for reason in ("stop", "length", "abort", "error")
    }
    assert ends == {reason: reasons[reason] for reason in ends}
    first = sum(
        (output.metrics.first_token_time or 0) - output.metrics.arrival_time for output in begun
    )
    assert scraped.value("vllm:time_to_first_token_seconds_sum") == pytest.approx(first)


def test_names_labels_and_buckets_are_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.bench.submit({"one": [1, 2, 3, 4, 5]})
    scraped = run.finish()
    for name in GAUGES:
        scraped.value(f"vllm:{name}")
    for name in COUNTERS:
        scraped.value(f"vllm:{name}_total")
    for name, bounds in BUCKETS.items():
        actual = scraped.bounds(f"vllm:{name}")
        assert [float(bound) for bound in actual[:-1]] == [float(bound) for bound in bounds.split()]
        assert actual[-1] == "+Inf"
    types = {family.name: family.type for family in scraped.families}
    assert types["vllm:cache_config_info"] == "gauge"
    assert types["vllm:request_success"] == "counter"
    ours = [sample for sample in scraped.samples if sample.name.startswith(("vllm:", "pyengine:"))]
    assert all(sample.labels.items() >= LABELS.items() for sample in ours)
    assert "process_resident_memory_bytes" in types


def test_numbers_of_tokens_go_by_one_two_five() -> None:
    assert one_two_five(8192)[-4:] == (500, 1000, 2000, 5000)
    assert one_two_five(1) == (1,)
    assert one_two_five(4999)[-2:] == (1000, 2000)
    assert one_two_five(5000)[-1] == 5000


def test_the_figures_of_a_run_are_right(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    run = Run(monkeypatch, depth=depth)
    prompts = {str(at): [*range(3, 40), at] for at in range(12)}
    run.bench.submit(prompts)
    stopping = SamplingParams(temperature=1, max_tokens=30, stop_token_ids=[*range(30)], seed=3)
    run.bench.submit({f"stop {at}": [50, at] for at in range(6)}, stopping)
    several = SamplingParams(temperature=1, max_tokens=9, n=3, ignore_eos=True)
    run.bench.submit({"three": [60, 61, 62]}, several)
    run.bench.submit({"none": [63, 64, 65]}, SamplingParams(max_tokens=0))
    scraped = run.finish()
    agree(run, scraped)
    assert scraped.value("vllm:request_success_total", finished_reason="stop") >= 1
    assert scraped.value("vllm:prompt_tokens_cached_total") > 0
    assert scraped.value("pyengine:kv_blocks", state="active") == 0
    assert (
        scraped.value("pyengine:kv_blocks", state="evictable")
        == run.bench.manager.usage().evictable
    )


def test_tokens_that_were_drafted_count(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    run = Run(monkeypatch, depth=depth)
    speculate(run.bench.engine, MixedDrafter(1))
    run.bench.submit({str(at): [at, 7, 8] for at in range(6)}, GREEDY)
    scraped, stats = run.finish(), run.bench.engine.stats()
    assert scraped.value("vllm:generation_tokens_total") == sum(run.tokens()) == 6 * 8
    names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    values = [scraped.value(f"vllm:spec_decode_{name}_total") for name in names]
    counters = stats.counters
    assert values == [
        stats.num_drafts,
        counters["draft_tokens"],
        counters["accepted_draft_tokens"],
    ]
    assert all(values)


def test_aborted_requests_count_what_they_got(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    run = Run(monkeypatch, depth=depth, max_num_seqs=4)
    long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=40)
    run.bench.submit({str(at): [at, 7, 8] for at in range(8)}, long)
    for _ in range(9):
        run.bench.step()
    run.outputs |= {
        output.request_id: output for output in run.bench.abort(["1", "6"])
    }  # runs, waits
    for name in run.outputs:
        del run.bench.requests[name]
    scraped = run.finish()
    agree(run, scraped)
    assert scraped.value("vllm:request_success_total", finished_reason="abort") == 2
    assert 0 < len(run.outputs["1"].outputs[0].token_ids) < 40


def test_preempted_requests_are_counted_once(monkeypatch: pytest.MonkeyPatch, depth: int) -> None:
    run = Run(monkeypatch, depth=depth, num_blocks=14, max_num_seqs=8)
    long = SamplingParams(temperature=0, ignore_eos=True, max_tokens=20)
    run.bench.submit({str(at): [at, 9, 8, 7, 6] for at in range(6)}, long)
    scraped = run.finish()
    agree(run, scraped)
    assert scraped.value("vllm:num_preemptions_total") > 0
    # A sample that waited for its blocks waited for its next token, too.
    gaps = scraped.value("vllm:inter_token_latency_seconds_sum")
    ends = sum(
        (output.metrics.finished_time or 0) - (output.metrics.first_token_time or 0)
        for output in run.outputs.values()
    )
    assert gaps == pytest.approx(ends, rel=0.2)


def test_rows_that_wait_for_their_tokens_are_timed(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    run = Run(monkeypatch, depth=depth)
    awaited = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12, repetition_penalty=1.2)
    run.bench.submit({"awaited": [3, 4, 5]}, awaited)
    run.bench.submit({"free": [5, 4, 3]})
    agree(run, run.finish())


def test_a_gauge_shows_what_is_now(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch, max_num_seqs=2)
    run.bench.submit({str(at): [at, 7, 8] for at in range(5)})
    run.bench.step()
    run.bench.step()
    scraped = Scraped(run.metrics)
    assert scraped.value("vllm:num_requests_running") == 2
    assert scraped.value("vllm:num_requests_waiting") == 3
    assert scraped.value("vllm:kv_cache_usage_perc") == pytest.approx(2 / 64)
    assert scraped.value("pyengine:kv_blocks", state="free") == 62


async def test_two_callers_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = FakeModel(monkeypatch, num_blocks=256)

    async def last(engine: object, prompt: list[int]) -> RequestOutput:
        items = engine.generate(prompt, GREEDY)  # type: ignore[attr-defined]
        return [item async for item in items][-1]

    async with model.async_engine() as engine:
        metrics = EngineMetrics(engine, model_name="tiny")
        prompts = [[at, 5, 6] for at in range(20)]
        outputs = await asyncio.gather(*(last(engine, prompt) for prompt in prompts))
    scraped = Scraped(metrics)
    assert scraped.value("vllm:generation_tokens_total") == 20 * GREEDY.max_tokens
    assert scraped.value("vllm:request_success_total", finished_reason="length") == len(outputs)


def test_a_failed_step_is_no_step(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.metrics.on_step(StepResult())
    assert Scraped(run.metrics).value("vllm:iteration_tokens_total_count") == 0


def test_the_document_lists_every_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    store = KVStore.in_memory(64 << 20, segment_bytes=1 << 20)
    with_store(run.bench, store)
    run.bench.submit({"one": [1, EOS, 3]})
    scraped = run.finish()
    store.close(5)
    shown = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in scraped.families
        if family.name.startswith(("vllm:", "pyengine:"))
    }
    listed = re.findall(r"^\| `(\S+)` \| \w+ \|", "\n".join(metrics_table()), re.MULTILINE)
    assert len(listed) == len(set(listed))
    assert set(listed) == shown
    assert "<!-- table: metrics -->" in Path(ROOT, "docs/reference/metrics.md").read_text()


def queries() -> Iterator[str]:
    board = json.loads(Path(ROOT, "docs/grafana.json").read_text(encoding="utf-8"))
    assert board["schemaVersion"] >= 39
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids)) >= 10
    for panel in board["panels"]:
        for target in panel.get("targets", []):
            yield target["expr"]


def test_every_query_of_the_board_finds_its_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(monkeypatch)
    run.bench.submit({"one": [1, 2, 3]})
    there = {sample.name for sample in run.finish().samples}
    queried = [
        name for query in queries() for name in re.findall(r"\b(?:vllm|pyengine):\w+", query)
    ]
    assert len(queried) >= 20
    assert set(queried) <= there


def test_a_step_of_the_same_rows_takes_the_same_time_for_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The histogram's sum is that of the times between a sample's tokens."""
    run = Run(monkeypatch)
    start = monotonic()
    run.bench.submit({str(at): [at, 7, 8] for at in range(4)})
    scraped = run.finish()
    mean = scraped.value("vllm:inter_token_latency_seconds_sum") / (
        scraped.value("vllm:inter_token_latency_seconds_count")
    )
    assert 0 < mean < monotonic() - start
