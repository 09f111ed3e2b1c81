"""Devices without memory for a step, or that fail: smaller steps, errors with the numbers."""

import logging
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import TypeAlias

import pytest

from pyengine.engine.recovery import is_out_of_memory
from pyengine.errors import ConfigurationError, DeviceMemoryError, EngineDeadError
from pyengine.executor.model_runner import StepLogits
from pyengine.sampling_params import SamplingParams
from tests.support.engines import GREEDY, Bench, make_bench
from tests.support.fake_runner import Fault, continued
from tests.support.without_torch import needs_torch


def on_a_device(text: str) -> BaseException:
    import torch

    return torch.OutOfMemoryError(text)


def on_a_cpu(text: str) -> BaseException:
    """As torch says it: the words are those of its allocator."""
    return RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
        f"you {text}. Error code 12 (Cannot allocate memory)"
    )


def in_numpy(text: str) -> BaseException:
    return MemoryError(text)


OutOfMemory: TypeAlias = Callable[[str], BaseException]
ERRORS = [pytest.param(on_a_device, marks=needs_torch), on_a_cpu, in_numpy]


def small_device(
    fits: int, *, depth: int = 1, slots: int = 16, error: OutOfMemory = in_numpy
) -> Bench:
    """A device on which a step of more than `fits` tokens runs out of memory."""
    bench = make_bench(256, 4, max_num_batched_tokens=64, max_num_seqs=slots, depth=depth)
    run = bench.runner.run

    def limited(sizes: tuple[int, int, int], *rest: object) -> StepLogits:
        if sizes[0] > fits:
            raise error(f"tried to allocate {sizes[0]} MiB, {fits} MiB are free")
        return run(sizes, *rest)

    bench.runner.run = limited  # type: ignore[method-assign, assignment]
    return bench


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_what_torch_and_numpy_raise_on_a_cpu_is_known(library: str) -> None:
    """Whatever the words are in the version at hand."""
    allocate = pytest.importorskip(library).empty
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        allocate(1 << 56)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ConfigurationError("cannot allocate memory"))


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("fits", [1, 3, 11, 40])
def test_the_batch_shrinks_until_it_fits_and_no_token_differs(
    fits: int, depth: int, error: OutOfMemory, caplog: pytest.LogCaptureFixture
) -> None:
    random, bench = Random(fits), small_device(fits, depth=depth, error=error)
    prompts = [[random.randrange(9) for _ in range(random.randint(1, 50))] for _ in range(14)]
    with caplog.at_level(logging.WARNING):
        outputs = bench.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.outputs[0].token_ids == continued(prompt, 8)
    limits = bench.scheduler.limits
    assert fits / 2 <= limits.max_num_batched_tokens <= fits
    assert f"max_num_batched_tokens={limits.max_num_batched_tokens}" in caplog.text
    assert f"{fits} MiB are free" in caplog.text
    bench.assert_all_free()


@pytest.mark.parametrize("error", ERRORS)
def test_a_single_token_that_does_not_fit_is_an_error_and_the_engine_lives(
    error: OutOfMemory,
) -> None:
    bench = small_device(0, error=error)
    bench.submit({"a": [1, 2, 3]})
    with pytest.raises(DeviceMemoryError, match=r"a step of 1 token .* 0 MiB are free.*num_blocks"):
        bench.run()
    assert bench.abort(["a"])[0].outputs[0].token_ids == []
    bench.assert_all_free()
    bench.runner.run = type(bench.runner).run.__get__(bench.runner)  # type: ignore[method-assign]
    assert bench.generate([[1, 2, 3]])[0].outputs[0].token_ids == continued([1, 2, 3], 8)


@pytest.mark.parametrize("depth", [1, 2])
def test_a_device_that_fails_ends_the_engine_and_loses_nothing(depth: int) -> None:
    import torch

    bench = make_bench(depth=depth)
    bench.submit({"a": [1, 2, 3]})
    bench.runner.fault = Fault(3, torch.AcceleratorError("CUDA error: unspecified launch failure"))
    with pytest.raises(EngineDeadError, match="unspecified launch failure; no request was lost"):
        bench.run()
    with pytest.raises(EngineDeadError, match=r"unspecified launch failure.* in a new process"):
        bench.engine.step()
    (output,) = bench.abort(["a"])
    assert output.outputs[0].token_ids == continued([1, 2, 3], 3)
    bench.assert_all_free()


def test_samples_that_no_longer_run_at_once_fail_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = small_device(2)
    params = SamplingParams(n=4, temperature=0, max_tokens=3, ignore_eos=True)
    bench.submit({"a": [1, 2, 3]}, params)
    bench.submit({"b": [4]})
    done = bench.run()
    assert done["a"].error is not None
    assert "'a' runs 4 samples at once" in done["a"].error
    assert "only 2 sequences run" in done["a"].error
    assert [output.finish_reason for output in done["a"].outputs] == ["error"] * 4
    assert done["b"].outputs[0].token_ids == continued([4], 8)
    bench.assert_all_free()


def test_limits_recover_when_there_is_memory_again() -> None:
    """Somebody else's process was on the device for a while."""
    bench = small_device(10)
    prompts = [[at] * 9 for at in range(8)]
    outputs = bench.generate(prompts, replace(GREEDY, max_tokens=20))
    assert bench.scheduler.limits.max_num_batched_tokens < 16
    bench.runner.run = type(bench.runner).run.__get__(bench.runner)  # type: ignore[method-assign]
    outputs += bench.generate(prompts, replace(GREEDY, max_tokens=220))
    assert bench.scheduler.limits.max_num_batched_tokens == 64
    assert bench.scheduler.limits.max_num_seqs == 16
    for prompt, output in zip(prompts * 2, outputs, strict=True):
        length = len(output.outputs[0].token_ids)
        assert output.outputs[0].token_ids == continued(prompt, length)
    bench.assert_all_free()
