"""A backend is tried out before anything is built on it; what fails gives way, and says why."""

import logging
import sys
from dataclasses import replace

import pytest
import torch

from pyengine.attention import AttentionNeeds, LayerNeeds, flashinfer, registry, select_backend
from pyengine.attention.gather import GatherBackend
from pyengine.attention.trial import try_out
from pyengine.core.errors import ConfigurationError
from tests.unit.attention import fake_kernels

LAYER = LayerNeeds(query_heads=4, kv_heads=2, head_dim_k=64, head_dim_v=64)
LAYERS = (LAYER, replace(LAYER, window=8, softcap=2.0), replace(LAYER, sinks=True))
CPU_NEEDS = AttentionNeeds(device=torch.device("cpu"), layers=LAYERS, dtype=torch.bfloat16)


@pytest.fixture
def on_cpu(monkeypatch):
    """flashinfer as if it ran on the CPU."""
    candidate = registry._CANDIDATES["flashinfer"]
    serves = replace(candidate, obstacle=lambda needs: None)
    monkeypatch.setitem(registry._CANDIDATES, "flashinfer", serves)
    monkeypatch.setattr(flashinfer, "_WORKSPACE_BYTES", 1024)


def test_the_oracle_passes_for_every_kind_of_layer():
    assert try_out(GatherBackend, CPU_NEEDS, 16) is None


def test_every_kind_of_layer_is_tried():
    seen = []

    class Watching(GatherBackend):
        def plan(self, inputs):
            plan = super().plan(inputs)
            forward = plan.forward

            def watched(layer, query, key, value, options):
                seen.append((len(query), options.sliding_window, options.sinks is not None))
                return forward(layer, query, key, value, options)

            plan.forward = watched
            return plan

    assert try_out(Watching, replace(CPU_NEEDS, layers=LAYERS * 5), 16) is None
    kinds = [(None, False), (8, False), (None, True)]
    assert seen == [(n, *kind) for n in (3, 1) for kind in kinds]


def test_what_works_is_chosen(on_cpu, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flashinfer", fake_kernels.flashinfer)
    with caplog.at_level(logging.INFO):
        assert select_backend("auto", CPU_NEEDS).backend == "flashinfer"
    assert "attention backend flashinfer: its paged kernels serve this model" in caplog.text


def test_a_package_that_does_not_import_gives_way_with_a_warning(on_cpu, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    choice = select_backend("auto", CPU_NEEDS)
    assert choice.backend == "gather"
    assert "flashinfer: it was tried and failed with ModuleNotFoundError" in choice.reason
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "flashinfer: it was tried and failed with ModuleNotFoundError" in caplog.text


def test_kernels_that_do_not_compile_are_an_error_where_they_were_asked_for(on_cpu, monkeypatch):
    class Broken(fake_kernels.BatchPrefillWithPagedKVCacheWrapper):
        def plan(self, *args, **settings):
            raise RuntimeError("ninja:\n nvcc was not found")

    package = type(sys)("flashinfer")
    package.BatchDecodeWithPagedKVCacheWrapper = fake_kernels.BatchDecodeWithPagedKVCacheWrapper
    package.BatchPrefillWithPagedKVCacheWrapper = Broken
    monkeypatch.setitem(sys.modules, "flashinfer", package)
    with pytest.raises(ConfigurationError, match="failed with RuntimeError: ninja: nvcc was not"):
        select_backend("flashinfer", CPU_NEEDS)
    assert "nvcc was not found" in select_backend("auto", CPU_NEEDS).reason
