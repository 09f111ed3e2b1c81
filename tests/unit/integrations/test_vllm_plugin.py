"""When and how the plugin applies, and what it leaves to vLLM's own manager."""

import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from pyengine.integrations import vllm as plugin
from pyengine.integrations.vllm_manager import KVCacheManager
from tests.support import vllm_fakes
from tests.support.vllm_fakes import (
    CLASSES,
    FullAttentionSpec,
    KVConnectorBase_V1,
    MambaSpec,
    MLAAttentionSpec,
    MultiConnector,
    PoolConnector,
    Request,
    SlidingWindowSpec,
    cache_config,
    engine_config,
)
from tests.unit.integrations.test_vllm_manager import admit, decode


def settings(*specs: Any, **more: Any) -> dict[str, Any]:
    base = {
        "kv_cache_config": cache_config(20, *specs),
        "max_model_len": 100,
        "scheduler_block_size": 4,
        "hash_block_size": 4,
        "use_eagle": False,
        "dcp_world_size": 1,
        "pcp_world_size": 1,
        "num_prefill_lookahead": 0,
        "metrics_collector": None,
        "enable_caching": True,
    }
    return base | more


class OwnManager:
    def __init__(self, **settings: Any) -> None:
        self.settings = settings


class Scheduler:
    """As vLLM's, as far as the plugin reads it: it makes its manager by the name in its module."""

    use_pp = False
    use_v2_model_runner = False

    def __init__(self, vllm_config: Any, overlapping: bool = False, connector: Any = None) -> None:
        self.vllm_config = vllm_config
        self.connector = connector
        self.scheduler_config = SimpleNamespace(async_scheduling=overlapping)
        module = sys.modules["vllm.v1.core.sched.scheduler"]
        self.kv_cache_manager: Any = module.KVCacheManager(**settings())

    def _make_cached_request_data(self, running_reqs: list[Any], *rest: Any) -> Any:
        return SimpleNamespace(
            req_ids=[request.request_id for request in running_reqs],
            new_block_ids=[None for _ in running_reqs],
            resumed_req_ids=set(),
        )

    def _build_kv_connector_meta(self, connector: Any, scheduler_output: Any) -> Any:
        return connector, scheduler_output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        request = scheduler_output.request
        return self.kv_cache_manager.estimate_cached_tokens(request)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A vLLM of a few fakes."""
    modules: dict[str, Any] = {
        "vllm": SimpleNamespace(__version__="0.32.0+cpu"),
        "vllm.v1.core.sched.scheduler": SimpleNamespace(
            KVCacheManager=OwnManager,
            Scheduler=type("Scheduler", (Scheduler,), dict(vars(Scheduler))),
        ),
        "vllm.v1.engine.core": SimpleNamespace(get_request_block_hasher=lambda *_: "a hasher"),
        "vllm.distributed.kv_events": vllm_fakes,
        "vllm.distributed.kv_transfer.kv_connector.v1.base": vllm_fakes,
        "vllm.v1.core.kv_cache_utils": vllm_fakes,
        "vllm.v1.kv_cache_interface": vllm_fakes,
        "vllm.v1.metrics.stats": vllm_fakes,
        "vllm.v1.request": vllm_fakes,
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(plugin, "state", plugin.State())
    monkeypatch.setenv(plugin.SWITCH, "1")
    scheduler: ModuleType = modules["vllm.v1.core.sched.scheduler"]
    return scheduler


def test_the_entry_point_is_the_plugins() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
    points = project["entry-points"]["vllm.general_plugins"]
    assert points == {plugin.PLUGIN: f"{plugin.__name__}:{plugin.register.__name__}"}


@pytest.mark.parametrize(
    ("switch", "plugins", "expected"),
    [
        (None, None, False),
        ("1", None, True),
        ("0", "pyengine-vllm", False),
        ("", None, False),
        (None, "other,pyengine-vllm", True),
        (None, "other", False),
    ],
)
def test_it_is_off_unless_asked_for(
    monkeypatch: pytest.MonkeyPatch, switch: str | None, plugins: str | None, expected: bool
) -> None:
    for name, value in ((plugin.SWITCH, switch), ("VLLM_PLUGINS", plugins)):
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert plugin.is_enabled() is expected


def test_off_touches_nothing(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SWITCH, "0")
    plugin.register()
    assert vllm.KVCacheManager is OwnManager


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0.0", "0.32"])
def test_another_version_keeps_its_manager(
    vllm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, version: str
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", version)
    plugin.register()
    assert vllm.KVCacheManager is OwnManager
    assert caplog.messages == [
        f"pyengine's block manager supports vLLM 0.32.x, not {version}: using vLLM's own"
    ]


def test_in_scope_it_is_ours_and_nobody_hashes(vllm: Any) -> None:
    core = sys.modules["vllm.v1.engine.core"]
    plugin.register()
    plugin.register()
    assert core.get_request_block_hasher(16, hash) == "a hasher"
    scheduler = vllm.Scheduler(engine_config())
    assert isinstance(scheduler.kv_cache_manager, KVCacheManager)
    assert (plugin.state.engaged, plugin.state.reasons) == (1, [])
    assert core.get_request_block_hasher(16, hash) is None


def test_out_of_scope_it_is_vllms_and_the_log_says_why(
    vllm: Any, caplog: pytest.LogCaptureFixture
) -> None:
    plugin.register()
    scheduler = vllm.Scheduler(engine_config(), connector=PoolConnector())
    assert isinstance(scheduler.kv_cache_manager, OwnManager)
    assert scheduler.kv_cache_manager.settings["max_model_len"] == 100
    [line] = caplog.messages
    assert line == (
        "using vLLM's block manager, not pyengine's: "
        "the connector PoolConnector uses vLLM's own pool of blocks"
    )
    assert sys.modules["vllm.v1.engine.core"].get_request_block_hasher(16, hash) == "a hasher"
    assert isinstance(vllm.Scheduler(engine_config()).kv_cache_manager, KVCacheManager)


IN_SCOPE: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"specs": (MLAAttentionSpec(),)}, {}),
    ({"specs": (SlidingWindowSpec(),)}, {}),
    ({"specs": (FullAttentionSpec(), SlidingWindowSpec(), SlidingWindowSpec())}, {}),
    ({"specs": (FullAttentionSpec(), FullAttentionSpec()), "enable_caching": False}, {}),
    ({"enable_caching": False}, {}),
    ({"specs": (FullAttentionSpec(), MambaSpec(), MambaSpec())}, {}),
    (
        {
            "specs": (FullAttentionSpec(), MambaSpec(64, mamba_cache_mode="none")),
            "enable_caching": False,
        },
        {},
    ),
    ({}, {"connector": KVConnectorBase_V1()}),
    ({}, {"connector": MultiConnector(KVConnectorBase_V1())}),
]
OUT_OF_SCOPE: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("no KV cache", {"groups": 0}, {}),
    ("exactly one group", {"specs": (MambaSpec(),)}, {}),
    ("exactly one group", {"specs": (SlidingWindowSpec(), MambaSpec())}, {}),
    ("is none, not align", {"specs": (FullAttentionSpec(), MambaSpec(4, "none"))}, {}),
    ("speculative", {"specs": (FullAttentionSpec(), MambaSpec(num_speculative_blocks=2))}, {}),
    ("speculative", {"specs": (FullAttentionSpec(), MambaSpec())}, {"drafts": "ngram"}),
    (
        "recurrent layers differ",
        {"specs": (FullAttentionSpec(), MambaSpec(), MambaSpec(num_prefill_checkpoint_blocks=1))},
        {},
    ),
    ("several sizes", {"specs": (FullAttentionSpec(), MambaSpec(8))}, {}),
    ("sliding_window is 8", {"specs": (FullAttentionSpec(sliding_window=8),)}, {}),
    ("attention_chunk_size", {"specs": (FullAttentionSpec(attention_chunk_size=8),)}, {}),
    ("not causal", {"specs": (FullAttentionSpec(non_causal=True),)}, {}),
    ("before the window", {"specs": (SlidingWindowSpec(extra_retained_tokens=1),)}, {}),
    ("before the window", {"specs": (SlidingWindowSpec(prefix_replay_tokens=4),)}, {}),
    ("several sizes", {"hash_block_size": 2}, {}),
    ("several sizes", {"specs": (FullAttentionSpec(), SlidingWindowSpec(block_size=8))}, {}),
    (
        "one token",
        {
            "specs": (FullAttentionSpec(block_size=1),),
            "hash_block_size": 1,
            "scheduler_block_size": 1,
        },
        {},
    ),
    (
        "name the group",
        {"specs": (FullAttentionSpec(), FullAttentionSpec()), "enable_kv_cache_events": True},
        {},
    ),
    ("retention", {"specs": (SlidingWindowSpec(),), "retention": 64}, {}),
    (
        "of several groups",
        {"specs": (FullAttentionSpec(), SlidingWindowSpec())},
        {"connector": KVConnectorBase_V1()},
    ),
    (
        "embeddings",
        {"specs": (SlidingWindowSpec(),)},
        {"model": {"enable_prompt_embeds": True}},
    ),
    ("EAGLE", {"use_eagle": True}, {}),
    ("several modules", {"num_prefill_lookahead": 2}, {}),
    ("dcp_world_size is 2", {"dcp_world_size": 2}, {}),
    ("pcp_world_size is 4", {"pcp_world_size": 4}, {}),
    ("kv_cache_metrics", {"metrics_collector": object()}, {}),
    ("HiSparse", {"host": 5}, {}),
    ("prefix_cache_retention_interval", {"retention": 64}, {}),
    ("pooling", {}, {"model": {"runner_type": "pooling"}}),
    ("an encoder", {}, {"model": {"is_encoder_decoder": True}}),
    ("diffusion", {}, {"model": {"is_diffusion": True}}),
    ("prefill_context_parallel_size", {}, {"pcp": 2}),
    ("the connector PoolConnector", {}, {"connector": PoolConnector()}),
    ("PoolConnector", {}, {"connector": MultiConnector(KVConnectorBase_V1(), PoolConnector())}),
]


def scheduler_of(engine: dict[str, Any]) -> Any:
    """A Scheduler that has no manager yet."""
    connector = engine.get("connector")
    rest = {name: value for name, value in engine.items() if name != "connector"}
    return SimpleNamespace(vllm_config=engine_config(**rest), connector=connector)


@pytest.mark.parametrize(("more", "engine"), IN_SCOPE)
def test_what_is_in_scope(more: dict[str, Any], engine: dict[str, Any]) -> None:
    more = dict(more)
    given = settings(*more.pop("specs", ()), **more)
    given["kv_cache_config"].prefix_cache_retention_interval = None
    assert plugin.out_of_scope(given, scheduler_of(engine), CLASSES) is None
    assert plugin.out_of_scope(given, None, CLASSES) is None


@pytest.mark.parametrize(("reason", "more", "engine"), OUT_OF_SCOPE)
def test_what_is_out_of_scope(reason: str, more: dict[str, Any], engine: dict[str, Any]) -> None:
    more = dict(more)
    groups, host, retention = (more.pop(name, None) for name in ("groups", "host", "retention"))
    manager_settings = settings(*more.pop("specs", ()), **more)
    if groups == 0:
        manager_settings["kv_cache_config"].kv_cache_groups = []
    manager_settings["kv_cache_config"].prefix_cache_retention_interval = retention
    manager_settings["kv_cache_config"].hisparse_host_num_blocks = host
    actual = plugin.out_of_scope(manager_settings, scheduler_of(engine), CLASSES)
    assert actual is not None
    assert reason in actual


def duplicates(scheduler: Any) -> tuple[Any, Any]:
    """Two requests with one prompt that did not look into the cache, a step later."""
    manager = scheduler.kv_cache_manager
    first = Request("a", list(range(8)), skip_reading_prefix_cache=True)
    second = Request("b", list(range(8)), skip_reading_prefix_cache=True)
    manager.new_step_starts()
    admit(manager, first), admit(manager, second)
    manager.take_new_block_ids()
    manager.new_step_starts()
    decode(manager, first), decode(manager, second)
    return first, second


def test_workers_are_told_of_merged_blocks_where_steps_do_not_overlap(vllm: Any) -> None:
    plugin.register()
    scheduler = vllm.Scheduler(engine_config())
    data = scheduler._make_cached_request_data(running_reqs=[*duplicates(scheduler)])
    assert data.resumed_req_ids == {"b"}
    assert data.new_block_ids == [None, ([1, 2, 6],)]
    assert data.req_ids == ["a", "b"]


@pytest.mark.parametrize("reason", ["overlapping", "use_pp", "use_v2_model_runner", "connector"])
def test_elsewhere_duplicates_stay(vllm: Any, reason: str) -> None:
    plugin.register()
    connector = KVConnectorBase_V1() if reason == "connector" else None
    scheduler = vllm.Scheduler(engine_config(), reason == "overlapping", connector)
    if reason.startswith("use_"):
        setattr(scheduler, reason, True)
    data = scheduler._make_cached_request_data([*duplicates(scheduler)], [])
    assert (data.resumed_req_ids, data.new_block_ids) == (set(), [None, None])


def test_a_scheduler_with_vllms_own_manager_is_left_alone(vllm: Any) -> None:
    plugin.register()
    scheduler = vllm.Scheduler(engine_config(model={"runner_type": "pooling"}))
    data = scheduler._make_cached_request_data([Request("a", [1])], [])
    assert data.new_block_ids == [None]


def test_connectors_get_vllms_hashes(vllm: Any) -> None:
    plugin.register()
    scheduler = vllm.Scheduler(engine_config(), connector=KVConnectorBase_V1())
    assert isinstance(scheduler.kv_cache_manager, KVCacheManager)
    assert sys.modules["vllm.v1.engine.core"].get_request_block_hasher(16, hash) == "a hasher"


@pytest.mark.parametrize(("invalid", "cached"), [(None, 12), (set(), 12), ({2}, 4), ({1}, 0)])
def test_a_synchronous_load_ends_before_its_output_is_handled(
    vllm: Any, invalid: set[int] | None, cached: int
) -> None:
    plugin.register()
    scheduler = vllm.Scheduler(engine_config(), connector=KVConnectorBase_V1())
    manager, request = scheduler.kv_cache_manager, Request("a", list(range(14)))
    manager.new_step_starts()
    manager.get_computed_blocks(request)
    manager.allocate_slots(request, 6, num_external_computed_tokens=8)
    manager.take_new_block_ids()
    step = SimpleNamespace(request=request)
    assert scheduler._build_kv_connector_meta("a connector", step) == ("a connector", step)
    before = SimpleNamespace(request=request)  # a step that was planned earlier
    transfers = None if invalid is None else SimpleNamespace(invalid_block_ids=invalid)
    output = SimpleNamespace(kv_connector_output=transfers)
    assert scheduler.update_from_output(before, output) == 0
    assert scheduler.update_from_output(step, output) == cached
