"""Typical uses of `multiprocessing` while an `LLM` is alive, by one start method.

`python -m tests.support.multiprocessing_user METHOD FOLDER` prints a line of JSON per deed.
"""

import json
import multiprocessing
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from pyengine import LLM, SamplingParams

GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=6)
SECONDS = 60
LIVE: list[LLM] = []
"""A global that forks inherit."""


def answer(llm: LLM) -> list[int]:
    (output,) = llm.generate([[3, 4, 5]], GREEDY, use_tqdm=False)
    return output.outputs[0].token_ids


def by_name(_: int = 0) -> list[int]:
    return answer(LIVE[0])


def own(folder: str) -> list[int]:
    with LLM(folder, device="cpu", dtype="float32", num_blocks=32) as llm:
        return answer(llm)


def nothing(*_: Any) -> list[int]:
    return []


def outcome(work: Callable[..., list[int]], *arguments: Any) -> str:
    try:
        return repr(work(*arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def send(pipe: Any, work: Callable[..., list[int]], *arguments: Any) -> None:
    pipe.send(outcome(work, *arguments))


class User:
    def __init__(self, method: str, folder: str) -> None:
        self.context: Any = multiprocessing.get_context(method)
        self.folder = folder

    def process(self, work: Callable[..., list[int]], *arguments: Any) -> str:
        """The output of a process, which exits normally."""
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=send, args=(theirs, work, *arguments))
        process.start()
        theirs.close()
        try:
            if not ours.poll(SECONDS):
                return "deadlock"
            said: str = ours.recv()
            process.join(SECONDS)
            return said if process.exitcode == 0 else f"status {process.exitcode} after {said}"
        finally:
            process.kill()
            process.join()

    def pool(self) -> list[int]:
        with self.context.Pool(2) as pool:
            return pool.map_async(by_name, range(2)).get(SECONDS)[0]

    def executor(self) -> list[int]:
        with ProcessPoolExecutor(2, mp_context=self.context) as pool:
            return next(pool.map(by_name, range(2), timeout=SECONDS))

    def deeds(self) -> dict[str, str]:
        llm = LIVE[0]
        found = {"parent": outcome(answer, llm), "argument": outcome(self.process, answer, llm)}
        if self.context.get_start_method() == "fork":  # the others have no globals of the parent
            found["global"] = self.process(by_name)
            found["pool"] = outcome(self.pool)
            found["executor"] = outcome(self.executor)
        found["own"] = self.process(own, self.folder)
        stream = llm.stream([3, 4, 5], GREEDY)
        items = [next(stream)]  # on a busy machine, it is the last one
        found["amid a stream"] = self.process(nothing)
        items += stream
        found["stream"] = repr(items[-1].outputs[0].token_ids)
        found["parent again"] = outcome(answer, llm)
        return found


if __name__ == "__main__":
    method, folder, size = sys.argv[1:]
    settings: dict[str, Any] = {"device": "cpu", "dtype": "float32", "num_blocks": 32}
    with LLM(folder, **settings, tensor_parallel_size=int(size)) as live:
        LIVE.append(live)
        print(json.dumps(User(method, folder).deeds()))
