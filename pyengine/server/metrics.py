"""What Prometheus reads: `GET /metrics`. docs/reference/metrics.md is made of the help texts here.

Names, labels and buckets that begin with ``vllm:`` are those of vLLM, so that boards made for it
show this engine; ours begin with ``pyengine:``. What happens is counted by an observer in the
engine's thread, in plain numbers; what is now is read when somebody asks. prometheus-client writes
the text.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any, Protocol

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.utils import floatToGoString

from pyengine.cache.counters import COUNTERS
from pyengine.engine import EngineStats, RequestState, Sample, StepResult
from pyengine.server.middleware.auth import caller_of

_FIRST_TOKEN = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80, 160, 640, 2560),
)
_PER_TOKEN = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    *(20, 40, 80),
)
_REQUEST = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960),
    *(1920, 7680),
)
_STEP_TOKENS = (1, *(8 << doubling for doubling in range(12)))
_SAMPLES = (1, 2, 5, 10, 20)
FINISH_REASONS = ("error", "abort", "length", "stop")
"""The worst one first."""
_MOST_TOKENS = 1 << 17
"""Of a request, where the engine does not say."""
_SHARED_BLOCKS = ("hit_blocks", "already_cached_blocks", "merged_blocks", "forked_blocks")
_CUT_SHORT = FINISH_REASONS[:2]
_COUNTERS = {
    **COUNTERS,
    "forked_tokens": "Prompt tokens that further samples (`n`) share with the first.",
    "forked_blocks": "Full blocks that further samples (`n`) share with the first.",
}


def one_two_five(most: int) -> tuple[int, ...]:
    """1, 2, 5, 10, 20, 50, ... up to `most`."""
    steps = (digit * 10**power for power in range(len(str(most))) for digit in (1, 2, 5))
    return tuple(step for step in steps if step <= most)


def reason_of(request: RequestState) -> str:
    """Why a request ended: of several samples the worst."""
    reasons = {one.finish_reason for one in request.samples}
    return next(reason for reason in FINISH_REASONS if reason in reasons)


def bytes_per_block(about: Mapping[str, object]) -> int | None:
    """Bytes of KV in a block, by an engine's `describe`; its pool has a null block besides."""
    num_bytes, num_blocks = about.get("kv_cache_bytes"), about.get("num_blocks")
    if isinstance(num_bytes, int) and isinstance(num_blocks, int):
        return num_bytes // (num_blocks + 1)
    return None


class Watched(Protocol):
    """What the metrics ask of an engine: `AsyncEngine` and `LLM` have it."""

    def stats(self) -> EngineStats:
        """See `Frontend.stats`."""
        ...

    def describe(self) -> dict[str, object]:
        """See `Frontend.describe`."""
        ...

    def observe(self, observer: Any) -> None:
        """See `Frontend.observe`."""
        ...


class _Histogram:
    """Counts in buckets. Several equal values are one call, which prometheus-client's has not."""

    __slots__ = ("bounds", "counts", "help", "name", "total")

    def __init__(self, name: str, help: str, bounds: Sequence[float]) -> None:
        self.name, self.help = name, help
        self.bounds = [float(bound) for bound in bounds]
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def family(self, labels: dict[str, str]) -> HistogramMetricFamily:
        family = HistogramMetricFamily(self.name, self.help, labels=list(labels))
        counts, total = list(self.counts), self.total
        sums = [sum(counts[: at + 1]) for at in range(len(counts))]
        names = [*map(floatToGoString, self.bounds), "+Inf"]
        family.add_metric(list(labels.values()), list(zip(names, sums, strict=True)), total)
        return family


class _Times:
    """Time between two tokens of a sample, for whole steps at once.

    As long as the same samples decode, the time between their tokens is that between two steps.
    """

    def __init__(self, histogram: _Histogram) -> None:
        self._histogram = histogram
        self._rows: Sequence[Sample] = ()
        self._last = 0.0
        self._live: set[Sample] = set()
        self._since: dict[Sample, float] = {}
        """When those had their last token who were left out of a step since."""
        self._gone: set[Sample] = set()
        """Who ended in the last step or was stopped since: a step that runs may still hold them."""

    def stop(self, samples: Iterable[Sample]) -> None:
        """These get no more tokens, also from a step that runs."""
        for one in samples:
            self._gone.add(one)
            self._since.pop(one, None)

    def step(self, rows: Sequence[Sample], ended: Sequence[Sample], now: float) -> int:
        """How many samples got a token."""
        if not rows:
            return 0
        if rows is self._rows and not self._gone:
            live = self._live
            self._histogram.add(now - self._last, len(live))
        else:
            live = set(rows)
            live -= self._gone
            self._gone.clear()
            both = live & self._live
            if both:
                self._histogram.add(now - self._last, len(both))
            self._change(live, now)
        self._rows, self._live, self._last = rows, live, now
        self._gone.update(ended)
        return len(live)

    def _change(self, live: set[Sample], now: float) -> None:
        for one in live - self._live:
            last = self._since.pop(one, None)
            if last is not None:
                self._histogram.add(now - last)
        for one in self._live - live:
            if one.finish_reason is None:
                self._since[one] = self._last


