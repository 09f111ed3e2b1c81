"""Open a model for the CPU and multiply by its weights: `python -m ... PATH QUANTIZATION DTYPE`.

As a program it runs where torch and transformers cannot be imported, and prints what `multiplied`
returns and the libraries that were imported, as JSON.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

_IDS = (2, 7, 3, 5, 4, 6, 0, 1)


def opened(path: Path, quantization: str, dtype: str) -> Any:
    """The decoder of a folder or a GGUF file, with the CPU's kernel set."""
    from pyengine.cpu.threads import kernel_threads
    from pyengine.models.decoder.cpu_kernels import CpuKernels
    from pyengine.models.decoder.gguf import open_gguf
    from pyengine.models.decoder.loading import open_model
    from pyengine.models.decoder.product_choice import ProductChooser
    from pyengine.models.gguf_file import GGUFFile

    products: Any = ProductChooser("auto", dtype)  # type: ignore[arg-type] # a word of the command
    kernels: Any = CpuKernels(kernel_threads(2), quantization, dtype, products)  # type: ignore[arg-type] # likewise
    if path.is_dir():
        return open_model(path).decoder(kernels)
    with GGUFFile.open(path) as file:
        return open_gguf(file).decoder(kernels)


def multiplied(path: Path, quantization: str, dtype: str) -> dict[str, object]:
    """A digest of rows times the weights of every layer and of the head, and their size."""
    import numpy as np

    from pyengine.models.decoder.kernels import Step
    from pyengine.models.kv_scales import read_kv_scales
    from pyengine.utils.dtypes import widened

    decoder, digest, largest = opened(path, quantization, dtype), hashlib.sha256(), 0.0
    ids = np.array(_IDS)
    rows = decoder.embedded(ids, np.arange(len(ids)))
    results = [rows, decoder.logits(rows)]
    step = Step(ids, np.arange(len(ids)), None, {})  # type: ignore[arg-type]
    for layer in decoder._layers:
        results += [layer._feed_forward(rows, step), layer._mixer._qkv(rows, step)]
    for result in results:
        digest.update(np.ascontiguousarray(result).tobytes())
        largest = max(largest, float(np.abs(widened(result)).max()))
    if path.is_dir():
        from pyengine.models.checkpoint_files import check_weights

        digest.update(repr(sorted(read_kv_scales(path, check_weights(path)).items())).encode())
    return {"digest": digest.hexdigest(), "largest": largest}


if __name__ == "__main__":
    loaded: dict[str, Any] = sys.modules
    loaded.update(torch=None, transformers=None)
    result = multiplied(Path(sys.argv[1]), *sys.argv[2:])
    names = {name.partition(".")[0] for name, module in loaded.items() if module is not None}
    result["imported"] = sorted(names - set(sys.stdlib_module_names))
    print(json.dumps(result))
