"""The environment of a rank while it loads, and what is left of it."""

import os

import pytest

from pyengine.executor.tensor_parallel.ranks import rank_environment

NAMES = ("LOCAL_RANK", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)


def environment() -> list[str | None]:
    return [os.environ.get(name) for name in NAMES]


@pytest.mark.parametrize("rank", [0, 3])
def test_every_rank_has_its_number_and_talks_over_the_loopback(rank: int) -> None:
    with rank_environment(rank):
        assert environment() == [str(rank), "lo"]
    assert environment() == [None, None]


def test_the_users_interface_stays_and_what_was_there_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "7")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth1")
    with pytest.raises(ValueError, match="while loading"), rank_environment(0):
        assert environment() == ["0", "eth1"]
        raise ValueError("while loading")
    assert environment() == ["7", "eth1"]
