"""Products of quantised weights with rows by ggml, the library of llama.cpp, called through ctypes.

    .venv/bin/python -m benches.engine.ggml_products FOLDER FORMAT OUTPUTS INPUTS COPIES ROUNDS

FOLDER has libggml-base.so and libggml-cpu.so, as the package llama-cpp-python has them. As in
llama.cpp, weights are repacked where ggml's CPU backend does so for the format. A graph multiplies
by all copies. Called by `quantized_products.py`.
"""

import ctypes
import json
import sys
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

TYPES = {"Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8, "Q4_K": 12, "Q5_K": 13, "Q6_K": 14}
FLOAT32 = 0


class Parameters(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool))


class Ggml:
    """The functions that are called, with their types."""

    def __init__(self, folder: Path) -> None:
        base = ctypes.CDLL(str(folder / "libggml-base.so"), ctypes.RTLD_GLOBAL)
        cpu = ctypes.CDLL(str(folder / "libggml-cpu.so"), ctypes.RTLD_GLOBAL)

        def function(library: Any, name: str, result: Any, *arguments: Any) -> Any:
            found = getattr(library, name)
            found.restype, found.argtypes = result, arguments
            return found

        pointer = c_void_p
        self.init = function(base, "ggml_init", pointer, Parameters)
        self.tensor = function(
            base, "ggml_new_tensor_2d", pointer, pointer, c_int, c_int64, c_int64
        )
        self.multiply = function(base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
        self.graph = function(base, "ggml_new_graph", pointer, pointer)
        self.expand = function(base, "ggml_build_forward_expand", None, pointer, pointer)
        self.set = function(
            base, "ggml_backend_tensor_set", None, pointer, pointer, c_size_t, c_size_t
        )
        self.compute = function(base, "ggml_backend_graph_compute", c_int, pointer, pointer)
        self.supports = function(base, "ggml_backend_dev_supports_op", c_bool, pointer, pointer)
        self.buffer = function(base, "ggml_backend_buft_alloc_buffer", pointer, pointer, c_size_t)
        self.allocate = function(
            base, "ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer
        )
        self.set_threads = function(cpu, "ggml_backend_cpu_set_n_threads", None, pointer, c_int)
        registry = function(cpu, "ggml_backend_cpu_reg", pointer)()
        device = function(base, "ggml_backend_reg_dev_get", pointer, pointer, c_size_t)
        self.device = device(registry, 0)
        self.backend = function(cpu, "ggml_backend_cpu_init", pointer)()
        self.plain = function(base, "ggml_backend_dev_buffer_type", pointer, pointer)(self.device)
        address = function(base, "ggml_backend_reg_get_proc_address", pointer, pointer, c_char_p)(
            registry, b"ggml_backend_dev_get_extra_bufts"
        )
        extra = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.device)
        self.others: list[Any] = []
        while extra[len(self.others)]:
            self.others.append(extra[len(self.others)])

    def context(self) -> Any:
        """Memory for descriptions of tensors."""
        return self.init(Parameters(64 << 20, None, True))

    def buffer_type(self, format: str, outputs: int, inputs: int) -> Any:
        """The first one in which the product is there, as llama.cpp looks for it."""
        for kind in self.others:
            context = self.context()
            weight = self.tensor(context, TYPES[format], inputs, outputs)
            ctypes.memmove(weight + 8, ctypes.byref(c_void_p(self.buffer(kind, 0))), 8)
            rows = self.tensor(context, FLOAT32, inputs, 512)
            if self.supports(self.device, self.multiply(context, weight, rows)):
                return kind
        return self.plain


def measure(
    ggml: Ggml, format: str, shape: tuple[int, int], copies: int, rounds: int, plan: Any
) -> dict[str, dict[str, float]]:
    """Microseconds of a product by threads and rows; `plan` has the threads and the rows."""
    from benches.engine.quantized_products import random_blocks

    outputs, inputs = shape
    context = ggml.context()
    weights = [ggml.tensor(context, TYPES[format], inputs, outputs) for _ in range(copies)]
    ggml.allocate(context, ggml.buffer_type(format, outputs, inputs))
    data = random_blocks(format, outputs, inputs)
    for weight in weights:
        ggml.set(weight, data.ctypes.data, 0, data.nbytes)
    results: dict[str, dict[str, float]] = {}
    for threads in plan["threads"]:
        ggml.set_threads(ggml.backend, threads)
        for count, few in plan["rows"]:
            context = ggml.context()
            rows = ggml.tensor(context, FLOAT32, inputs, count)
            graph = ggml.graph(context)
            for weight in weights[:few]:
                ggml.expand(graph, ggml.multiply(context, weight, rows))
            ggml.allocate(context, ggml.plain)
            floats = np.random.default_rng(0).normal(size=(count, inputs)).astype(np.float32)
            ggml.set(rows, floats.ctypes.data, 0, floats.nbytes)
            times = []
            for _ in range(rounds + 1):
                start = perf_counter()
                ggml.compute(ggml.backend, graph)
                times.append(perf_counter() - start)
            results.setdefault(str(threads), {})[str(count)] = 1e6 * median(times[1:]) / few
    return results


def main() -> None:
    """Print the microseconds as JSON."""
    folder, format, outputs, inputs, copies, rounds, plan = sys.argv[1:]
    shape = int(outputs), int(inputs)
    found = measure(Ggml(Path(folder)), format, shape, int(copies), int(rounds), json.loads(plan))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
