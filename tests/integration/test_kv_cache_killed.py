"""Engines with `kv_cache_dir` that are killed at random moments: the next one restores no wrong KV.

`KILLS=1000` for the long run.
"""

import multiprocessing
import os
import shutil
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from time import monotonic, sleep
from typing import Any

import pytest

from pyengine import LLM, SamplingParams
from pyengine.engine import offloading
from tests.support.checkpoints import save_random

pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("KILLS", "5"))
PROMPTS = 24
FRESH = 12
"""Kills after which the folder begins anew."""
SHORT = 8
IMPORTED = ["pyengine.models.decoder.loading"]
"""Modules that a first engine imports."""
PARAMS = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6, logprobs=3)


def prompt_of(number: int) -> list[int]:
    """Of each four, the first two have a prefix in common."""
    random, own = Random(number // 4 if number % 4 < 2 else number), Random(number)
    begin = [random.randrange(3, 32) for _ in range(28)]
    return begin + [own.randrange(3, 32) for _ in range(4 + number)]


def make_llm(model: Path, folder: Path | None) -> LLM:
    settings: dict[str, Any] = {
        "dtype": "float32",
        "block_size": 4,
        "linear_backend": "pyengine",
        "partial_reuse": False,  # what is computed beside the cached blocks is the same
        "num_blocks": 64,
    }
    if folder is not None:
        settings |= {"kv_cache_dir": folder, "kv_cache_disk": 1 << 26}
    return LLM(model, **settings)


def answer(llm: LLM, number: int) -> tuple[list[Any], int]:
    """Tokens with their log-probabilities, to the bit, and how many tokens were restored."""
    (output,) = llm.generate([prompt_of(number)], PARAMS, use_tqdm=False)
    (completion,) = output.outputs
    assert completion.logprobs is not None
    bits = [
        sorted((token, value.logprob.hex()) for token, value in each.items())
        for each in completion.logprobs
    ]
    return [completion.token_ids, bits], output.num_restored_tokens


def run(model: Path, folder: Path, seed: int, messages: Connection) -> None:
    """The killed process: engines that answer, store, restore, and end, one after the other."""
    offloading._SHORT = SHORT
    random = Random(seed)
    messages.send("started")
    while True:
        with make_llm(model, folder) as llm:
            for _ in range(random.randint(4, 24)):
                number = random.randrange(PROMPTS)
                given, _restored = answer(llm, number)
                is_stored = False
                if random.random() < 0.5:
                    assert llm._offloader is not None
                    is_stored = llm._offloader.flush(30)
                messages.send((number, given, is_stored))


def received(messages: Connection) -> list[Any]:
    """The messages of the process before it was killed."""
    items = []
    try:
        while True:
            items.append(messages.recv())
    except EOFError:
        return items


@pytest.mark.timeout(3600)
def test_killed_engines_leave_no_wrong_kv_and_lose_none_that_was_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers of the killed engine, and of the next one, have the bits of one without a store."""
    monkeypatch.setattr(offloading, "_SHORT", SHORT)
    model, folder = tmp_path / "model", tmp_path / "kv"
    save_random(model, "llama")
    with make_llm(model, None) as llm:
        expected = [answer(llm, number)[0] for number in range(PROMPTS)]
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([*IMPORTED, __name__])  # once, not for each kill
    random = Random(KILLS)
    stored: set[int] = set()
    longest, counted, restored_tokens = 0.0, 0, 0
    for kill in range(KILLS):
        if kill % FRESH == 0:
            shutil.rmtree(folder, ignore_errors=True)
            stored.clear()
        messages, sender = processes.Pipe(duplex=False)
        process = processes.Process(target=run, args=(model, folder, kill, sender), daemon=True)
        process.start()
        sender.close()
        first, start = messages.recv(), monotonic()
        assert first == "started"
        if not longest:
            messages.recv()
            longest = 5 * (monotonic() - start)  # an engine's start, and many answers
        sleep(random.uniform(0, longest))
        process.kill()
        items = received(messages)
        counted += len(items)
        process.join()
        assert process.exitcode == -9
        for number, given, is_stored in items:
            assert given == expected[number]
            if is_stored:
                stored.add(number)
        with make_llm(model, folder) as llm:
            assert llm.describe()["kv_cache_access"] == "write"
            offloader = llm._offloader
            assert offloader is not None
            offloader._store_sequence = lambda sequence: None  # type: ignore[method-assign]  # only killed ones do
            for number in range(PROMPTS):
                llm._manager.evict_all()
                given, restored = answer(llm, number)
                assert given == expected[number], f"kill {kill}, prompt {number}"
                if number in stored:
                    whole = (len(prompt_of(number)) - 1) // 4 * 4
                    assert restored >= whole, f"kill {kill}, prompt {number}"
                restored_tokens += restored
            found = llm.stats().store
            assert (found["damaged"], found["failed"], found["failed_loads"]) == (0, 0, 0)
    print(f"{KILLS} kills, {counted} answers before them, {restored_tokens} tokens restored after")
    assert restored_tokens > 100 * KILLS
