"""Every documented Python block that uses the block manager also runs with two layer groups."""

import re

import pytest

from tests.support.docs import ROOT, blocks, printed, run

DOCUMENTS = ["README.md", *sorted(str(p.relative_to(ROOT)) for p in (ROOT / "docs").rglob("*.md"))]
CALLS = re.compile(r"BlockManager\((?!groups=)(?P<rest>[^()]*)\)")
NUM_BLOCKS = re.compile(r"num_blocks=(\d+)")
OF_GROUPS = re.compile(
    r"block|usage|copies|snapshot|state_|tables|prefixes|evict|Usage|Room|slot_mapping|path|free"
    r"|held|merges"
)
"""What a line prints depends on the number of layer groups: block ids, counts of blocks, slots."""
OF_ARRAYS = (
    (
        r"np\.zeros\((\d+), np\.int64\) for name",
        r"np.zeros((2, \1)[name != 'slot_mapping' :], np.int64) for name",
    ),
    (r"block_tables=np\.zeros\(\(", "block_tables=np.zeros((2, "),
    (r"tables = np\.zeros\(\(", "tables = np.zeros((2, "),
    (r"([ (])tables\[", r"\1tables[0, "),
)
"""Arrays of slots and block tables have a first dimension for the layer groups: windows.md."""
CHECK = """
import gc
for each in gc.get_objects():
    if type(each).__name__ == "BlockManager":
        each.check()
"""


def with_groups(code: str, groups: str) -> str:
    """The code with these layer groups in every manager that has one, and blocks for both."""

    def call(match: re.Match[str]) -> str:
        rest = match["rest"]
        if "groups=" in rest:
            return match[0]
        rest = NUM_BLOCKS.sub(lambda found: f"num_blocks={2 * int(found[1])}", rest)
        return f"BlockManager({rest}, groups={groups})"

    code = CALLS.sub(call, code)
    for pattern, changed in OF_ARRAYS:
        code = re.sub(pattern, changed, code)
    return re.sub(r"(\"slot_mapping\"\])\[", r"\1[0][", code)


def cases() -> list[object]:
    found = []
    for document in DOCUMENTS:
        for number, code in enumerate(blocks(document, "python")):
            if CALLS.search(code):
                name = f"{document.removeprefix('docs/')}-{number}"
                found.append(pytest.param(code, id=name))
    return found


def comparable(code: str) -> list[int]:
    """The lines that print the same with any number of layer groups."""
    lines = re.findall(r"^\s*(print\(.*\)  # .+)$", code, re.MULTILINE)
    return [at for at, line in enumerate(lines) if not OF_GROUPS.search(line)]


def test_there_is_something_to_run() -> None:
    assert len(cases()) >= 25


@pytest.mark.parametrize("groups", ["[None, None]", "[None, 64]"])
@pytest.mark.parametrize("code", cases())
def test_a_block_runs_with_two_layer_groups(code: str, groups: str) -> None:
    changed = with_groups(code, groups)
    lines = run(changed + CHECK).splitlines()
    assert len(lines) == len(printed(code))
    for at in comparable(code):
        assert lines[at] == printed(code)[at]
