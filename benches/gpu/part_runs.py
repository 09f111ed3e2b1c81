"""Does it run? What is there, flashinfer's kernels built, then one backend after the other."""

import platform
import shutil
import subprocess
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from random import Random
from time import monotonic
from typing import Any

import torch

from benches.gpu.steps import Found, NotHere, Step, Target
from pyengine.attention.paged import KVWriter
from pyengine.kv_cache.pool import KVCacheSpec, KVPool
from tests.gpu.answers import tokens
from tests.gpu.models import Place, Refused

PACKAGES = ("torch", "triton", "transformers", "numpy", "flashinfer-python", "apache-tvm-ffi")


def machine(target: Target) -> Found:
    """The machine's hardware and software."""
    found: Found = {
        "python": platform.python_version(),
        **{name: _version(name) for name in PACKAGES},
    }
    for command in (
        ["nvidia-smi", "-L"],
        ["nvcc", "--version"],
        ["compute-sanitizer", "--version"],
    ):
        where = shutil.which(command[0])
        said = (
            subprocess.run(command, capture_output=True, text=True, check=False) if where else None
        )
        found[command[0]] = said.stdout.strip().splitlines()[-1:] if said else "missing"
    if target.on_cuda:
        found["device"] = torch.cuda.get_device_name(target.device)
        found["capability"] = torch.cuda.get_device_capability(target.device)
        found["free, GiB"] = torch.cuda.mem_get_info(target.device)[0] / 2**30
    return found


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def flashinfer_is_there(_target: Target) -> Found:
    """It imports, with what it needs beside it."""
    library = _flashinfer()
    return {
        "version": library.__version__,
        "fast_decode_plan": hasattr(library, "fast_decode_plan"),
    }


def _flashinfer() -> Any:
    try:
        import flashinfer
    except ImportError as error:
        raise NotHere(f"{type(error).__name__}: {error}") from error
    return flashinfer


def build(target: Target, which: str, window: int) -> Found:
    """The kernels of a wrapper, compiled; bfloat16, heads of 128."""
    library = _flashinfer()
    if not target.on_cuda:
        raise NotHere("flashinfer's kernels are for CUDA")
    begin = monotonic()
    device = torch.device(target.device)
    workspace = torch.zeros(64 << 20, dtype=torch.uint8, device=device)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    pages = torch.zeros(1, dtype=torch.int32, device=device)
    last = torch.tensor([3], dtype=torch.int32)
    settings = {"window_left": window, "q_data_type": torch.bfloat16, "sm_scale": 0.1}
    cache = tuple(torch.randn(1, 16, 8, 128, device=device).bfloat16() for _ in range(2))
    query = torch.randn(1, 16, 128, device=device).bfloat16()
    if which == "decode":
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspace, "NHD", use_tensor_cores=True
        )
        wrapper.plan(starts, pages, last, 16, 8, 128, 16, **settings)
    else:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(starts, starts, pages, last, 16, 8, 128, 16, causal=True, **settings)
    built = monotonic() - begin
    out = wrapper.run(query, cache)
    keys, values = (item[0, :3].float().repeat_interleave(2, 1) for item in cache)
    if window >= 0:
        keys, values = keys[2 - window :], values[2 - window :]
    weights = (torch.einsum("hd,khd->hk", query[0].float(), keys) * 0.1).softmax(-1)
    expected = torch.einsum("hk,khd->hd", weights, values)
    torch.testing.assert_close(out[0].float(), expected, atol=0.02, rtol=0.02)
    return {"built in": f"{built:.0f} s", "backend": getattr(wrapper, "_backend", "?")}


def keep_what_was_built(target: Target) -> Found:
    """The compiled modules in an archive, for the next machine: unpack it beside the report."""
    folder = Path(target.folder) / "built"
    libraries = sorted(folder.rglob("*.so"))
    if not libraries:
        raise NotHere("nothing was built")
    archive = Path(target.folder) / "built.tar.xz"
    with tarfile.open(archive, "w:xz", preset=1) as file:
        for library in libraries:
            file.add(library, library.relative_to(folder))
    return {"modules": len(libraries), "MiB": archive.stat().st_size / 2**20}


