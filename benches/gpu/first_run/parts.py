"""The parts of the first run, those that matter most first."""

from dataclasses import dataclass

_8B, _SMALL = "Llama-3.1-8B", "Qwen3-0.6B"


@dataclass(frozen=True)
class Part:
    """A function of a module of this package, run in a separate process.

    Parts run side by side unless they are `alone`, in their order; a part waits for those in
    `after`. `seconds` is its limit on CUDA. `tiny` are its arguments off CUDA; ``None``: it does
    not run there.
    """

    name: str
    call: str
    seconds: float
    arguments: tuple[str, ...] = ()
    tiny: tuple[str, ...] | None = ()
    alone: bool = False
    after: tuple[str, ...] = ()
    is_interpreted: bool = False
    """True: off CUDA, Triton's interpreter runs its kernels."""


def _checks(
    name: str, seconds: float, wanted: str, tiny: str | None = None, after: tuple[str, ...] = ()
) -> Part:
    """Some of tests/gpu, as `pytest -k` selects them; `tiny`: off CUDA."""
    off_cuda = None if tiny is None else (tiny,)
    return Part(f"checks_{name}", "checks:run", seconds, (wanted,), off_cuda, after=after)


_BUILT = ("modules",)
_PIECES = ("prefill", "equal_prompts", "mixed", "sampling", "shared_prefix", "profile")
PARTS = (
    Part("machine", "machine:machine", 60, alone=True),
    # Is it right? Parts share the device; nothing is timed.
    Part("modules", "machine:modules", 170),
    Part("kernels", "kernels:run", 100, is_interpreted=True),
    Part("state_kernels", "state_kernels:run", 100, is_interpreted=True),
    _checks("gather", 110, "(test_the_oracle and (llama or qwen3)) or window", "window"),
    _checks("flex", 150, "(test_a_backend and flex-llama) or (test_a_replay and llama-flex)"),
    _checks(
        "default",
        170,
        "test_the_default_configuration and (llama or qwen3 or gemma3_text)",
        "test_the_default_configuration and llama",
        after=_BUILT,
    ),
    _checks(
        "flashinfer",
        120,
        "(test_a_backend and (flashinfer-llama or flashinfer-qwen3))"
        " or (test_a_replay and llama-flashinfer)",
        after=_BUILT,
    ),
    _checks(
        "engine",
        150,
        "test_engine and used and (overlap or equal_prompts or preemption or restored)",
        after=_BUILT,
    ),
    _checks("states", 150, "test_states", "test_states and lfm2-float32", after=_BUILT),
    Part("crowd", "whole_engine:crowd", 150, after=_BUILT),
    _checks(
        "broken",
        90,
        "test_broken_requests",
        "test_broken_requests and gather-llama",
        after=_BUILT,
    ),
    # How fast is it? Each part has the machine for itself.
    Part(
        "large",
        "engine_times:run",
        200,
        (_8B, "compiled", "decode-256", "decode-32", "decode-1", *_PIECES),
        ("tiny", "uncompiled", "decode-4", *_PIECES, "batching"),
        alone=True,
    ),
    Part("attention", "attention_times:run", 60, tiny=None, alone=True),
    Part(
        "small",
        "engine_times:run",
        100,
        (_SMALL, "compiled", "batching", "decode-256", "decode-1", "profile"),
        None,
        alone=True,
    ),
    Part("peers", "peers:run", 75, (_SMALL,), ("tiny",), alone=True),
    Part("blocks", "host_times:blocks", 30, alone=True),
    Part("overlap", "host_times:overlap", 75, (_SMALL,), ("tiny",), alone=True),
    Part(
        "uncompiled",
        "engine_times:run",
        80,
        (_8B, "uncompiled", "decode-256"),
        None,
        alone=True,
    ),
    # What is left of the time: parts share the device again.
    Part("requests", "whole_engine:random_requests", 120),
    _checks("fp8", 90, "test_quantization and llama"),
    Part("sanitizer", "sanitizer:run", 120, tiny=None),
)
