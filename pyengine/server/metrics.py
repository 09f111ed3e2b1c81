"""Prometheus metrics: `GET /metrics`. docs/reference/metrics.md is made of the help texts here.

Metrics ``vllm:*`` have vLLM's names, labels and buckets, so its dashboards work; metrics of our own
are ``pyengine:*``. An observer on the engine's thread counts events in plain numbers. Gauges are
read at scrape time.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from pyengine.engine.offloading import COUNTERS as OFFLOAD_COUNTERS
from pyengine.engine.offloading import STORE_COUNTERS
from pyengine.engine.stats import EngineStats, StepResult
from pyengine.kv_cache import BLOCK_STATES, COUNTERS
from pyengine.request.request import Request as EngineRequest
from pyengine.server.callers import caller_of
from pyengine.server.histograms import (
    FIRST_TOKEN_BUCKETS,
    PER_TOKEN_BUCKETS,
    REQUEST_BUCKETS,
    SEQUENCE_BUCKETS,
    STEP_TOKEN_BUCKETS,
    Histogram,
    Sample,
    TokenGaps,
    family,
    one_two_five,
)

if TYPE_CHECKING:
    from pyengine.engine.client import EngineClientBase

FINISH_REASONS = ("error", "abort", "length", "stop")
"""From worst to best."""
_MAX_TOKENS = 1 << 17
"""Largest bucket of token counts if the engine does not name a context length."""
_SHARED_BLOCKS = ("hit_blocks", "already_cached_blocks", "merged_blocks", "forked_blocks")
_HISTOGRAMS: tuple[tuple[str, str, Sequence[float]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", FIRST_TOKEN_BUCKETS),
    (
        "inter_token_latency_seconds",
        "From step to step in which a sample got a token.",
        PER_TOKEN_BUCKETS,
    ),
    (
        "request_time_per_output_token_seconds",
        "Mean time between the tokens of a request.",
        PER_TOKEN_BUCKETS,
    ),
    *(
        (f"{name}_seconds", help, REQUEST_BUCKETS)
        for name, help in (
            ("e2e_request_latency", "From arrival to the end, aborted requests included."),
            ("request_queue_time", "From arrival to the first step of a request."),
            ("request_inference_time", "From the first step of a request to its end."),
            ("request_prefill_time", "From the first step of a request to its first token."),
            ("request_decode_time", "From the first token to the end."),
        )
    ),
    (
        "iteration_tokens_total",
        "Tokens computed in a step, of prompts and of decodes.",
        STEP_TOKEN_BUCKETS,
    ),
    ("request_prompt_tokens", "Prompt tokens of a request.", ()),
    ("request_generation_tokens", "Tokens generated for a request, all samples together.", ()),
    ("request_params_n", "Samples per request (`n`).", SEQUENCE_BUCKETS),
    ("request_params_max_tokens", "`max_tokens`, if it was given.", ()),
)
"""Names, help texts and buckets; those of no buckets go up to the length of the context."""
_EARLY_ENDS = FINISH_REASONS[:2]
_COUNTERS = {
    **COUNTERS,
    "forked_tokens": "Prompt tokens that further samples (`n`) share with the first.",
    "forked_blocks": "Full blocks that further samples (`n`) share with the first.",
}


def reason_of(request: EngineRequest) -> str:
    """The finish reason of a request: the worst of its sequences."""
    reasons = {sample.output.finish_reason for sample in request.sequences}
    return next(reason for reason in FINISH_REASONS if reason in reasons)


def bytes_per_block(about: Mapping[str, object]) -> int | None:
    """Bytes of KV per block, from an engine's `describe`. The pool includes a null block."""
    num_bytes, num_blocks = about.get("kv_cache_bytes"), about.get("num_blocks")
    if isinstance(num_bytes, int) and isinstance(num_blocks, int):
        return num_bytes // (num_blocks + 1)
    return None


