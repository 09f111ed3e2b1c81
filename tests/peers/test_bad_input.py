"""What is not ours to manage goes back to vLLM's own manager, in vLLM's real Scheduler; and what
users do at the wrong time leaves nothing behind."""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is in the peers' environment: make vllm-tests")

from pyengine.integrations import vllm as plugin
from pyengine.integrations.vllm_manager import KVCacheManager
from tests.peers.connector import POOL_CONNECTOR, connected
from tests.peers.test_differential import check_nothing_is_held
from tests.peers.world import Settings, World, make_scheduler, managers


def connector(config: Any, cache: Any) -> None:
    connected()(config, cache)
    config.kv_transfer_config.kv_connector = POOL_CONNECTOR


def recurrent(*groups: dict[str, Any], attention: int = 1) -> Callable[[Any, Any], None]:
    """So many groups of full attention, and groups of recurrent layers with these settings."""

    def adjust(config: Any, cache: Any) -> None:
        from vllm.v1.kv_cache_interface import KVCacheGroupSpec, MambaSpec

        [full] = cache.kv_cache_groups
        spec = full.kv_cache_spec
        given = {"block_size": spec.block_size, "shapes": ((1, 1),), "dtypes": (spec.dtype,)}
        states = [MambaSpec(**given | settings) for settings in groups]
        added = [KVCacheGroupSpec([f"states {index}"], state) for index, state in enumerate(states)]
        cache.kv_cache_groups[:] = [full] * attention + added

    return adjust


def retention(config: Any, cache: Any) -> None:
    recurrent({})(config, cache)
    cache.prefix_cache_retention_interval = 6


def context_parallel(config: Any, cache: Any) -> None:
    config.parallel_config.decode_context_parallel_size = 2


def nothing(config: Any, cache: Any) -> None:
    pass


@pytest.mark.parametrize(
    ("adjust", "runner", "reason"),
    [
        (connector, "auto", "the connector PoolConnector uses vLLM's own pool of blocks"),
        (
            recurrent({"num_speculative_blocks": 2}),
            "auto",
            "recurrent layers with speculative decoding",
        ),
        (recurrent({"mamba_cache_mode": "align"}), "auto", "mamba_cache_mode is align, not none"),
        (recurrent({}, attention=2), "auto", "exactly one group of full attention"),
        (recurrent({}, attention=0), "auto", "exactly one group of full attention"),
        (
            recurrent({}, {"num_prefill_checkpoint_blocks": 1}),
            "auto",
            "groups of recurrent layers",
        ),
        (context_parallel, "auto", "context parallelism (dcp_world_size is 2)"),
        (nothing, "pooling", "the model is a pooling model"),
    ],
)
def test_what_is_not_ours_is_vllms(
    adjust: Callable[[Any, Any], None], runner: str, reason: str, folder: Path
) -> None:
    own, _ = managers()
    plugin.state.reasons.clear()
    settings = Settings(ours=True, caching=False, runner=runner, adjust=adjust)
    scheduler = make_scheduler(settings, folder)
    assert type(scheduler.kv_cache_manager) is own
    [given] = plugin.state.reasons
    assert reason in given


def test_an_interval_of_states_inside_blocks_is_refused_by_vllm(folder: Path) -> None:
    with pytest.raises(ValueError, match="multiple of scheduler_block_size"):
        make_scheduler(Settings(ours=True, caching=False, adjust=retention), folder)


def test_a_vllm_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    own, ours = managers()
    module = importlib.import_module("vllm.v1.core.sched.scheduler")
    monkeypatch.setattr(module, "KVCacheManager", own)
    monkeypatch.setattr(importlib.import_module("vllm"), "__version__", "0.33.0")
    monkeypatch.setenv(plugin.SWITCH, "1")
    plugin.register()
    assert module.KVCacheManager is own
    assert ours is not own


def test_a_request_that_is_finished_twice(folder: Path) -> None:
    world = World(Settings(ours=True), folder)
    world.add("once", list(range(10)), max_tokens=2)
    world.add("aborted", list(range(20)), max_tokens=50)
    request = world.scheduler.requests["once"]
    for _ in range(3):
        world.step()
    for name in ("once", "aborted", "aborted"):
        world.abort(name)
    world.manager.free(request)
    world.drain()
    assert world.worker.wrong == []
    check_nothing_is_held(world)


@pytest.mark.parametrize("caching", [True, False])
def test_an_abort_between_look_up_and_allocation(caching: bool, folder: Path) -> None:
    """There is no room for the second one: it was looked up, waits, and its caller goes away."""
    world = World(Settings(ours=True, num_blocks=12, caching=caching), folder)
    world.add("first", list(range(38)), max_tokens=4)
    world.step()
    world.add("second", [*range(8), *range(50, 70)], max_tokens=4)
    looked_up = 0
    look_up = world.manager.get_computed_blocks

    def counted(request: Any) -> Any:
        nonlocal looked_up
        looked_up += 1
        return look_up(request)

    world.manager.get_computed_blocks = counted
    world.step()
    assert looked_up == 1
    assert world.manager.get_block_ids("second") == ([],)
    world.manager.get_computed_blocks(world.scheduler.requests["second"])  # and in mid-step
    world.abort("second")
    world.drain()
    assert world.outputs["second"] == []
    assert len(world.outputs["first"]) == 4
    assert world.worker.wrong == []
    check_nothing_is_held(world)


def test_ours_is_what_the_others_are_compared_with(folder: Path) -> None:
    scheduler = make_scheduler(Settings(ours=True), folder)
    assert isinstance(scheduler.kv_cache_manager, KVCacheManager)
