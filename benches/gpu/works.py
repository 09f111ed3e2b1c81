"""The works that are timed: each gives its figures, as JSON's kinds of values.

On CUDA in full; elsewhere they are tiny, and show only that they run.
"""

import gc
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch

from benches.gpu.model import SHAPES, Shape, roofline_tokens_per_second
from benches.gpu.watch import watched
from pyengine import LLM, SamplingParams
from pyengine.engine import builder
from pyengine.engine.core import Engine
from pyengine.engine.prompts import Prompt
from pyengine.engine.request import Request

Figures = dict[str, Any]
WINDOWS, WARM_STEPS, MOST_SECONDS = 3, 4, 8.0
CHUNK = 8192


@dataclass(frozen=True)
class Bench:
    """A device and the shape of the model. `rates` are `machine`'s, where a work needs them."""

    device: str
    shape_name: str
    rates: dict[str, float] = field(default_factory=dict)

    @property
    def shape(self) -> Shape:
        """The sizes of the model."""
        return SHAPES[self.shape_name]

    @property
    def on_cuda(self) -> bool:
        """Whether this is the real thing."""
        return self.device.startswith("cuda")

    def either(self, full: Any, tiny: Any) -> Any:
        """The size of a work, here."""
        return full if self.on_cuda else tiny

    def llm(self, **settings: Any) -> LLM:
        """An engine over a new random model, after memory without references is released."""
        self.release()
        loaded = self.shape.load(self.device)
        settings = {"compile": False, **settings}  # which takes a minute each time
        with patch.object(builder, "load_model", lambda *_, **__: loaded):
            return LLM("random", device=self.device, dtype="bfloat16", **settings)

    def release(self) -> None:
        """Give back memory."""
        gc.collect()
        if self.on_cuda:
            torch.cuda.empty_cache()

    def prompts(self, count: int, length: int, random: Random) -> list[list[int]]:
        """Prompts that have nothing in common."""
        vocabulary = range(3, self.shape.config.vocab_size)
        return [random.choices(vocabulary, k=length) for _ in range(count)]

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def seconds_of(self, work: Callable[[], object], repeat: int) -> float:
        """The least time of one call, of three rounds of `repeat` calls after one to warm up."""
        work()
        best = float("inf")
        for _ in range(3):
            self.synchronize()
            start = perf_counter()
            for _ in range(repeat):
                work()
            self.synchronize()
            best = min(best, (perf_counter() - start) / repeat)
        return best


def out(max_tokens: int) -> SamplingParams:
    """Greedy, exactly so many tokens."""
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def seconds_to_generate(llm: LLM, prompts: list[list[int]], max_tokens: int) -> float:
    """How long all of them take."""
    start = perf_counter()
    llm.generate(prompts, out(max_tokens), use_tqdm=False)
    return perf_counter() - start


