"""docs/guides/embedding.md: what it names is there."""

import json
import re

from pyengine.integrations import vllm as plugin
from tests.support.docs import ROOT, table

DOCUMENT = "docs/guides/embedding.md"


def test_the_switch_the_plugin_and_the_version_are_the_plugins() -> None:
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    assert f"{plugin.SWITCH}=1 vllm serve" in text
    assert f"`{plugin.PLUGIN}`" in text
    assert f"For vLLM {plugin.SERIES}.x" in text


def test_tests_of_vllm_that_are_out_are_those_of_the_runner() -> None:
    named = json.loads((ROOT / "tests/peers/vllm_own/left_out.json").read_text())
    rows = {
        row[0]: row[1]
        for row in table("docs/benchmarks/vllm.md", "tests", "why")
        if row[0].startswith("test_")
    }
    assert rows == named


def test_nano_vllms_names() -> None:
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    for module in re.findall(r"(pyengine\.integrations\.\w+)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file()
