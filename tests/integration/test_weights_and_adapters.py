"""Updates of weights and loads of adapters at random, while requests run, with a store.

No answer has a token of weights or of an adapter that its request does not name: each is that of a
fresh engine with these weights and this adapter.
"""

import asyncio
import shutil
from collections import defaultdict
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from pyengine import LLM, AsyncEngine, LoRARequest, SamplingParams
from pyengine.engine import offloading
from pyengine.errors import AdapterError
from pyengine.utils.dtypes import Rows
from tests.support.adapters import save_adapter
from tests.support.checkpoints import read_weights, save_random, save_weights

NUM_PROMPTS, NUM_WEIGHTS, NUM_CONTENTS, NAMES = 8, 6, 5, ("one", "two", "three")
SETTINGS: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "num_blocks": 400,
    "max_num_seqs": 16,
    "enable_lora": True,
    "max_loras": 3,
    "max_lora_rank": 4,
}
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=24)


@dataclass(frozen=True)
class Case:
    """A request: the number of its prompt, and of the content of its adapter."""

    prompt: int
    content: int | None


class Life:
    """An engine whose weights and adapters change, and what it has answered."""

    def __init__(self, tmp_path: Path, seed: int) -> None:
        self.random = Random(seed)
        self.model = save_random(tmp_path / "model", "llama")
        self.folder = tmp_path
        common = [self.random.randrange(3, 90) for _ in range(30)]
        self.prompts = [
            common[: self.random.randrange(10, 30)]
            + [self.random.randrange(3, 90) for _ in range(self.random.randrange(1, 12))]
            for _ in range(NUM_PROMPTS)
        ]
        self.weights = [self._weights(number) for number in range(NUM_WEIGHTS)]
        for content in range(NUM_CONTENTS):
            save_adapter(tmp_path / f"content {content}", self.model, seed=content)
        self.names: dict[str, int] = {}
        self.versions = [0]
        """The number of the weights of each version."""
        self.answers: list[tuple[Case, Any]] = []

    def _weights(self, number: int) -> dict[str, Rows]:
        random = np.random.default_rng(number)
        whole = read_weights(self.model)
        if number:
            for name, numbers in whole.items():
                noise = random.standard_normal(numbers.shape, np.float32)
                whole[name] = numbers + noise * np.float32(0.1 * numbers.std())
        return whole

    async def run(self, engine: AsyncEngine, num_requests: int, num_updates: int) -> None:
        """Requests at random, and among them updates, loads, reloads and unloads."""
        running: set[asyncio.Task[None]] = set()
        every = num_requests // num_updates
        for number in range(num_requests):
            if number % every == every - 1:
                await self._update(engine)
            if self.random.random() < 0.1:
                await self._change_adapters(engine)
            running.add(asyncio.create_task(self._ask(engine)))
            if len(running) > 24:
                _, running = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.gather(*running)

    async def _update(self, engine: AsyncEngine) -> None:
        chosen = self.random.randrange(NUM_WEIGHTS)
        mode: Any = self.random.choice(["finish", "abort", "keep", "recompute"])
        version = await engine.update_weights(self.weights[chosen], mode=mode)
        assert version == len(self.versions)
        self.versions.append(chosen)

    async def _change_adapters(self, engine: AsyncEngine) -> None:
        name = self.random.choice(NAMES)
        if self.random.random() < 0.3:
            engine.remove_lora(name)
            self.names.pop(name, None)
            return
        content = self.random.randrange(NUM_CONTENTS)
        folder = self.folder / f"of {name}"  # the same folder, with other content
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder / f"content {content}", folder)
        engine.add_lora(LoRARequest(name, str(folder)))
        self.names[name] = content

    async def _ask(self, engine: AsyncEngine) -> None:
        case = Case(self.random.randrange(NUM_PROMPTS), None)
        adapter = None
        if self.names and self.random.random() < 0.7:
            name = self.random.choice(sorted(self.names))
            adapter, case = LoRARequest(name), Case(case.prompt, self.names[name])
        output = None
        with suppress(AdapterError):  # it was unloaded meanwhile
            async for item in engine.generate(
                self.prompts[case.prompt], PARAMS, lora_request=adapter
            ):
                output = item
        if output is not None:
            self.answers.append((case, output.outputs[0]))

    def check(self) -> dict[str, int]:
        """Compare all answers with those of fresh engines; returns how many of each kind."""
        of_weights: dict[int, dict[Case, list[int]]] = defaultdict(dict)
        for case, answer in self.answers:
            for _, version in answer.weights_versions:
                of_weights[self.versions[version]][case] = []
        counts = defaultdict[str, int](int)
        for number, wanted in of_weights.items():
            fresh = self.folder / f"fresh {number}"
            shutil.copytree(self.model, fresh)
            save_weights(fresh / "model.safetensors", self.weights[number], "float32")
            with LLM(fresh, **SETTINGS, enable_prefix_caching=False) as llm:
                self._fill(llm, wanted)
                for case, answer in self.answers:
                    self._compare(llm, number, case, answer, wanted, counts)
        return counts

    def _fill(self, llm: LLM, wanted: dict[Case, list[int]]) -> None:
        cases = list(wanted)
        requests = [self._adapter(case) for case in cases]
        prompts = [self.prompts[case.prompt] for case in cases]
        for case, output in zip(
            cases, llm.generate(prompts, PARAMS, False, lora_request=requests), strict=True
        ):
            wanted[case] = output.outputs[0].token_ids

    def _adapter(self, case: Case) -> LoRARequest | None:
        if case.content is None:
            return None
        path = str(self.folder / f"content {case.content}")
        return LoRARequest(f"content-{case.content}", path)

    def _compare(
        self,
        llm: LLM,
        number: int,
        case: Case,
        answer: Any,
        wanted: dict[Case, list[int]],
        counts: dict[str, int],
    ) -> None:
        parts = answer.weights_versions
        ends = [first for first, _ in parts[1:]] + [len(answer.token_ids)]
        if self.versions[parts[0][1]] == number:  # the first tokens, or all
            assert answer.token_ids[: ends[0]] == wanted[case][: ends[0]]
            counts["whole" if len(parts) == 1 else "first part"] += 1


@pytest.mark.parametrize(
    ("seed", "num_requests", "num_updates"),
    [
        (0, 240, 12),
        pytest.param(1, 2000, 50, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
async def test_no_answer_has_a_token_of_other_weights_or_another_adapter(
    seed: int, num_requests: int, num_updates: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_SHORT", 8)
    life = Life(tmp_path, seed)
    async with AsyncEngine(life.model, **SETTINGS, kv_cache_dir=tmp_path / "kv") as engine:
        await life.run(engine, num_requests, num_updates)
        engine._manager.check()
        stats = engine.stats()
        assert stats.usage.active == 0
    assert len(life.versions) == num_updates + 1
    counts = await asyncio.to_thread(life.check)
    assert len(life.answers) == sum(counts.values())
    assert counts["whole"] > num_requests / 2 and counts["first part"] > 0
    assert stats.counters["cached_tokens"] > 0
    print(dict(counts), f"{stats.counters['cached_tokens']} tokens cached")
