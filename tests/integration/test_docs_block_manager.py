"""The block manager's pages: guide, reference and formats name what there is."""

import inspect
import re
import sys
from typing import Any

import pytest

from benches.test_block_manager import CASES
from pyengine import _cpu, _kv
from pyengine.kv_cache import COUNTERS, BlockManager, Pin, Sequence, StepPlan, Stored
from tests.support.docs import ROOT, table
from tests.support.processes import run_program

GUIDE = "docs/guides/block-manager.md"
REFERENCE = "docs/reference/block-manager.md"
FORMATS = "docs/reference/formats.md"
COSTS = "docs/benchmarks/block-manager.md"


def methods(kind: type) -> set[str]:
    names = {name for name in vars(kind) if not name.startswith("_")}
    return {name for name in names if inspect.isroutine(vars(kind)[name])}


@pytest.mark.parametrize(
    ("module", "page"), [(_kv, REFERENCE), (_cpu, "docs/reference/cpu-kernels.md")]
)
def test_the_reference_has_everything_with_a_docstring(module: Any, page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(rf"^::: {re.escape(module.__name__)}\.(\w+)$", text, re.MULTILINE)
    public = {name for name in module.__all__ if not name.startswith("_")}
    assert sorted(named) == sorted(public - {"Stats"}), "Stats has the table of counters"
    for name in named:
        kind = getattr(module, name)
        assert kind.__doc__, name
        if inspect.isclass(kind):
            bare = {f"{name}.{each}" for each in methods(kind) if not getattr(kind, each).__doc__}
            assert bare <= {"CpuAttention.is_fast", "CpuAttention.isa"}


def test_vectors_are_the_hashes_that_events_carry() -> None:
    rows = table(FORMATS, "namespace", "parent", "tokens", "hash")
    said = {(name, parent, tokens, name_) for name, parent, tokens, name_ in rows}
    found = set()
    for namespace in (b"", b"tenant"):
        manager = BlockManager(4, 4, events=True, hash_seed=0)
        sequence = manager.sequence([1, 2, 3, 4, 5, 6, 7, 8], namespace=namespace)
        plan = manager.begin_step(8)
        plan.prefill(sequence, 8)
        plan.commit([0])
        for event in manager.take_events():
            assert isinstance(event, Stored)
            assert event.namespace == namespace
            parent = "the root" if event.parent is None else event.parent.hex()
            tokens = ", ".join(map(str, event.tokens))
            found.add((f'b"{namespace.decode()}"', parent, tokens, event.hash.hex()))
    assert said == found
    assert len(rows) == 4


def test_every_counter_is_listed_and_exists() -> None:
    assert list(COUNTERS) == list(BlockManager(1, 1).stats().as_dict())
    assert "<!-- table: counters -->" in (ROOT / REFERENCE).read_text(encoding="utf-8")


def test_every_call_has_its_cost() -> None:
    kinds = (BlockManager, Sequence, StepPlan, Pin)
    real = {f"{kind.__name__}.{name}" for kind in kinds for name in methods(kind)}
    named = {row[0] for row in table(COSTS, "call", "O(...)")}
    assert named == real | {"BlockManager()", "StepBuffers()", "Sequence.block_table"}


def test_the_guides_calls_exist() -> None:
    called = re.findall(r"`(manager|plan)\.(\w+)", (ROOT / GUIDE).read_text(encoding="utf-8"))
    assert len(called) > 6
    kinds = {"manager": BlockManager, "plan": StepPlan}
    assert not [(on, name) for on, name in called if not hasattr(kinds[on], name)]


def test_recorded_operations_are_those_of_the_format() -> None:
    source = (ROOT / "rust/kv-core/src/calls.rs").read_text(encoding="utf-8")
    calls = re.findall(r"^    (\w+) [A-Z]\w+ {(.*)}$", source, re.MULTILINE)
    real = [
        (str(variant), name, re.findall(r"(\w+):", fields))
        for variant, (name, fields) in enumerate(calls)
    ]
    said = [
        (variant, name, re.findall(r"\w+", re.sub(r"\(.*\)", "", arguments)))
        for variant, name, arguments, _ in table(FORMATS, "variant", "call")
    ]
    assert len(said) == 36
    assert said == real


def test_the_table_of_costs_names_what_is_timed() -> None:
    said = table(COSTS, "call", "O(...)")
    assert [row[:3] for row in said] == [[case.call, case.cost, case.of] for case in CASES]
    assert all(float(row[3]) > 0 for row in said)


def test_what_is_timed_runs() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--benchmark-disable", "benches"]
    done = run_program(command)
    assert f"{len(CASES)} passed" in done.stdout


def test_the_example_in_rust_exists() -> None:
    [name] = re.findall(r"--example (\w+)", (ROOT / GUIDE).read_text(encoding="utf-8"))
    assert (ROOT / "rust/kv-core/examples" / f"{name}.rs").is_file()
