"""The guard of instruction counts: what it calls wrong. The counting itself is `make guard`."""

import json

import pytest

from benches import guard

RECORDED = {"decode": 10_000, "fork": 500}


@pytest.mark.parametrize(
    ("counts", "tolerance", "wrong"),
    [
        ({"decode": 10_000, "fork": 500}, 0.02, []),
        ({"decode": 10_200, "fork": 100}, 0.02, []),
        (
            {"decode": 10_201, "fork": 500},
            0.02,
            ["decode: 10,201 instructions, its limit is 10,200"],
        ),
        ({"decode": 10_201, "fork": 500}, 0.10, []),
        ({"decode": 10_000}, 0.02, ["fork: recorded, but not an operation"]),
        (
            {"decode": 10_000, "fork": 500, "fill": 7},
            0.02,
            ["fill: 7 instructions, and no limit yet"],
        ),
    ],
)
def test_what_is_wrong(counts: dict[str, int], tolerance: float, wrong: list[str]) -> None:
    assert guard.compare(counts, RECORDED, tolerance) == wrong


def test_every_limit_is_a_number_of_instructions() -> None:
    limits = json.loads(guard.LIMITS.read_text())
    assert limits["toolchain"].keys() == {"machine", "rustc", "libc"}
    assert len(limits["instructions"]) >= 10
    assert all(count > 0 for count in limits["instructions"].values())
