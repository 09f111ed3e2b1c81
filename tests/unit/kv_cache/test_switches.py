"""Through the Python API: a namespace that switches at a position."""

import pytest

from pyengine.kv_cache import BlockManager, ConfigError, PinError, Stored
from tests.support.blocks import computed

TOKENS = list(range(13))
ADAPTER = (5, b"adapter")


def test_blocks_before_the_switch_are_shared() -> None:
    manager = BlockManager(32, 4, events=True, partial_reuse=False)
    computed(manager, TOKENS, namespace=b"base")
    manager.take_events()
    assert computed(manager, TOKENS, namespace=b"base", switch=ADAPTER).num_cached_tokens == 4
    events = [event for event in manager.take_events() if isinstance(event, Stored)]
    assert [event.switch for event in events] == [ADAPTER, ADAPTER]
    assert computed(manager, TOKENS, namespace=b"base", switch=ADAPTER).num_cached_tokens == 12
    matched = [
        manager.match_prefix(TOKENS, namespace=b"base", switch=switch).num_tokens
        for switch in (None, ADAPTER, (5, b"other"), (6, b"adapter"), (8, b"other"), (90, b"x"))
    ]
    assert matched == [12, 12, 4, 4, 8, 12]
    assert manager.explain(TOKENS, namespace=b"base", switch=ADAPTER).num_pool_tokens == 12
    pin = manager.match_prefix(TOKENS, namespace=b"base", switch=ADAPTER)
    with pytest.raises(PinError):
        manager.sequence(TOKENS, namespace=b"base").attach(pin)
    manager.check()


@pytest.mark.parametrize("switch", [(-1, b"x"), (1 << 32, b"x"), (0, b"")])
def test_bad_switches(switch: tuple[int, bytes]) -> None:
    manager = BlockManager(4, 4)
    with pytest.raises(ConfigError, match="switch"):
        manager.sequence([1], switch=switch)
