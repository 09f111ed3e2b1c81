"""Decoders from GGUF files: the header becomes settings, tensors keep their formats.

llama.cpp's converter changes some families: Llama's queries and keys are in the order in which
pairs rotate, and norms of Gemma have 1 added. A spec says the same as data, so tensors are read as
they are. Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from pyengine.cpu import QuantizedWeight
from pyengine.errors import ModelLoadError
from pyengine.models.checkpoint_files import TensorHeader, WeightHeaders
from pyengine.models.config import check_sizes
from pyengine.models.decoder.checkpoint import Array, StoredTensor, Tensors
from pyengine.models.decoder.gguf_settings import gguf_settings
from pyengine.models.decoder.loading import OpenedModel, checked_weights, spec_of
from pyengine.models.decoder.names import Names, Stored, stored, vector
from pyengine.models.decoder.recurrent import GatedDelta, Mamba, Mamba2
from pyengine.models.decoder.spec import Attention, DecoderSpec, Layer, QueryKeyNorm
from pyengine.models.gguf_file import GGUFFile
from pyengine.models.gguf_header import GGML_TYPES, GGUFHeader, GGUFTensor
from pyengine.models.gguf_keys import HeaderKeys
from pyengine.models.gguf_rope import ROPE_TENSORS
from pyengine.utils.packaging import needs_extra

_log = logging.getLogger(__name__)

_KEPT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Formats of `QuantizedWeight`; tensors in others are read as floats."""
_BLOCK_BYTES = {name: num_bytes for name, _, num_bytes in GGML_TYPES.values()}
_FLOATS: Mapping[str, np.dtype[Any]] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(np.uint16),
}
_PAIRS = ("llama", "mixtral", "granite", "granitemoe", "smollm3")
_OFFSETS = (
    *("gemma", "gemma2", "gemma3_text", "nemotron"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"),
)
_TILED = ("qwen3_5_text", "qwen3_5_moe_text")
"""Families whose value heads are not in the order of their key heads."""


@dataclass(frozen=True, slots=True)
class GGUFStored(StoredTensor):
    """A tensor of an open GGUF file, or the part of one expert; `start` is in the file.

    If it `is_kept`, kernels may multiply by its bytes; else it is read as floats.
    """

    reads_floats: ClassVar[bool] = True
    file: GGUFFile | None = None
    tensor: GGUFTensor | None = None
    is_kept: bool = True

    def reshaped(self, shape: tuple[int, ...]) -> "GGUFStored":
        """See `StoredTensor.reshaped`."""
        assert self.tensor is not None
        return replace(self, shape=shape, tensor=replace(self.tensor, shape=shape))

    @property
    def packed_as(self) -> str | None:
        """See `StoredTensor.packed_as`."""
        is_kept = self.is_kept and self.dtype in _KEPT and self.is_whole
        return self.dtype if is_kept else None

    @property
    def num_bytes(self) -> int:
        """Bytes in the file: rows are of one size."""
        assert self.tensor is not None
        per_row = self.tensor.num_bytes // int(np.prod(self.tensor.shape[:-1], dtype=np.int64))
        return per_row * int(np.prod(self.shape[:-1], dtype=np.int64))

    @staticmethod
    def laid_out(parts: "Sequence[GGUFStored]", shape: tuple[int, int]) -> QuantizedWeight:
        """See `StoredTensor.laid_out`."""
        packed, start = np.empty(sum(part.num_bytes for part in parts), np.uint8), 0
        for part in parts:
            part.read_bytes(packed[start : start + part.num_bytes])
            start += part.num_bytes
        return QuantizedWeight(parts[0].dtype, packed.data, *shape)

    def read_bytes(self, out: npt.NDArray[np.uint8]) -> None:
        """Read its bytes into `out`, by an ordinary read."""
        assert self.file is not None and self.tensor is not None
        self.file.read(replace(self.tensor, offset=self.start), out)

    def read(self) -> Array:
        """The tensor in float32; floats as in the file."""
        if self.rows is not None and self.rows.step == 1 and len(self.shape) == 2:
            return self._only_rows().read()
        array: Array = np.empty(self.num_bytes, np.uint8)
        self.read_bytes(array)
        if self.dtype in _FLOATS:
            array = array.view(_FLOATS[self.dtype]).reshape(self.shape)
        else:
            array = _dequantised(array, self.dtype).reshape(self.shape)
        return self.cut(array.T if self.is_transposed else array)

    def _only_rows(self) -> "GGUFStored":
        """Its `rows` as a separate tensor."""
        assert self.rows is not None
        shape = (self.rows.stop - self.rows.start, self.shape[1])
        start = self.start + self.rows.start * (self.num_bytes // self.shape[0])
        return replace(self, shape=shape, start=start, rows=None)


def _dequantised(data: npt.NDArray[np.uint8], kind: str) -> Array:
    """The numbers of a quantised tensor; `NotImplementedError` if the library gguf cannot."""
    try:
        from gguf import GGMLQuantizationType, dequantize
    except ImportError as error:
        missing = error.name or "gguf"
        raise ModelLoadError(needs_extra("engine", "reading GGUF files", missing)) from error
    numbers: Array = dequantize(data, GGMLQuantizationType[kind])
    return numbers


def open_gguf(file: GGUFFile, *, keeps_formats: bool = True) -> OpenedModel:
    """The model in a file, with its tensors; reads the header only.

    Unless it `keeps_formats`, all tensors are floats; else those in formats without a kernel are.
    Raises `ModelLoadError` for an unknown architecture, for unread keys,
    and as `open_model` for tensors.
    """
    path, header = file.path, file.header
    keys = HeaderKeys(path, header)
    settings = gguf_settings(keys)
    for key in header.values:
        if key.startswith("tokenizer."):  # read with the tokenizer
            keys.raw(key)
    keys.refuse_unread()
    tensors = {tensor.name: TensorHeader(tensor.type, tensor.shape) for tensor in header.tensors}
    check_sizes(settings, WeightHeaders(tensors, header.file_size), path)
    spec = _as_converted(spec_of(settings, f"the header of {path}"))
    stored_tensors = {
        tensor.name: GGUFStored(
            path,
            tensor.name,
            tensor.type,
            tensor.shape,
            tensor.offset,
            file=file,
            tensor=tensor,
            is_kept=keeps_formats,
        )
        for tensor in header.tensors
    }
    mixers = (layer.attention for layer in spec.layers)
    rotates = any(mixer is not None and mixer.rotary is not None for mixer in mixers)
    names = NAMES if rotates else replace(NAMES, no_effect={})
    count = header.values.get(f"{header.architecture}.block_count")
    for layer in range(len(spec.layers), count if isinstance(count, int) and spec.recurrent else 0):
        pattern = re.escape(names.layer.format(layer)) + ".*"
        names = replace(names, no_effect={**names.no_effect, pattern: "layers for speculation"})
    weights = checked_weights(spec, names, Tensors(stored_tensors, str(path), "its header"))
    sizes = _sizes_of_formats(path, header)
    formats = _kept_formats(sizes) if keeps_formats else ""
    first = spec.layers[0].attention
    pair_size = None
    if spec.family in _PAIRS and isinstance(first, Attention):
        pair_size = first.head_dim
    return OpenedModel(spec, weights, formats, pair_size)


def _sizes_of_formats(path: Path, header: GGUFHeader) -> Counter[str]:
    """The bytes of each quantised format; `ModelLoadError` for those that cannot be read."""
    sizes: Counter[str] = Counter()
    for tensor in header.tensors:
        if tensor.type in _FLOATS:
            continue
        sizes[tensor.type] += tensor.num_bytes
        if tensor.type not in _KEPT and sizes[tensor.type] == tensor.num_bytes:
            try:
                _dequantised(np.zeros(_BLOCK_BYTES[tensor.type], np.uint8), tensor.type)
            except (NotImplementedError, ValueError) as error:
                raise ModelLoadError(
                    f"{path}: the tensor {tensor.name} is of type {tensor.type}, whose numbers "
                    "pyengine does not read; convert the model again, to another type"
                ) from error
    return sizes


def _kept_formats(sizes: Counter[str]) -> str:
    """The formats that are kept, as text, the largest share of the file's bytes first."""
    if dequantised := [kind for kind in sizes if kind not in _KEPT]:
        _log.warning(
            "tensors of type %s are read as floats: products are in %s",
            " and ".join(dequantised),
            ", ".join(_KEPT),
        )
    return " and ".join(kind for kind, _ in sizes.most_common() if kind in _KEPT)


def _as_converted(spec: DecoderSpec) -> DecoderSpec:
    """The spec with llama.cpp's changes of weights."""
    if spec.family in _PAIRS:
        return replace(spec, layers=tuple(map(_with_pairs, spec.layers)))
    if spec.recurrent:
        layers = tuple(_with_rates(layer, is_tiled=spec.family in _TILED) for layer in spec.layers)
        spec = replace(spec, layers=layers)
    if spec.family in _OFFSETS:
        norm = replace(spec.norm, offset=0.0)
        return replace(spec, norm=norm, layers=tuple(map(_without_offsets, spec.layers)))
    return spec


def _with_pairs(layer: Layer) -> Layer:
    mixer = layer.mixer
    assert isinstance(mixer, Attention)
    if mixer.rotary is None:
        return layer
    return replace(layer, mixer=replace(mixer, rotary=replace(mixer.rotary, order="pairs")))


def _with_rates(layer: Layer, *, is_tiled: bool) -> Layer:
    """The layer with decay rates, not their logarithms, and value heads in the file's order."""
    mixer, beside = layer.mixer, layer.beside
    if isinstance(mixer, GatedDelta):
        mixer = replace(mixer, has_logs=False, tiled_heads=is_tiled)
    elif isinstance(mixer, Mamba | Mamba2):
        mixer = replace(mixer, has_logs=False)
    if beside is not None:
        beside = replace(beside, has_logs=False)
    return replace(layer, mixer=mixer, beside=beside)


def _without_offsets(layer: Layer) -> Layer:
    names = ("before_mixer", "after_mixer", "before_feed_forward", "after_feed_forward")
    norms: dict[str, Any] = {name: getattr(layer, name) for name in names}
    mixer = layer.mixer
    if isinstance(mixer, Attention) and mixer.query_key_norm is not None:
        norm = replace(mixer.query_key_norm.norm, offset=0.0)
        mixer = replace(mixer, query_key_norm=QueryKeyNorm(norm=norm, over="head"))
    changed = {name: norm and replace(norm, offset=0.0) for name, norm in norms.items()}
    return replace(layer, mixer=mixer, **changed)


NAMES = Names(
    outside={
        "embedding": stored("token_embd"),
        "positions": stored("position_embd"),
        "norm": (*stored("output_norm"), *stored("token_embd_norm")),
        "head": stored("output"),
    },
    inside={
        "before_mixer": stored("attn_norm"),
        "qkv": (*stored("attn_qkv"), *stored("attn_q", "attn_k", "attn_v")),
        "out": stored("attn_output"),
        "query_norm": stored("attn_q_norm"),
        "key_norm": stored("attn_k_norm"),
        "sinks": stored("attn_sinks"),
        "after_mixer": stored("post_attention_norm"),
        "before_feed_forward": (
            *stored("ffn_norm"),
            *stored("post_attention_norm"),
            *stored("attn_norm"),
        ),
        "gate_up": (*stored("ffn_gate", "ffn_up"), *stored("ffn_up")),
        "up": stored("ffn_up"),
        "down": stored("ffn_down"),
        "after_feed_forward": stored("post_ffw_norm"),
        "router": stored("ffn_gate_inp"),
        "correction": vector("exp_probs_b.bias"),
        "expert_gate_up": stored("ffn_gate_exps", "ffn_up_exps"),
        "expert_down": stored("ffn_down_exps"),
        "shared_gate_up": stored("ffn_gate_shexp", "ffn_up_shexp"),
        "shared_down": stored("ffn_down_shexp"),
        "shared_up": stored("ffn_up_shexp"),
        "shared_gate": (Stored(("ffn_gate_inp_shexp",), is_row=True),),
        "expert_up": stored("ffn_up_exps"),
        "to_latent": stored("ffn_latent_down"),
        "from_latent": stored("ffn_latent_up"),
        "delta_qkvz": (
            Stored(("attn_qkv", "attn_gate"), kinds=(3, 1)),
            Stored(("ssm_in",), is_grouped=True),
        ),
        "delta_ba": (Stored(("ssm_ba",), is_grouped=True), *stored("ssm_beta", "ssm_alpha")),
        "delta_norm": stored("ssm_norm"),
        "delta_out": stored("ssm_out"),
        "mamba_in": stored("ssm_in"),
        "mamba_rows": stored("ssm_x"),
        "mamba_norm": stored("ssm_norm"),
        "mamba_out": stored("ssm_out"),
        "time_up": stored("ssm_dt"),
        "time_norm": stored("ssm_dt_norm"),
        "b_norm": stored("ssm_b_norm"),
        "c_norm": stored("ssm_c_norm"),
        "conv": (*stored("ssm_conv1d"), *stored("shortconv.conv")),
        "conv_in": stored("shortconv.in_proj"),
        "conv_out": stored("shortconv.out_proj"),
        "rate": vector("ssm_a"),
        "time_bias": vector("ssm_dt.bias"),
        "skip": vector("ssm_d"),
    },
    layer="blk.{}.",
    base="",
    no_effect={name.replace(".", r"\."): "read with the header" for name in ROPE_TENSORS},
)
"""llama.cpp's names, which are the same for all architectures."""
