"""A long context in llama.cpp: the seconds of prompt chunks at its end, and of decode steps after.

    .venv-llama/bin/python -m benches.engine.llama_long FILE ROWS CONTEXT on|off

Called by `long_contexts.py`; the last argument is flash attention. Needs llama-cpp-python alone.
The first sequence is computed, the others get a copy of its state: cells of their own, which are
read for each. Each line of the input names a stage, which is answered by a line of JSON.
"""

import ctypes
import json
import os
import sys
from random import Random
from time import perf_counter
from typing import Any

CHUNK, CHUNKS, STEPS = 512, 4, 12
"""Tokens of a chunk, the last chunks that are timed, and the decode steps."""
BESIDE = 640
"""Cells of a sequence beyond the context."""


class Sequences:
    """A model and sequences of one length."""

    def __init__(self, path: str, rows: int, context: int, flash: str) -> None:
        import llama_cpp

        self.library, self.rows, self.context_len = llama_cpp, rows, context
        self._silent = llama_cpp.llama_log_callback(lambda *given: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = (
            (context + BESIDE) * rows,
            CHUNK,
            CHUNK,
        )
        settings.n_seq_max, settings.swa_full, settings.kv_unified = rows, False, False
        settings.n_threads = settings.n_threads_batch = os.cpu_count()
        settings.flash_attn_type = {"on": 1, "off": 0}[flash]
        self.context = llama_cpp.llama_init_from_model(model, settings)
        self.batch = llama_cpp.llama_batch_init(CHUNK, 0, 1)
        random = Random(0)
        self.tokens = [random.randrange(10, 30_000) for _ in range(context + STEPS)]
        self.filled = 0

    def decode(self, tokens: list[tuple[int, int, bool]]) -> float:
        """The seconds of a batch of positions, sequences, and whether logits are computed."""
        batch, library = self.batch, self.library
        batch.n_tokens = len(tokens)
        for index, (position, sequence, is_asked) in enumerate(tokens):
            batch.token[index], batch.pos[index] = self.tokens[position], position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = is_asked
        begin = perf_counter()
        if library.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        library.llama_synchronize(self.context)
        return perf_counter() - begin

    def chunks(self, count: int) -> list[float]:
        """The seconds of the next chunks of the first sequence."""
        seconds = []
        for _ in range(count):
            last = self.filled + CHUNK - 1
            places = range(self.filled, self.filled + CHUNK)
            seconds.append(self.decode([(place, 0, place == last) for place in places]))
            self.filled += CHUNK
        return seconds

    def copy(self) -> None:
        """Give the other sequences the state of the first."""
        library = self.library
        size = library.llama_state_seq_get_size(self.context, 0)
        state = (ctypes.c_uint8 * size)()
        size = library.llama_state_seq_get_data(self.context, state, size, 0)
        for row in range(1, self.rows):
            if library.llama_state_seq_set_data(self.context, state, size, row) != size:
                raise RuntimeError("the state of a sequence was not copied")

    def steps(self) -> list[float]:
        """The seconds of decode steps of all sequences."""
        places = range(self.filled, self.filled + STEPS)
        return [self.decode([(place, row, True) for row in range(self.rows)]) for place in places]


def main() -> None:
    """Answer line by line: fill (again and again), prompt, decode."""
    path, rows, context, flash = sys.argv[1:]
    sequences = Sequences(path, int(rows), int(context), flash)
    before = int(context) // CHUNK - CHUNKS
    for line in sys.stdin:
        found: Any
        if line.strip() == "fill":
            sequences.chunks(min(8, before - sequences.filled // CHUNK))
            found = sequences.filled < before * CHUNK
        elif line.strip() == "prompt":
            found = sequences.chunks(CHUNKS)
            sequences.copy()
        else:
            found = sequences.steps()
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