@dataclass(slots=True)
class _Counts:
    """Totals over all steps."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    restored_tokens: int = 0
    generation_tokens: int = 0


class EngineMetrics:
    """Prometheus metrics of one engine. Create it before the first request.

    `name` distinguishes engines: it is the label `engine`.
    """

    def __init__(self, engine: "EngineClientBase", *, model_name: str, name: str = "0") -> None:
        self._engine = engine
        self._labels = {"model_name": model_name, "engine": name}
        self._about = engine.describe()
        self._counts = _Counts()
        self._ends: Counter[str] = Counter(dict.fromkeys(FINISH_REASONS, 0))
        longest = self._about.get("max_model_len")
        lengths = one_two_five(longest if isinstance(longest, int) else _MAX_TOKENS)
        self._histograms = {
            name: Histogram(f"vllm:{name}", help, bounds or lengths)
            for name, help, bounds in _HISTOGRAMS
        }
        self._times = TokenGaps(self._histograms["inter_token_latency_seconds"])
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self)
        ProcessCollector(registry=self.registry)
        engine.observe(self)

    def _add(self, name: str, value: float) -> None:
        self._histograms[name].add(value)

    # Called on the engine's thread.

    def on_arrival(self, request: EngineRequest) -> None:
        """Ignored: the number of waiting requests is read from the engine."""

    def on_step(self, result: StepResult) -> None:
        """Count a step. O(1) while the same sequences decode."""
        if not result.num_tokens:
            return
        now = monotonic()
        self._add("iteration_tokens_total", result.num_tokens)
        counts = self._counts
        for state in result.begun:
            if not state.rules.max_output:  # a request for the prompt only
                self._times.stop(state.sequences)
            counts.prompt_tokens += len(state.prompt_token_ids)
            counts.cached_tokens += state.progress.num_cached_tokens
            counts.restored_tokens += min(
                state.progress.num_restored_tokens, state.progress.num_cached_tokens
            )
            if state.result.first_token_time is not None:
                self._add(
                    "time_to_first_token_seconds",
                    state.result.first_token_time - state.arrival_time,
                )
        counts.generation_tokens += self._times.step(result.rows, result.ended, now)
        counts.generation_tokens += result.num_drafted

    def on_finish(self, request: EngineRequest) -> None:
        """Count a finished request."""
        self._times.stop(
            [sample for sample in request.sequences if sample.output.finish_reason in _EARLY_ENDS]
        )
        self._ends[reason_of(request)] += 1
        num_output = sum([len(sample.token_ids) for sample in request.sequences])
        self._add("request_prompt_tokens", len(request.prompt_token_ids))
        self._add("request_generation_tokens", num_output)
        self._add("request_params_n", request.params.n)
        if request.params.max_tokens is not None:
            self._add("request_params_max_tokens", request.params.max_tokens)
        self._add_times(request, num_output)

    def _add_times(self, request: EngineRequest, num_output: int) -> None:
        begun, first, end = (
            request.progress.scheduled_time,
            request.result.first_token_time,
            request.result.finished_time,
        )
        assert end is not None
        self._add("e2e_request_latency_seconds", end - request.arrival_time)
        if begun is None:
            return
        self._add("request_queue_time_seconds", begun - request.arrival_time)
        self._add("request_inference_time_seconds", end - begun)
        if first is None:
            return
        self._add("request_prefill_time_seconds", first - begun)
        self._add("request_decode_time_seconds", end - first)
        num_later = num_output - sum([1 for sample in request.sequences if sample.token_ids])
        if num_later > 0:
            per_sample = len([sample for sample in request.sequences if len(sample.token_ids) > 1])
            self._add(
                "request_time_per_output_token_seconds", (end - first) * per_sample / num_later
            )

    # Called on the thread that serves a scrape.

    def collect(self) -> Iterator[Metric]:
        """The current value of every metric."""
        stats = self._engine.stats()
        yield from self._gauges(stats)
        yield from self._of_vllm(stats)
        yield from self._ours(stats)
        for histogram in self._histograms.values():
            yield histogram.family(self._labels)

    def _gauges(self, stats: EngineStats) -> Iterator[Metric]:
        usage = stats.usage
        waiting = "Requests that wait for blocks or for room in the batch."
        share = "Share of the pool in use, 0 to 1; evictable blocks are not."
        used = 1 - usage.available / usage.num_blocks
        about = {name: str(self._about.get(name)) for name in _CONFIG if name in self._about}
        about["num_gpu_blocks"] = str(usage.num_blocks)
        blocks = {state: getattr(usage, state) for state in BLOCK_STATES}
        yield self._gauge(
            "vllm:num_requests_running", "Samples that hold blocks.", stats.num_running
        )
        yield self._gauge("vllm:num_requests_waiting", waiting, stats.num_waiting)
        yield self._gauge("vllm:kv_cache_usage_perc", share, used)
        info = "Always 1; its labels are the pool's settings."
        yield self._gauge("vllm:cache_config_info", info, 1, **about)
        together = "Blocks by state; together the pool."
        yield family(GaugeMetricFamily, "pyengine:kv_blocks", together, self._by("state", blocks))

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
                "Of the prompt tokens, those in the cache when the request first ran, and not "
                "restored for it.",
                counts.cached_tokens - counts.restored_tokens,
            ),
            (
                "num_preemptions",
                "Samples that lost their blocks and were computed again.",
                stats.num_preemptions,
            ),
            ("prompt_tokens", "The same as prefix_cache_queries.", counts.prompt_tokens),
            (
                "prompt_tokens_cached",
                "Of the prompt tokens, those that were not computed: prefix_cache_hits, and those "
                "restored from the store.",
                counts.cached_tokens,
            ),
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
        ends = "Requests that ended, by reason; of several samples the worst."
        reasons = self._by("finished_reason", self._ends)
        yield family(CounterMetricFamily, "vllm:request_success", ends, reasons)
        if stats.store:
            yield from self._of_the_store(stats.store)

    def _of_the_store(self, store: Mapping[str, float]) -> Iterator[Metric]:
        counts = self._counts
        local = counts.cached_tokens - counts.restored_tokens
        tier = str(self._about.get("kv_cache_tier", "disk"))
        for name, help, value in (
            (
                "external_prefix_cache_queries",
                "Prompt tokens that were not in the cache: those asked of the store.",
                counts.prompt_tokens - local,
            ),
            (
                "external_prefix_cache_hits",
                "Of these, the ones that were restored.",
                counts.restored_tokens,
            ),
        ):
            yield self._counter(f"vllm:{name}", help, value)
        for name, help, amount in (
            ("kv_offload_load_bytes", "Bytes read from the store.", store["hit_bytes"]),
            ("kv_offload_load_time", "Seconds that loads took.", store["load_seconds"]),
            ("kv_offload_store_bytes", "Bytes written to the store.", store["stored_bytes"]),
        ):
            yield self._counter(f"vllm:{name}", help, amount, tier=tier)
        by_source = "Prompt tokens of requests that had their first token, by what they came from."
        sources = {
            "local_compute": counts.prompt_tokens - counts.cached_tokens,
            "local_cache_hit": local,
            "external_kv_transfer": counts.restored_tokens,
        }
        samples = self._by("source", sources)
        yield family(CounterMetricFamily, "vllm:prompt_tokens_by_source", by_source, samples)
        cost = "The time to restore a token relative to computing one; 1 until both are known."
        restore_cost = store["restore_cost"]
        yield self._gauge("pyengine:kv_store_restore_cost", cost, restore_cost, tier=tier)
        for name, help in {**OFFLOAD_COUNTERS, **STORE_COUNTERS}.items():
            yield self._counter(f"pyengine:kv_store_{name}", help, store[name], tier=tier)

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

    def _by(self, label: str, values: Mapping[str, float]) -> list[Sample]:
        """A sample for each value of a label."""
        return [({**self._labels, label: name}, value) for name, value in values.items()]

    def _gauge(self, name: str, help: str, value: float, **labels: str) -> Metric:
        return family(GaugeMetricFamily, name, help, [({**self._labels, **labels}, value)])

    def _counter(self, name: str, help: str, value: float, **labels: str) -> Metric:
        return family(CounterMetricFamily, name, help, [({**self._labels, **labels}, value)])


_CONFIG = (
    "block_size",
    "kv_cache_bytes",
    "kv_cache_dtype",
    "enable_prefix_caching",
    "in_flight_sharing",
    "eviction",
    "max_model_len",
)
"""Keys of `describe` that are labels of `vllm:cache_config_info`."""


def metrics_router(metrics: EngineMetrics) -> APIRouter:
    """Router of `GET /metrics`."""
    router = APIRouter()

    @router.get("/metrics", include_in_schema=False)
    def scrape(request: Request) -> Response:
        return exposed(request, metrics.registry)

    return router


def exposed(request: Request, registry: CollectorRegistry) -> Response:
    """A scrape response: metrics of the registry and of the server, in the accepted format.

    Admin keys get all metrics, client keys only their own usage.
    """
    encode, content_type = choose_encoder(request.headers.get("accept", ""))
    context = getattr(request.app.state, "context", None)  # None outside of `create_app`
    if context is not None:
        caller = caller_of(request.scope)
        families = list(context.traffic.collect(context.names[0], caller))
        if caller.is_admin:
            families += registry.collect()
        registry = Families(families)
    return Response(encode(registry), headers={"Content-Type": content_type})


class Families(CollectorRegistry):
    """A registry of metrics that were collected already."""

    def __init__(self, families: list[Metric]) -> None:
        super().__init__(auto_describe=False)
        self._families = families

    def collect(self) -> Iterator[Metric]:
        """The metrics."""
        yield from self._families
