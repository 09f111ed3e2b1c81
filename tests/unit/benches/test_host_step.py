"""The bench of the host's part of a decode step: it runs, and counts what is copied."""

import pytest

from benches.gpu.host_step import Case, figures, main


@pytest.mark.parametrize("longest", [False, True])
@pytest.mark.parametrize("groups", [1, 7])
def test_what_is_copied_does_not_follow_from_the_width_of_the_tables(
    groups: int, longest: bool
) -> None:
    cases = [Case(4, pages, groups, longest) for pages in (64, 128)]
    rows = list(figures(cases, 2))
    assert [match["copies"] for match in rows] == [1] * 2
    slots = -(-4 * 8 * groups // 64) * 64  # each array begins at a multiple of 64 bytes
    assert [match["bytes"] for match in rows] == [5 * 64 + slots] * 2


def test_it_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--steps", "2", "--rows", "3", "--pages", "64", "--groups", "1"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert lines[2].startswith("| 3 | 64 | 1 | no |")