def machine(bench: Bench) -> Iterator[Figures]:
    """The bandwidth of a copy (bytes read and written), the rate of a bfloat16 matrix product."""
    count, size = bench.either((4 << 30, 8192), (32 << 20, 512))
    source = torch.ones(count, dtype=torch.uint8, device=bench.device)
    target = torch.empty_like(source)
    a, b = (torch.randn(size, size, device=bench.device).bfloat16() for _ in range(2))
    name = torch.cuda.get_device_properties(bench.device).name if bench.on_cuda else bench.device
    yield {
        "work": "machine",
        "device": name,
        "bytes_per_second": 2 * count / bench.seconds_of(lambda: target.copy_(source), 5),
        "flops_per_second": 2 * size**3 / bench.seconds_of(lambda: a @ b, 10),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


@dataclass
class Decoding:
    """`count` requests in the middle of their answers, and how many tokens each has by now."""

    engine: Engine
    count: int
    context: float

    def steps(self, count: int) -> float:
        """Seconds of one of so many steps."""
        start = perf_counter()
        given = sum(self.engine.step().num_new_tokens for _ in range(count))
        self.context += given / self.count
        return (perf_counter() - start) / count

    def seconds_per_step(self, count: int) -> float:
        """Of `WINDOWS` windows of `count` steps the median; fewer if they take long."""
        found: list[float] = []
        begun = perf_counter()
        while len(found) < WINDOWS and (not found or perf_counter() - begun < MOST_SECONDS):
            found.append(self.steps(count))
        return median(found)


def tokens_needed(count: int, context: int, steps: int) -> int:
    """How many tokens a request must be allowed: the first decode while others are prefilled."""
    prefill_steps = -(-count * context // (CHUNK - count)) + 1
    return context + prefill_steps + WARM_STEPS + steps + 4


@contextmanager
def decoding(llm: LLM, prompts: list[list[int]], steps: int) -> Iterator[Decoding]:
    """Prompts of one length that decode at once, for so many steps; none is left behind."""
    engine, count, context = llm._engine, len(prompts), len(prompts[0])
    states: list[Request] = []
    params = out(tokens_needed(count, context, steps) - context)
    work, given = Decoding(engine, count, context), 0
    try:
        for number, prompt in enumerate(prompts):
            name = f"timed {number}"
            states.append(engine.input_processor.request(name, Prompt(token_ids=prompt), params))
            engine.add(states[-1])
        while (new := engine.step().num_new_tokens) < count:
            given += new
            if not engine.has_work:
                raise RuntimeError(f"{count} sequences never decoded at the same time")
        work.context += (given + new) / count
        work.steps(WARM_STEPS)
        yield work
    finally:
        engine.abort(states)


def decode(bench: Bench) -> Iterator[Figures]:
    """Decode against the bandwidth roofline, prefill against the rate of a matrix product."""
    contexts, batches, steps, prefills = bench.either(
        ((512, 4096), (1, 32, 256), 24, ((32, 512), (4, 4096))), ((32,), (1, 4), 2, ((2, 64),))
    )
    most, needed = max(batches), partial(tokens_needed, steps=WINDOWS * steps)
    llm = bench.llm(
        max_num_seqs=most,
        max_model_len=max(
            *(needed(most, each_context) for each_context in contexts),
            *(n + 1 for _, n in prefills),
        ),
        max_num_batched_tokens=CHUNK,
        gpu_memory_utilization=0.93,  # a batch of 256 over 4,096 positions barely fits
    )
    described = llm.describe()
    held = int(str(described["num_blocks"])) * int(str(described["block_size"]))
    for context in contexts:
        for batch in batches:
            found = {"work": "decode", "shape": bench.shape_name, "batch": batch}
            found |= {"context": context, "backend": described["attention_backend"]}
            if batch * needed(batch, context) > held:
                yield found | {"skipped": f"the pool holds {held} tokens"}
                continue
            prompts = bench.prompts(batch, context, Random(batch + context))
            with decoding(llm, prompts, WINDOWS * steps) as work:
                before = work.context
                seconds = work.seconds_per_step(steps)
                mean = (before + work.context) / 2
            bandwidth = bench.rates["bytes_per_second"]
            best = roofline_tokens_per_second(bench.shape.size, batch, mean, bandwidth)
            yield found | {
                "step_ms": 1000 * seconds,
                "tokens_per_second": batch / seconds,
                "roofline_share": batch / seconds / best,
            }
    for count, length in prefills:
        random = Random(length)
        for _ in range(2):  # the first to warm up
            prompts = bench.prompts(count, length, random)
            seconds = seconds_to_generate(llm, prompts, 1)
        flops = count * bench.shape.size.prefill_flops(length) / seconds
        yield {
            "work": "prefill",
            "shape": bench.shape_name,
            "prompts": f"{count} x {length}",
            "tokens_per_second": count * length / seconds,
            "matmul_share": flops / bench.rates["flops_per_second"],
        }


def batching(bench: Bench) -> Iterator[Figures]:
    """The same requests here and in transformers' continuous batching, with its defaults."""
    count, length, max_tokens = bench.either((256, 512, 128), (4, 16, 8))
    random = Random(9)
    rounds = [  # one to warm up, and the one that counts
        (bench.prompts(-(-count // 16), length, random), 4),
        (bench.prompts(count, length, random), max_tokens),
    ]

    def found(engine: str, seconds: float, attention: object) -> Figures:
        return {
            "work": "batching",
            "engine": engine,
            "requests": f"{count} x ({length} in, {max_tokens} out)",
            "tokens_per_second": count * max_tokens / seconds,
            "attention": str(attention),
        }

    llm = bench.llm(
        max_num_seqs=count, max_model_len=length + max_tokens, max_num_batched_tokens=CHUNK
    )
    for prompts, asked in rounds:
        seconds = seconds_to_generate(llm, prompts, asked)
    yield found("pyengine", seconds, llm.describe()["attention_backend"])
    del llm
    bench.release()
    model, settings = their_model(bench, max_tokens)
    with model.continuous_batching_context_manager(**settings) as manager:
        for prompts, asked in rounds:
            start = perf_counter()
            manager.add_requests(inputs=prompts, max_new_tokens=asked)
            lengths = [len(following(manager).generated_tokens) for _ in prompts]
            seconds = perf_counter() - start
            if lengths != [asked] * len(prompts):
                raise RuntimeError(f"transformers gave {lengths} tokens, {asked} were asked for")
        yield found("transformers", seconds, model.config._attn_implementation)


def their_model(bench: Bench, max_tokens: int) -> tuple[Any, dict[str, Any]]:
    """transformers' model, and the settings of its manager."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    model = bench.shape.model(bench.device)
    model.set_attn_implementation("sdpa")
    make: Any = GenerationConfig  # it carries no types
    config = make(max_new_tokens=max_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    settings = {"generation_config": config}
    if not bench.on_cuda:  # else it takes nearly all of the memory that there is
        small = ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64)
        settings["continuous_batching_config"] = small
    return model, settings


def following(manager: Any) -> Any:
    """The next request that is through."""
    while True:
        result = manager.get_result(timeout=1)
        if result is not None and result.is_finished():
            if result.error is not None:
                raise RuntimeError(f"transformers failed: {result.error}")
            return result
        if result is None and not manager.is_running():
            raise RuntimeError("transformers' generation thread ended")


def sharing(bench: Bench) -> Iterator[Figures]:
    """A prefix that all prompts share, with the cache and without."""
    count, shared, own, max_tokens = bench.either((256, 1024, 32, 32), (4, 64, 8, 4))
    random = Random(2)
    for shares in (False, True):
        llm = bench.llm(
            max_num_seqs=count,
            max_model_len=shared + own + max_tokens,
            max_num_batched_tokens=CHUNK,
            enable_prefix_caching=shares,
            in_flight_sharing=shares,
        )
        for _ in range(2):  # the first to warm up
            (prefix,) = bench.prompts(1, shared, random)
            prompts = [prefix + rest for rest in bench.prompts(count, own, random)]
            before = llm.stats().counters["computed_tokens"]
            seconds = seconds_to_generate(llm, prompts, max_tokens)
        yield {
            "work": "sharing",
            "requests": f"{count} x ({shared} shared + {own} own in, {max_tokens} out)",
            "shares": shares,
            "seconds": seconds,
            "computed_tokens": llm.stats().counters["computed_tokens"] - before,
        }
        del llm


def duplicates(bench: Bench) -> Iterator[Figures]:
    """The least time of a step for one prompt, and for many that are the same."""
    count, length = bench.either((32, 2048), (4, 64))
    llm = bench.llm(
        max_num_seqs=count, max_model_len=length + 1, max_num_batched_tokens=length + count
    )
    engine, random = llm._engine, Random(3)
    best = dict.fromkeys((1, count), float("inf"))
    for _ in range(5):
        for copies, so_far in best.items():
            (prompt,) = bench.prompts(1, length, random)
            for number in range(copies):
                name = f"timed {number}"
                engine.add(engine.input_processor.request(name, Prompt(token_ids=prompt), out(1)))
            start = perf_counter()
            while engine.has_work:
                engine.step()
            best[copies] = min(so_far, perf_counter() - start)
    yield {
        "work": "duplicates",
        "requests": f"{count} x the same {length} tokens in one step",
        "one_ms": 1000 * best[1],
        "all_ms": 1000 * best[count],
        "ratio": best[count] / best[1],
    }


def host(bench: Bench) -> Iterator[Figures]:
    """The host's work in a step beside waiting, and how much of it the next step hides."""
    count, context, steps = bench.either((256, 512, 32), (4, 32, 2))
    for ahead in (False, True):
        llm = bench.llm(
            max_num_seqs=count,
            max_model_len=tokens_needed(count, context, (WINDOWS + 1) * steps),
            max_num_batched_tokens=CHUNK,
            async_scheduling=ahead,
        )
        prompts = bench.prompts(count, context, Random(count))
        with decoding(llm, prompts, (WINDOWS + 1) * steps) as work:
            unwatched = work.seconds_per_step(steps)
            with watched(work.engine) as watch:
                whole = 1e6 * work.steps(steps)
        spent = {name: 1e6 * seconds / steps for name, seconds in watch.spent.items()}
        outputs = whole - sum(spent.values())
        yield {
            "work": "host",
            "requests": f"{count} decode, context {context}",
            "overlap": ahead,
            "step_us": 1e6 * unwatched,
            "host_us": spent["schedule"] + spent["fill"] + spent["commit"] + outputs,
            **{f"{name}_us": value for name, value in spent.items()},
            "outputs_us": outputs,
        }
        del llm


WORKS: dict[str, Callable[[Bench], Iterator[Figures]]] = {
    "machine": machine,
    "decode": decode,
    "batching": batching,
    "host": host,
    "sharing": sharing,
    "duplicates": duplicates,
}


def write_down(work: str, bench: Bench, lines: Path) -> None:
    """Runs a work; each of its figures is a line of the file at once."""
    with lines.open("a", encoding="utf-8") as file:
        for figures in WORKS[work](bench):
            file.write(json.dumps(figures) + "\n")
            file.flush()