def kv_write(target: Target) -> Found:
    """The kernel against torch's copy, in every format of the cache."""
    device, checked = torch.device(target.device), []
    for dtype in (torch.bfloat16, torch.float16, torch.float8_e4m3fn):
        spec = KVCacheSpec(8, 128, 128, dtype, scale_k=0.5, scale_v=2.0)
        pools = [KVPool([spec], 8, 16, device) for _ in range(2)]
        slots = torch.tensor([5, -1, 127, 0, -1, 14], device=device)
        key, value = (
            torch.randn(8, 6, 128, device=device)
            .to(dtype if dtype.itemsize == 2 else torch.bfloat16)
            .transpose(0, 1)
            for _ in range(2)
        )
        writer = KVWriter(pools[0])
        writer.write(0, (key, key, value), writer.slots(slots))
        pools[1].write(0, key, value, torch.where(slots < 0, pools[1].null_slot, slots))
        for each_key, other in zip(
            pools[0].keys + pools[0].values, pools[1].keys + pools[1].values, strict=True
        ):
            assert torch.equal(each_key[:-1].float(), other[:-1].float()), dtype
        checked.append(str(dtype).removeprefix("torch."))
    return {"equal in": " ".join(checked)}


def generates(target: Target, backend: str, settings: dict[str, Any]) -> Found:
    """A few tokens of a small llama; how many answers begin as the gather backend's do."""
    place = Place(target.device, target.folder)
    folder, prompts = place.model("llama"), _prompts()
    oracle = _tokens(place.llm(folder, "float32", "gather", async_scheduling=False), prompts)
    dtype = "bfloat16" if target.on_cuda else "float32"
    try:
        llm = place.llm(folder, dtype, backend, **settings)
    except Refused as error:
        raise NotHere(str(error)) from error
    found = _tokens(llm, prompts)
    first = [match[0] == other[0] for match, other in zip(found, oracle, strict=True)]
    assert sum(first) >= len(first) // 2, (found, oracle)
    described = llm.describe()
    equal = sum(match == other for match, other in zip(found, oracle, strict=True))
    return {"as float32": f"{equal} of {len(found)}", "graphs": str(described["cuda_graphs"])[:40]}


def _prompts() -> list[list[int]]:
    random = Random(7)
    return [tokens(count, random) for count in (3, 60, 150, 300)]


def _tokens(llm: Any, prompts: list[list[int]]) -> list[list[int]]:
    from pyengine import SamplingParams

    params = SamplingParams(temperature=0, ignore_eos=True, max_tokens=12, detokenize=False)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def long_prompt(target: Target) -> Found:
    """5,000 tokens in chunks of 512 beside decodes, with overlap: the same as without."""
    place = Place(target.device, target.folder)
    folder = place.model("llama", "llama-long", max_position_embeddings=8192)
    random = Random(1)
    length, longest = target.either((5_000, 8_192), (700, 1_024))
    prompts = [tokens(length, random), tokens(20, random), tokens(33, random)]
    answers = []
    for ahead in (False, True):
        llm = place.llm(
            folder,
            "float32",
            "gather" if not target.on_cuda else "auto",
            max_model_len=longest,
            max_num_batched_tokens=512,
            async_scheduling=ahead,
            enforce_eager=False,
        )
        answers.append(_tokens(llm, prompts))
    assert answers[0] == answers[1], answers
    return {"prompt": length, "equal": len(prompts)}


EAGER: dict[str, Any] = {"enforce_eager": True, "async_scheduling": False}
AHEAD: dict[str, Any] = {"enforce_eager": True, "async_scheduling": True}
GRAPHS: dict[str, Any] = {"enforce_eager": False, "async_scheduling": True}
STEPS = [
    Step("what there is", machine, seconds=60),
    Step("flashinfer imports", flashinfer_is_there, seconds=90),
    Step("flashinfer decode", build, ("decode", -1), 240, beside="build"),
    Step("flashinfer prefill", build, ("prefill", -1), 240, beside="build"),
    Step("keep what was built", keep_what_was_built),
    Step("KV write", kv_write),
    Step("llama, gather, eager", generates, ("gather", EAGER)),
    Step("llama, flashinfer, eager", generates, ("flashinfer", EAGER), 240),
    Step("llama, flashinfer, overlap", generates, ("flashinfer", AHEAD)),
    Step("llama, flashinfer, graphs", generates, ("flashinfer", GRAPHS)),
    Step("a prompt of 5,000 tokens, overlap", long_prompt),
    Step("llama, flex, eager", generates, ("flex", EAGER), 180),
    Step("llama, flex, graphs", generates, ("flex", GRAPHS), 180),
    Step("llama, varlen, graphs", generates, ("varlen", GRAPHS)),
]
