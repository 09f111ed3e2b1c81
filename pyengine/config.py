"""The engine's settings, each written once: default, help text, form on the command line.

`LLM(...)` and every command read them here. A new setting is one field with its help text.
Imports the standard library only; what needs torch or the block manager is checked by the builder.
"""

import math
import os
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pyengine.errors import ConfigurationError
from pyengine.utils.settings import check_settings, setting, takes
from pyengine.utils.validation import shown

if TYPE_CHECKING:
    import torch

_GIB = 1 << 30
_MAX_DRAFTS = 64

STORE_KEY_VARIABLE = "PYENGINE_KV_CACHE_KEY"
"""64 hexadecimal digits. Entries of a KV store that were not written with it are not read."""


def _bytes_of_gib(name: str, gib: float | None) -> int | None:
    if gib is None:
        return None
    if not math.isfinite(gib) or not 1 <= gib * _GIB < 2**63:
        raise ConfigurationError(f"{name}={gib}: it must be a number of GiB above 0")
    return int(gib * _GIB)


def _int_or_text(text: str | None) -> int | str | None:
    try:
        return None if text is None else int(text)
    except ValueError:
        return text


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The settings of an engine. Bad values raise `ConfigurationError` at once."""

    model: str | Path | None = setting(
        None,
        "hub id, local folder or GGUF file; default: the embedded model",
        parse=str | None,
    )
    _: KW_ONLY
    revision: str | None = setting(
        None, "branch, tag or commit of a hub model; default: the newest"
    )
    token: str | None = setting(
        None,
        "access token for gated hub models; default: the environment variable HF_TOKEN",
        repr=False,
    )
    device: "str | torch.device" = setting(
        "auto", "device to run on: auto (CUDA if available), cpu, cuda or cuda:1", parse=str
    )
    dtype: "str | torch.dtype" = setting(
        "auto",
        "type of the weights: auto (as saved, but on a CPU without bfloat16 instructions float32), "
        "float32, bfloat16, float16",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    load_format: str = setting(
        "auto",
        "source of the weights: auto (the model's files) or dummy (random numbers: the model's "
        "folder needs a config.json only)",
        choices=("auto", "dummy"),
    )
    quantization: Literal["int8", "int4", "fp8", "none"] | None = setting(
        None,
        "int8, int4: linear layers in 8 or 4 bits, on the CPU; fp8: in 8-bit floats, on CUDA "
        "devices of compute capability 8.9 or later; for checkpoints with float weights in plain "
        "linear layers. none: weights of GGUF files become floats. default: on the CPU, GGUF files "
        "keep their formats if linear_backend is auto",
    )
    linear_backend: Literal["auto", "torch", "onednn", "pyengine"] = setting(
        "auto",
        "implementation of linear layers on the CPU: torch, onednn, pyengine, or auto: pyengine "
        "where the processor can, else the fastest in a short measurement; fix it if several "
        "processes must agree in every bit",
    )
    attention_backend: str = setting(
        "auto",
        "attention backend: cpu, flashinfer, flash-attn-3, flash-attn, cudnn, varlen, flex or "
        "gather; auto chooses one",
        choices=(
            *("auto", "cpu", "flashinfer", "flash-attn-3", "flash-attn"),
            *("cudnn", "varlen", "flex", "gather"),
        ),
    )
    compile: bool | None = setting(
        None,
        "let torch compile the forward pass, which needs a C++ compiler and a minute or two at "
        "startup; on the CPU, the pool's memory is then allocated at startup; default: only with "
        "CUDA graphs, if torch can compile the model",
    )
    enforce_eager: bool = setting(False, "no CUDA graphs for decode steps")
    async_scheduling: bool | None = setting(
        None, "plan the next step while one runs; the tokens are the same; default: only on CUDA"
    )
    num_threads: int | None = setting(
        None,
        "compute threads on the CPU, in each process of a divided model; default: OMP_NUM_THREADS, "
        "or the CPUs of affinity mask and cgroup quota",
        flag="--threads",
        minimum=1,
    )
    tensor_parallel_size: int = setting(
        1, "processes that the model is divided over; pool sizes apply to each process", minimum=1
    )
    block_size: int | Literal["auto"] | None = setting(
        None,
        "tokens per KV block; default, or with auto: the preferred size of the attention backend",
        parse=str | None,
        convert=_int_or_text,
        minimum=1,
    )
    num_blocks: int | None = setting(
        None, "blocks in the KV pool; default: from the memory", minimum=1
    )
    kv_cache_memory: int | None = setting(
        None,
        "memory for the KV pool, in bytes; on the command line in GiB",
        flag="--kv-cache-gib",
        parse=float | None,
        convert=partial(_bytes_of_gib, "kv_cache_gib"),
        minimum=1,
    )
    gpu_memory_utilization: float = setting(
        0.9,
        "share of the GPU memory left by weights and the largest step that the KV pool uses, if no "
        "other size is given",
    )
    kv_cache_dtype: str = setting(
        "auto",
        "type of the KV cache: auto (the model's), int8 (on CPUs), or fp8 (fp8_e4m3), if the "
        "backend can",
        choices=("auto", "int8", "fp8", "fp8_e4m3"),
    )
    layer_groups: bool = setting(
        True,
        "layers with sliding windows free the KV blocks that no later token sees",
        flag="--layer-groups/--no-layer-groups",
    )
    enable_prefix_caching: bool = setting(
        True, "reuse the KV blocks of equal prefixes", flag="--prefix-caching/--no-prefix-caching"
    )
    in_flight_sharing: bool = setting(
        True,
        "compute equal prefixes in one step once; otherwise they are merged after the step",
        flag="--in-flight-sharing/--no-in-flight-sharing",
    )
    partial_reuse: bool = setting(
        True,
        "if a cached prefix ends inside a block, copy its tokens and compute the rest",
        flag="--partial-reuse/--no-partial-reuse",
    )
    eviction: str = setting(
        "lru",
        "order of eviction: lru, or 2q, which keeps reused prefixes longer than those used once",
        choices=("lru", "2q"),
    )
    explain_misses: bool = setting(
        True,
        "remember evictions, and say with each request why its tokens were not cached",
        flag="--explain-misses/--no-explain-misses",
    )
    kv_cache_dir: str | Path | None = setting(
        None,
        "folder that keeps the KV cache over restarts; it is created if missing; users who can "
        "write to it can make answers wrong",
        parse=str | None,
    )
    kv_cache_disk: int | None = setting(
        None,
        "maximum size of kv_cache_dir, in bytes; on the command line in GiB; default: 20 GiB, or "
        "less if the disk is smaller",
        flag="--kv-cache-disk-gib",
        parse=float | None,
        convert=partial(_bytes_of_gib, "kv_cache_disk_gib"),
        minimum=1,
    )
    kv_cache_access: Literal["write_or_read", "write", "read"] = setting(
        "write_or_read",
        "use of kv_cache_dir: write_or_read reads it if another process writes to it; write "
        "refuses it then; read never writes, so the folder may be on a read-only mount",
    )
    kv_cache_host_memory: int | None = setting(
        None,
        "memory of the host for KV that the pool of a GPU evicts, on the command line in GiB, else "
        "in bytes; it ends with the process",
        flag="--kv-cache-host-gib",
        parse=float | None,
        convert=partial(_bytes_of_gib, "kv_cache_host_gib"),
        minimum=1,
    )
    verify_cache_hits: float = setting(
        0.0,
        "share of the requests with cache hits whose cached prefix is computed again and compared; "
        "a difference is an error in the log, with a recording of the blocks",
    )
    event_hash_seed: int | None = setting(
        None,
        "keep events of the KV cache, for routers; blocks are hashed with this seed, which must be "
        "the same for all replicas",
        hidden=True,
        minimum=0,
    )
    max_num_seqs: int = setting(256, "maximum number of sequences in one step", minimum=1)
    max_num_seqs_per_tenant: int | None = setting(
        None,
        "maximum number of sequences of one tenant in one step, or one request with more; a tenant "
        "of a server is a key; default: all of max_num_seqs, of which others get their equal share "
        "as soon as they have requests",
        minimum=1,
    )
    max_num_batched_tokens: int = setting(2048, "maximum number of tokens in one step", minimum=1)
    speculation: Literal["ngram", "suffix", "mtp", "draft"] | None = setting(
        None,
        "draft the next tokens and compute them with decodes if that saves time; ngram: tokens "
        "after an earlier occurrence of the last few tokens, in prompt and answer; suffix: in "
        "earlier answers, too; mtp: from the model's own MTP layers; draft: from draft_model",
    )
    draft_model: str | Path | None = setting(
        None,
        "the smaller model for speculation=draft, with the same tokenizer; it uses the dtype, "
        "quantization and attention backend of the model, and a share of the KV memory",
        parse=str | None,
    )
    draft_revision: str | None = setting(
        None, "branch, tag or commit of a draft_model from the hub; default: the newest"
    )
    num_speculative_tokens: int | None = setting(
        None,
        "maximum number of drafts per sequence and step; default: 7, or with mtp the number of MTP "
        "layers",
        minimum=1,
    )
    enable_lora: bool = setting(
        False, "serve LoRA adapters of PEFT beside the model, several in one step"
    )
    max_loras: int = setting(8, "maximum number of LoRA adapters in one step", minimum=1)
    max_lora_rank: int = setting(16, "maximum rank of a LoRA adapter", minimum=1)
    max_cpu_loras: int | None = setting(
        None, "maximum number of loaded LoRA adapters; default: no limit", minimum=1
    )
    max_model_len: int | None = setting(
        None,
        "maximum number of tokens of prompt and answer together; default: the model's positions, "
        "or what the pool holds if that is less",
        minimum=2,
    )
    max_overtakes: int = setting(
        16,
        "if blocks are short, requests with cached prefixes run before others of their priority, "
        "each of which is overtaken at most so often; 0: first come, first served, and waiting "
        "requests keep no prefixes",
        minimum=0,
    )
    max_pinned_share: float = setting(
        0.25,
        "largest share of the KV pool that pins and cache priorities of requests keep from "
        "eviction, less if the longest request would not fit beside them; 0: no request keeps any",
    )
    max_num_waiting: int | None = setting(
        None,
        "maximum number of waiting requests of each tenant; more are refused; a tenant of a server "
        "is a key; default: no limit",
        hidden=True,
        minimum=1,
    )
    generation_config: str = setting(
        "auto",
        "source of the default sampling parameters: auto (the model's generation_config), none or "
        "vllm (the defaults of SamplingParams)",
        choices=("auto", "none", "vllm"),
    )
    seed: int = setting(
        0,
        "seed from which requests without a seed get theirs, in the order of submission",
    )

    def __post_init__(self) -> None:
        check_settings(self)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if not 0 < self.gpu_memory_utilization <= 1:
            raise ConfigurationError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: "
                "it must be above 0 and at most 1"
            )
        for name in ("verify_cache_hits", "max_pinned_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigurationError(f"{name}={getattr(self, name)}: it must be from 0 to 1")
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ConfigurationError(
                f"num_blocks={self.num_blocks} and kv_cache_memory={self.kv_cache_memory} "
                "both set the size of the KV pool: give one of them"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than "
                f"max_num_seqs={self.max_num_seqs}: every running sequence needs a token per step"
            )
        if self.load_format == "dummy" and self.speculation == "mtp":
            raise ConfigurationError(
                "load_format='dummy' cannot be combined with speculation='mtp', whose layers are "
                "in the model's files: leave one of them out"
            )
        if (self.num_speculative_tokens or 0) > _MAX_DRAFTS:
            raise ConfigurationError(
                f"num_speculative_tokens={self.num_speculative_tokens}: it must be at most "
                f"{_MAX_DRAFTS}, as more in a row are hardly ever accepted"
            )
        if (self.speculation == "draft") != (self.draft_model is not None):
            raise ConfigurationError(
                f"speculation={self.speculation!r} and draft_model={shown(self.draft_model)}: a "
                "second model drafts with speculation='draft' and its name, and not otherwise"
            )
        if self.draft_revision is not None and self.draft_model is None:
            raise ConfigurationError(
                f"draft_revision={shown(self.draft_revision)} is that of draft_model, which is not "
                "given"
            )
        self._check_linear_backend()
        self._check_store()
        if self.tensor_parallel_size != 1:
            self._check_divided()
        self._check_lora()
        if self.speculation == "mtp" and self.compile:
            raise self._not_yet("compile", "speculation")
        if self.speculation == "mtp" and self.kv_cache_dtype == "int8":
            raise self._not_yet("kv_cache_dtype", "speculation")

    def _check_lora(self) -> None:
        if not self.enable_lora:
            return
        if self.compile:
            raise self._not_yet("compile", "enable_lora")
        if self.tensor_parallel_size != 1:
            raise self._not_yet("tensor_parallel_size", "enable_lora")
        if self.speculation == "mtp":
            raise self._not_yet("speculation", "enable_lora")

    def _not_yet(self, name: str, other: str) -> ConfigurationError:
        """The refusal of two settings that cannot be combined so far."""
        value, with_value = (shown(getattr(self, setting)) for setting in (name, other))
        return ConfigurationError(
            f"{name}={value} cannot be combined with {other}={with_value} yet: leave one of them "
            "out"
        )

    def _check_linear_backend(self) -> None:
        if self.linear_backend == "auto":
            return
        if self.quantization not in (None, "none"):
            raise ConfigurationError(
                f"linear_backend={self.linear_backend!r} cannot be combined with quantization="
                f"{self.quantization!r}, which has its own product: leave one of them out"
            )
        if self.linear_backend != "torch" and self.tensor_parallel_size != 1:
            raise self._not_yet("linear_backend", "tensor_parallel_size")

    def _check_store(self) -> None:
        if self.kv_cache_disk is not None and self.kv_cache_dir is None:
            raise ConfigurationError(
                f"kv_cache_disk={self.kv_cache_disk} is the size of kv_cache_dir, which is not "
                "given"
            )
        if self.kv_cache_access != "write_or_read" and self.kv_cache_dir is None:
            raise ConfigurationError(
                f"kv_cache_access={self.kv_cache_access!r} is the use of kv_cache_dir, which is "
                "not given"
            )
        if self.kv_cache_access == "read" and self.kv_cache_disk is not None:
            raise ConfigurationError(
                f"kv_cache_disk={self.kv_cache_disk} limits what is written, and kv_cache_access="
                "'read' writes nothing: leave one of them out"
            )
        if self.kv_cache_dir is not None and self.kv_cache_host_memory is not None:
            raise ConfigurationError(
                f"kv_cache_dir={shown(self.kv_cache_dir)} cannot be combined with "
                f"kv_cache_host_memory={self.kv_cache_host_memory}: leave the latter out, as the "
                "system caches recent files in host memory anyway"
            )
        for name in ("kv_cache_dir", "kv_cache_host_memory"):
            value = getattr(self, name)
            if value is not None and not self.enable_prefix_caching:
                raise ConfigurationError(
                    f"{name}={shown(value)} keeps cached prefixes, and "
                    "enable_prefix_caching=False has none: leave one of them out"
                )

    def _check_divided(self) -> None:
        for name in (
            *("async_scheduling", "compile", "quantization"),
            *("kv_cache_dir", "kv_cache_host_memory", "verify_cache_hits"),
        ):
            value = getattr(self, name)
            if value and value != "none":
                raise self._not_yet(name, "tensor_parallel_size")
        if self.speculation in {"mtp", "draft"}:
            raise self._not_yet("speculation", "tensor_parallel_size")

    @property
    def requested_block_size(self) -> int | None:
        """Tokens per block; None: the attention backend's preferred size."""
        return None if self.block_size == "auto" else self.block_size

    @property
    def takes_model_sampling(self) -> bool:
        """True if requests without sampling parameters use the model's."""
        return self.generation_config == "auto"


takes_settings = takes(EngineSettings)
"""Decorates an `__init__(self, settings: EngineSettings)`. See `takes`."""


def store_key() -> bytes | None:
    """The secret key of a KV store, 32 bytes; None if there is none.

    Raises `ConfigurationError` for another text.
    """
    text = os.environ.get(STORE_KEY_VARIABLE)
    if not text:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigurationError(
            f"{STORE_KEY_VARIABLE} has {len(text)} characters and is not a key: it must be 64 "
            "hexadecimal digits; `openssl rand -hex 32` makes some"
        )
    return key
