"""The benchmark of a prefix that is read once: both ways run, and its table."""

import pytest

from benches.engine import shared_length


def test_both_ways_are_measured_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_length, "ROUNDS", 2)
    monkeypatch.setattr(shared_length, "LENGTHS", (0, 256))
    found = {"float32": {str(at): shared_length.measure("float32", at) for at in (0, 256)}}
    assert all(set(item) == {"once", "each"} for item in found["float32"].values())
    found["float32"]["256"] = {"once": 100.0, "each": 400.0}
    about = {"cpu": "one", "cores": 2, "date": "today", "isa": "amx"}
    rows = list(shared_length.table({"about": about, "microseconds": found}))
    assert rows[0] == "one (amx), 2 cores, today, medians of 2 rounds, microseconds"
    assert rows[-1] == "| 256 | 100 | 400 | 0.25 |"
