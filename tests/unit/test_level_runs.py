"""`make test-levels`: which levels run, and what its last line says."""

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "tools" / "levels.py"
EPYC = "fpu sse2 avx2 fma"
XEON = f"{EPYC} avx512f avx512bw avx512dq avx512vl avx512_vnni"


@pytest.fixture
def levels(monkeypatch) -> Any:
    spec = importlib.util.spec_from_file_location("levels_of_tests", PATH)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("flags", "failing", "required", "status", "line"),
    [
        (
            EPYC,
            "",
            "",
            0,
            "passed at plain, avx2; lacking here: neon (no record), avx512 (no record), "
            "avx512_vnni (no record), avx512_bf16 (no record), amx (last: A, 2026-01-02)",
        ),
        (XEON, "", "avx2", 0, "passed at plain, avx2, avx512, avx512_vnni; lacking here: neon "),
        (EPYC, "avx2", "", 1, "passed at plain; FAILED at avx2; lacking here"),
        (EPYC, "", "amx,avx2", 1, "REQUIRED and lacking: amx"),
        ("fp asimd", "", "", 0, "passed at plain, neon; lacking here: avx2 (no record), avx512"),
        ("", "", "", 0, "passed at plain; lacking here: neon (no record), avx2"),
    ],
)
def test_the_last_line_names_what_ran_and_what_is_lacking(
    levels, monkeypatch, capsys, tmp_path, flags, failing, required, status, line
):
    monkeypatch.setattr(levels, "RECORD", tmp_path / "levels.json")
    levels.RECORD.write_text(json.dumps({"amx": {"machine": "A", "date": "2026-01-02"}}))
    monkeypatch.setattr(levels, "cpu_flags", lambda: frozenset(flags.split()))
    monkeypatch.setattr(levels, "run", lambda level, _: level.name != failing)
    monkeypatch.setenv("REQUIRE_ISA", required)
    assert levels.main([]) == status
    assert f"{line}" in capsys.readouterr().out.splitlines()[-1]


def test_levels_that_pass_are_recorded_where_that_is_asked_for(levels, monkeypatch, tmp_path):
    monkeypatch.setattr(levels, "RECORD", tmp_path / "levels.json")
    monkeypatch.setattr(levels, "cpu_flags", lambda: frozenset(XEON.split()))
    arguments = []

    def run(level: Any, others: list[str]) -> bool:
        arguments.append(others)
        return level.name != "avx512"

    monkeypatch.setattr(levels, "run", run)
    assert levels.main(["-x"]) == 1
    assert not levels.RECORD.exists()
    assert levels.main(["--record", "-x"]) == 1
    assert set(json.loads(levels.RECORD.read_text())) == {"plain", "avx2", "avx512_vnni"}
    assert re.fullmatch(r"avx2 \(last: .+, \d{4}-\d\d-\d\d\)", levels.with_last_run("avx2"))
    assert levels.with_last_run("avx512") == "avx512 (no record)"
    assert all(others == ["-x"] for others in arguments)


def test_a_required_level_that_is_not_known_is_refused_by_name(levels):
    with pytest.raises(SystemExit, match=re.escape("REQUIRE_ISA=sse: sse is none of plain, neon")):
        levels.required_levels("sse")


def test_a_level_hides_what_is_above_it_in_every_library(levels):
    avx2 = next(level for level in levels.LEVELS if level.name == "avx2")
    assert avx2.environment() == {
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
        "PYENGINE_CPU_ISA": "avx2",
        "MKL_ENABLE_INSTRUCTIONS": "AVX2",
    }