@dataclass(slots=True)
class _Counts:
    """Totals that are counted step by step."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0


class EngineMetrics:
    """Counts what an engine does and shows it to Prometheus. One per engine, from its beginning.

    `name` is that of the engine among several.
    """

    def __init__(self, engine: Watched, *, model_name: str, name: str = "0") -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": name}
        self._about = engine.describe()
        self._counts = _Counts()
        self._ends: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        self._first = _Histogram(
            "vllm:time_to_first_token_seconds", "From arrival to the first token.", _FIRST_TOKEN
        )
        self._gap = _Histogram(
            "vllm:inter_token_latency_seconds",
            "From step to step in which a sample got a token.",
            _PER_TOKEN,
        )
        self._mean_gap = _Histogram(
            "vllm:request_time_per_output_token_seconds",
            "Mean time between the tokens of a request.",
            _PER_TOKEN,
        )
        self._whole, self._queue, self._inference, self._prefill, self._decode = (
            _Histogram(f"vllm:{name}_seconds", help, _REQUEST)
            for name, help in (
                ("e2e_request_latency", "From arrival to the end, aborted requests included."),
                ("request_queue_time", "From arrival to the first step of a request."),
                ("request_inference_time", "From the first step of a request to its end."),
                ("request_prefill_time", "From the first step of a request to its first token."),
                ("request_decode_time", "From the first token to the end."),
            )
        )
        self._step_tokens = _Histogram(
            "vllm:iteration_tokens_total",
            "Tokens computed in a step, of prompts and of decodes.",
            _STEP_TOKENS,
        )
        longest = self._about.get("max_model_len")
        lengths = one_two_five(longest if isinstance(longest, int) else _MOST_TOKENS)
        self._prompts, self._outputs, self._n, self._max_tokens = (
            _Histogram(f"vllm:request_{name}", help, bounds)
            for name, help, bounds in (
                ("prompt_tokens", "Prompt tokens of a request.", lengths),
                (
                    "generation_tokens",
                    "Tokens generated for a request, all samples together.",
                    lengths,
                ),
                ("params_n", "Samples per request (`n`).", _SAMPLES),
                ("params_max_tokens", "`max_tokens`, if it was given.", lengths),
            )
        )
        self._times = _Times(self._gap)
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        engine.observe(self)

    # What the engine's thread calls.

    def on_arrival(self, request: RequestState) -> None:
        """Nothing: who waits is read from the engine."""

    def on_step(self, result: StepResult) -> None:
        """Count a step. O(1) as long as the same samples decode."""
        if not result.num_tokens:
            return
        now = monotonic()
        self._step_tokens.add(result.num_tokens)
        counts = self._counts
        for state in result.begun:
            if not state.samples[0].max_output:  # its prompt was all that was wanted
                self._times.stop(state.samples)
            counts.prompt_tokens += len(state.prompt_token_ids)
            counts.cached_tokens += state.num_cached_tokens
            if state.first_token_time is not None:
                self._first.add(state.first_token_time - state.arrival_time)
        counts.generation_tokens += self._times.step(result.rows, result.ended, now)
        counts.generation_tokens += result.num_drafted

    def on_finish(self, request: RequestState) -> None:
        """Count a request that has ended."""
        self._times.stop([one for one in request.samples if one.finish_reason in _CUT_SHORT])
        self._ends[reason_of(request)] += 1
        num_output = sum([len(one.token_ids) for one in request.samples])
        self._prompts.add(len(request.prompt_token_ids))
        self._outputs.add(num_output)
        self._n.add(request.params.n)
        if request.params.max_tokens is not None:
            self._max_tokens.add(request.params.max_tokens)
        self._add_times(request, num_output)

    def _add_times(self, request: RequestState, num_output: int) -> None:
        begun, first, end = request.scheduled_time, request.first_token_time, request.finished_time
        assert end is not None
        self._whole.add(end - request.arrival_time)
        if begun is None:
            return
        self._queue.add(begun - request.arrival_time)
        self._inference.add(end - begun)
        if first is None:
            return
        self._prefill.add(first - begun)
        self._decode.add(end - first)
        num_later = num_output - sum([1 for one in request.samples if one.token_ids])
        if num_later > 0:
            per_sample = len([one for one in request.samples if len(one.token_ids) > 1])
            self._mean_gap.add((end - first) * per_sample / num_later)

    # What a reader's thread calls.

    def collect(self) -> Iterator[Metric]:
        """Every metric as it is now."""
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._of_vllm(stats)
        yield from self._ours(stats)
        for histogram in (
            *(self._first, self._gap, self._mean_gap, self._whole, self._queue, self._inference),
            *(self._prefill, self._decode, self._step_tokens, self._prompts, self._outputs),
            *(self._n, self._max_tokens),
        ):
            yield histogram.family(self._labels)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        usage = stats.usage
        used = 1 - usage.available / usage.num_blocks
        yield self._gauge(
            "vllm:num_requests_running", "Samples that hold blocks.", stats.num_running
        )
        yield self._gauge(
            "vllm:num_requests_waiting",
            "Requests that wait for blocks or for a slot in the batch.",
            stats.num_waiting,
        )
        yield self._gauge(
            "vllm:kv_cache_usage_perc",
            "Share of the pool in use, 0 to 1; evictable blocks are not.",
            used,
        )
        about = {
            **{name: str(self._about.get(name)) for name in _CONFIG if name in self._about},
            "num_gpu_blocks": str(usage.num_blocks),
        }
        labels = {**self._labels, **about}
        info = GaugeMetricFamily(
            "vllm:cache_config_info",
            "Always 1; its labels are the pool's settings.",
            labels=list(labels),
        )
        info.add_metric(list(labels.values()), 1)
        yield info
        blocks = GaugeMetricFamily(
            "pyengine:kv_blocks",
            "Blocks by state; together the pool.",
            labels=[*self._labels, "state"],
        )
        for state in ("free", "evictable", "active", "pinned"):
            blocks.add_metric([*self._labels.values(), state], getattr(usage, state))
        yield blocks

    def _of_vllm(self, stats: EngineStats) -> Iterator[Metric]:
        counts, of_manager = self._counts, stats.counters
        for name, help, value in (
            (
                "prefix_cache_queries",
                "Prompt tokens of requests that had their first token.",
                counts.prompt_tokens,
            ),
            (
                "prefix_cache_hits",
                "Of the prompt tokens, those in the cache when the request first ran.",
                counts.cached_tokens,
            ),
            (
                "num_preemptions",
                "Samples that lost their blocks and were computed again.",
                stats.num_preemptions,
            ),
            ("prompt_tokens", "The same as prefix_cache_queries.", counts.prompt_tokens),
            ("prompt_tokens_cached", "The same as prefix_cache_hits.", counts.cached_tokens),
            ("generation_tokens", "Tokens generated.", counts.generation_tokens),
            ("spec_decode_num_drafts", "Decodes that were computed with drafts.", stats.num_drafts),
            ("spec_decode_num_draft_tokens", "Drafts computed.", of_manager["draft_tokens"]),
            (
                "spec_decode_num_accepted_tokens",
                "Of the drafts, those accepted.",
                of_manager["accepted_draft_tokens"],
            ),
        ):
            yield self._counter(f"vllm:{name}", help, value)
        ends = CounterMetricFamily(
            "vllm:request_success",
            "Requests that ended, by reason; of several samples the worst.",
            labels=[*self._labels, "finished_reason"],
        )
        for reason in FINISH_REASONS:
            ends.add_metric([*self._labels.values(), reason], self._ends[reason])
        yield ends

    def _ours(self, stats: EngineStats) -> Iterator[Metric]:
        counters = stats.counters
        for name, value in counters.items():
            yield self._counter(f"pyengine:kv_{name}", _COUNTERS[name], value)
        shared = sum(counters[name] for name in _SHARED_BLOCKS)
        saved = counters["cached_tokens"] + counters["forked_tokens"]
        per_block = bytes_per_block(self._about) or 0
        for name, help, value in (
            ("prefill_tokens_saved", "Prefill tokens cached or forked, and not computed.", saved),
            ("kv_bytes_saved", "KV that was not stored twice, in bytes.", shared * per_block),
        ):
            yield self._counter(f"pyengine:{name}", help, value)

    def _gauge(self, name: str, help: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(name, help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family

    def _counter(self, name: str, help: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(name, help, labels=list(self._labels))
        family.add_metric(list(self._labels.values()), value)
        return family


_CONFIG = (
    "block_size",
    "kv_cache_bytes",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "in_flight_sharing",
    "eviction",
    "max_model_len",
)
"""Of `describe`: labels of `vllm:cache_config_info`."""


def metrics_router(metrics: EngineMetrics) -> APIRouter:
    """`GET /metrics`."""
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    def scrape(request: Request) -> Response:
        return exposed(request, metrics.registry)

    return router


def exposed(request: Request, registry: CollectorRegistry) -> Response:
    """What a registry has, and the server, in the form that the reader asks for.

    A client's key gets what was counted of this key.
    """
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    context = getattr(request.app.state, "context", None)  # none in an application of others
    if context is not None:
        caller = caller_of(request.scope)
        families = list(context.traffic.collect(context.names[0], caller))
        if caller.is_admin:
            families += registry.collect()
        registry = _Families(families)
    return Response(encode(registry), headers={"Content-Type": content_type})


class _Families(CollectorRegistry):
    """Metrics that were collected already."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterator[Metric]:
        yield from self._families
