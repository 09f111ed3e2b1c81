"""docs/explanation/attention.md: its table has every backend."""

import re

from pyengine.attention.choice import _CANDIDATES, backend_class
from tests.support.docs import ROOT
from tests.support.without_torch import needs_torch

DOCUMENT = "docs/explanation/attention.md"


@needs_torch
def test_the_table_names_every_backend_and_its_block() -> None:
    rows = re.findall(r"^\| `([\w-]+)` \|.*\| (\d+) \|$", (ROOT / DOCUMENT).read_text(), re.M)
    known = [(name, str(backend_class(name).block_size)) for name in _CANDIDATES]
    assert rows == known
