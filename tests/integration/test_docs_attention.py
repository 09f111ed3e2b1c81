"""docs/explanation/attention.md: its table has every backend."""

import re

from pyengine.attention.choice import _CANDIDATES
from tests.support.docs import ROOT

DOCUMENT = "docs/explanation/attention.md"


def test_the_table_names_every_backend_and_its_block() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (\d+) \|$", (ROOT / DOCUMENT).read_text(), re.M)
    known = [(name, str(candidate.block_size)) for name, candidate in _CANDIDATES.items()]
    assert rows == known
