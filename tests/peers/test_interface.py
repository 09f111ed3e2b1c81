"""The vLLM that is installed has the interface that the plugin was written for."""

import pytest

pytest.importorskip("vllm", reason="vLLM is in the peers' environment: make vllm-tests")

from tests.support.vllm_interface import describe, drift, recorded


def test_vllm_has_not_drifted() -> None:
    assert drift(describe(), recorded()) == []
