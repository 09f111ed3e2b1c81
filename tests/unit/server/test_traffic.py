"""Every refusal is counted and, within limits, logged; each key sees its own figures."""

import json
import re
from typing import Any

import httpx2
import pytest

from pyengine.async_engine import AsyncEngine
from pyengine.server import traffic
from pyengine.server.app import create_app
from pyengine.server.settings import ServerSettings
from tests.support.docs import table
from tests.support.serving import GOOD, Client, error_of, make_client

COMPLETIONS = "/v1/completions"
SECRET = "the secret of a prompt"


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def values(text: str, name: str) -> dict[str, float]:
    """The samples of a metric, by what is in braces."""
    lines = [line for line in text.splitlines() if line.startswith(f"{name}{{")]
    return {line.split("{")[1].split("}")[0]: float(line.split()[-1]) for line in lines}


def value(text: str, name: str, **labels: str) -> float:
    labelled = {f'{key}="{label}"' for key, label in labels.items()}
    lines = [
        count for label, count in values(text, name).items() if labelled <= set(label.split(","))
    ]
    return sum(lines)


async def refusals(http: httpx2.AsyncClient, context: Any) -> list[tuple[int, str]]:
    """One request for each kind; the statuses and codes that were expected."""
    key = bearer("one")
    json_type = {"content-type": "application/json"}
    calls: list[tuple[int, str, str, str, dict[str, Any]]] = [
        (400, "invalid_json", "POST", COMPLETIONS, {"content": b"{", "headers": key | json_type}),
        (400, "", "POST", COMPLETIONS, {"json": {"prompt": {SECRET: 1}}, "headers": key}),
        (400, "unknown_parameter", "POST", COMPLETIONS, {"json": GOOD | {"x": 1}, "headers": key}),
        (401, "invalid_api_key", "POST", COMPLETIONS, {"json": GOOD, "headers": bearer("x")}),
        (403, "admin_key_needed", "GET", "/kv/stream", {"headers": key}),
        (403, "cross_site", "POST", COMPLETIONS, {"headers": key | {"origin": "http://evil"}}),
        (404, "", "GET", "/nowhere", {"headers": key}),
        (405, "", "PUT", COMPLETIONS, {"headers": key}),
        (413, "body_too_large", "POST", COMPLETIONS, {"content": b"x" * 2000, "headers": key}),
    ]
    for status, code, method, path, options in calls:
        response = await http.request(method, path, **options)
        assert (response.status_code, response.json()["error"]["code"] or "") == (status, code)
    context.is_draining = True
    assert (await http.post(COMPLETIONS, json=GOOD, headers=key)).status_code == 503
    return [(status, code) for status, code, *_ in calls] + [(503, "draining")]


@pytest.mark.parametrize("format", ["json", "none"])
async def test_every_refusal_is_a_line_and_a_count(
    format: Any, engine: AsyncEngine, capsys: pytest.CaptureFixture[str]
) -> None:
    client = make_client(
        engine,
        api_key=("one", "two"),
        admin_key=("root",),
        max_body_mib=0.001,
        log_format=format,
    )
    async with client.app.router.lifespan_context(client.app), client.open() as http:
        expected = await refusals(http, client.context)
        # The metrics are there while it drains, and nothing else is.
        response = await http.get("/metrics", headers=bearer("root"))
        assert response.status_code == 200
    text = response.text
    for status, code in expected:
        counted = value(text, "pyengine:http_refusals_total", status=f"{status}", code=code)
        assert counted == 1, (status, code)
    assert sum(values(text, "pyengine:http_refusals_total").values()) == len(expected)
    assert value(text, "pyengine:key_refusals_total", key="1") == len(expected) - 2
    shown = capsys.readouterr().err
    assert SECRET not in shown and SECRET not in text
    lines = [json.loads(line) for line in shown.splitlines() if '"refused"' in line]
    if format == "none":
        assert not lines
        return
    assert [(line["refused"], line["code"] or "") for line in lines] == expected
    assert {line["key"] for line in lines} == {"1", None} and {"/kv/stream"} < {
        line["path"] for line in lines
    }


async def test_a_flood_of_refusals_is_a_few_lines(
    engine: AsyncEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(traffic, "monotonic", lambda: now[0])
    client = make_client(engine)
    async with client.app.router.lifespan_context(client.app), client.open() as http:
        for _ in range(50):
            await http.get("/nowhere%0Aid=forged" + "x" * 1000)
        now[0] += 2.5
        for _ in range(50):
            await http.get("/nowhere")
        await http.post(COMPLETIONS, json={})
        text = (await http.get("/metrics")).text
    lines = [line for line in capsys.readouterr().err.splitlines() if "refused=" in line]
    assert [line.split("refused=")[1][:3] for line in lines] == ["404"] * 7 + ["400"]
    assert "left_out=45" in lines[5] and max(map(len, lines)) < 400
    assert not [line for line in lines if line.startswith("id=forged")]
    assert value(text, "pyengine:http_refusals_total", status="404") == 100


def test_a_defect_is_counted(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.context.engine, "submit", lambda _: 1 / 0)
    assert client.post(COMPLETIONS, GOOD).status_code == 500
    assert value(client.get("/metrics").text, "pyengine:http_refusals_total", status="500") == 1


def test_each_key_sees_its_own_figures(engine: AsyncEngine) -> None:
    app = create_app(engine, ServerSettings(api_key=("one", "two"), admin_key=("root",)))
    client = Client(app)
    body = {"prompt": [51, 52, 53] * 20, "max_tokens": 5, "ignore_eos": True, "n": 2}
    for key, times in (("one", 3), ("two", 1)):
        for stream in [False] * (times - 1) + [True]:
            response = client.post(COMPLETIONS, {**body, "stream": stream}, headers=bearer(key))
            assert response.status_code == 200
    error_of(client.post(COMPLETIONS, {}, headers=bearer("two")), 400)
    expected = {
        "requests": (3, 1),
        "prompt_tokens": (180, 60),
        "cached_tokens": (96, 0),
        "generation_tokens": (30, 10),
        "refusals": (0, 1),
    }
    texts = {key: client.get("/metrics", headers=bearer(key)).text for key in ("one", "two")}
    whole = client.get("/metrics", headers=bearer("root")).text
    for name, counts in expected.items():
        metric = f"pyengine:key_{name}_total"
        for at, key in enumerate(("one", "two")):
            assert list(values(texts[key], metric).values()) == [counts[at]], name
            assert value(texts[key], metric, key=f"{at + 1}") == counts[at]
            assert value(whole, metric, key=f"{at + 1}") == counts[at]
    for text in texts.values():
        names = {line.split("{")[0] for line in text.splitlines() if not line.startswith("#")}
        assert {name.startswith("pyengine:key_") for name in names} == {True}
    assert "vllm:generation_tokens_total" in whole
    kinds = [line.split()[2:] for line in whole.splitlines() if line.startswith("# TYPE pyengine:")]
    ours = {name for name, _ in kinds if re.match("pyengine:(http|key)_", name)}
    documented = {row[0] for row in table("docs/reference/metrics.md", "metric", "kind")}
    assert {name.removesuffix("_total") for name in ours} == {
        name.removesuffix("_total") for name in documented
    }
