"""The bench of speculation asks vLLM as it asks ours, and says who does not come up."""

from pathlib import Path
from typing import Any

import pytest

from benches.engine import speculative
from benches.engine.serve import GenerateRequest
from benches.engine.speculative import NGRAM, Figure, Work, peer, peers, rows
from pyengine import SamplingParams


class Peer:
    def __init__(self) -> None:
        self.asked: list[GenerateRequest] = []

    def generate(self, request: GenerateRequest) -> dict[str, Any]:
        self.asked.append(request)
        tokens = [[7] * (at + 1) for at in range(len(request.prompts))]
        return {"seconds": 0.5, "tokens": tokens}


def test_a_peer_has_its_prompts_in_the_cache_and_stops_where_it_ends() -> None:
    engine: Any = Peer()
    params = SamplingParams(temperature=0.8, max_tokens=9, stop=["\n\n"])
    figure = peer(engine, "vLLM", 2, Work("prose", [[1], [2], [3]], params))
    assert (figure.seconds, figure.tokens, figure.per_step) == (1.0, 4, None)
    assert [request.max_tokens for request in engine.asked] == [1, 9, 1, 9]
    settings = engine.asked[3].settings()
    assert settings["ignore_eos"] is False and settings["detokenize"] is True
    assert (settings["stop"], settings["seed"], settings["temperature"]) == (["\n\n"], 2, 0.8)


def test_ratios_are_to_the_first_engine_and_nothing_is_said_that_is_not_known() -> None:
    ours = [Figure("prose", 1, NGRAM, 1.0, 10, 2.5), Figure("prose", 1, "vLLM", 2.0, 10, None)]
    assert rows([ours]) == [
        "| prose | 1 | ngram | 10.0 | 1.00 | 2.50 |",
        "| prose | 1 | vLLM | 5.0 | 0.50 |  |",
    ]


def test_a_peer_that_refuses_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_name: str, _dtype: str, _caches: Path, options: dict[str, Any]) -> None:
        if options:
            raise RuntimeError("no ngram on a CPU")

    monkeypatch.setattr(speculative, "Engine", refuse)
    assert list(peers("bfloat16", Path())) == ["vLLM"]
    assert "vLLM, ngram: no ngram on a CPU" in capsys.readouterr().err
