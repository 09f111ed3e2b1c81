"""docs/guides/block-manager.md: its names and figures are real."""

import inspect
import re
import subprocess
import sys

import pytest

from benches.test_block_manager import CASES
from pyengine import cache
from pyengine.cache import BlockManager, KvError, Lease, Sequence, StepPlan, Stored
from tests.support.docs import ROOT, commands, table

DOCUMENT = "docs/guides/block-manager.md"
COSTS = "docs/benchmarks/block-manager.md"


def public(kind: type) -> set[str]:
    return {name for name in vars(kind) if not name.startswith("_")}


def methods(kind: type) -> set[str]:
    return {name for name in public(kind) if inspect.isroutine(vars(kind)[name])}


def test_vectors_are_the_hashes_that_events_carry() -> None:
    rows = table(DOCUMENT, "namespace", "parent", "tokens", "hash")
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


def test_every_error_is_listed_and_exists() -> None:
    named = [row[0] for row in table(DOCUMENT, "error")]
    errors = [value for value in vars(cache).values() if inspect.isclass(value)]
    real = {each.__name__ for each in errors if issubclass(each, KvError) and each is not KvError}
    assert len(named) == len(set(named))
    assert set(named) == real


def test_every_counter_is_listed_and_exists() -> None:
    named = [row[0] for row in table(DOCUMENT, "counter")]
    assert named == list(BlockManager(1, 1).stats().as_dict())


def test_every_call_has_its_cost() -> None:
    kinds = (BlockManager, Sequence, StepPlan, Lease)
    real = {f"{kind.__name__}.{name}" for kind in kinds for name in methods(kind)}
    named = {row[0] for row in table(COSTS, "call", "O(...)")}
    assert named == real | {"BlockManager()", "StepBuffers()", "Sequence.block_table"}


def test_names_in_the_tables_exist() -> None:
    plan = {row[0] for row in table(DOCUMENT, "call", "does")}
    words = {re.split(r"[.(]", name.removeprefix("plan."))[0] for name in plan}
    assert words == methods(StepPlan) | {"begin_step"}
    [*answers] = (re.match(r"(\w+)\((.*)\)", row[0]) for row in table(DOCUMENT, "answer"))
    for answer in answers:
        assert answer is not None
        fields = set(filter(None, answer[2].split(", ")))
        assert public(getattr(cache, answer[1])) == fields
    for name, fields, _ in table(DOCUMENT, "event"):
        assert public(getattr(cache, name)) == set(re.findall(r"\w+", fields)), name
    settings = [row[0] for row in table(DOCUMENT, "setting")]
    assert settings == list(inspect.signature(BlockManager).parameters)
    arrays = {row[0] for row in table(DOCUMENT, "array")}
    assert arrays == set(inspect.signature(cache.StepBuffers).parameters)


def test_recorded_operations_are_those_of_the_format() -> None:
    source = (ROOT / "rust/kv-core/src/trace/call.rs").read_text(encoding="utf-8")
    calls = re.findall(r"^    (\w+) [A-Z]\w+ {(.*)}$", source, re.MULTILINE)
    real = [
        (str(variant), name, re.findall(r"(\w+):", fields))
        for variant, (name, fields) in enumerate(calls)
    ]
    said = [
        (variant, name, re.findall(r"\w+", re.sub(r"\(.*\)", "", arguments)))
        for variant, name, arguments, _ in table(DOCUMENT, "variant", "call")
    ]
    assert len(said) == 25
    assert said == real


def test_the_table_of_costs_names_what_is_timed() -> None:
    said = table(COSTS, "call", "O(...)")
    assert [row[:3] for row in said] == [[case.call, case.cost, case.of] for case in CASES]
    assert all(float(row[3]) > 0 for row in said)


def test_what_is_timed_runs() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--benchmark-disable", "benches"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    assert f"{len(CASES)} passed" in done.stdout


def test_commands_name_what_exists() -> None:
    examples = [
        words[words.index("--example") + 1] for words in commands(DOCUMENT) if "run" in words
    ]
    assert examples
    for name in examples:
        assert (ROOT / "rust/kv-core/examples" / f"{name}.rs").is_file()


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/architecture.md"])
def test_other_pages_link_here(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)#]*block-manager\.md)\)", text)
    assert links
    for link in links:
        assert ((ROOT / page).parent / link).resolve() == ROOT / DOCUMENT
