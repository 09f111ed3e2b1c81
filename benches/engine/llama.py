"""llama.cpp with several sequences in one batch, as its server's slots have them.

    .venv-llama/bin/python -m benches.engine.llama FILE ROWS CONTEXT on|off

`Batches` generates greedily, for `serve.py`. As a program, for `long_contexts.py`, it times a long
context: chunks at the end of a prompt, then decode steps; the last argument is flash attention.
Each line of its input names a stage; the answer is a line of JSON. Needs llama-cpp-python alone.
"""

import ctypes
import json
import os
import sys
from random import Random
from time import perf_counter
from typing import Any

import numpy as np

BATCH, CONTEXT = 512, 1024
"""Tokens of a batch, and of a sequence of `Batches`."""
CHUNKS, STEPS = 4, 12
"""The last batches of a prompt that are timed, and the decode steps."""
BESIDE = 640
"""Cells of a sequence beyond a long context."""
Row = tuple[int, int, int, bool]
"""A token, its position, its sequence, and whether its logits are computed."""


class Model:
    """A model with a context for some sequences; `build` names its compiled instructions."""

    def __init__(self, path: str, sequences: int, length: int, **settings: Any) -> None:
        import llama_cpp

        self.library, self.sequences = llama_cpp, sequences
        self._silent = llama_cpp.llama_log_callback(lambda *given: None)
        llama_cpp.llama_log_set(self._silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.build = llama_cpp.llama_print_system_info().decode().strip(" |")
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = os.environ.get("LLAMA_EXTRA_BUFTS", "1") != "0"
        model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        parameters, cores = llama_cpp.llama_context_default_params(), len(os.sched_getaffinity(0))
        settings |= {"n_ctx": length * sequences, "n_batch": BATCH, "n_ubatch": BATCH}
        settings |= {"n_seq_max": sequences, "n_threads": cores, "n_threads_batch": cores}
        for name, value in settings.items():
            setattr(parameters, name, value)
        self.context = llama_cpp.llama_init_from_model(model, parameters)
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def decode(self, rows: list[Row]) -> float:
        """Compute a batch; its seconds."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for index, (token, position, sequence, has_logits) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, position
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, sequence
            batch.logits[index] = has_logits
        begin = perf_counter()
        if self.library.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        self.library.llama_synchronize(self.context)
        return perf_counter() - begin


class Batches(Model):
    """Greedy generation; nothing ends a sequence before its last token."""

    def __init__(self, path: str, sequences: int) -> None:
        super().__init__(path, sequences, CONTEXT)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The tokens after each prompt. Raises `ValueError` for more than the context holds."""
        library, longest = self.library, max(map(len, prompts)) + max_tokens
        if len(prompts) > self.sequences or longest > CONTEXT:
            raise ValueError(
                f"{len(prompts)} sequences of up to {longest} tokens do not fit into "
                f"{self.sequences} of {CONTEXT}"
            )
        library.llama_memory_clear(library.llama_get_memory(self.context), True)
        answers: list[list[int]] = [[] for _ in prompts]
        rows = [
            (token, position, number, position == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for position, token in enumerate(prompt)
        ]
        for start in range(0, len(rows), BATCH):
            self._append(rows[start : start + BATCH], answers)
        for step in range(max_tokens - 1):
            rows = [
                (tokens[-1], len(prompts[number]) + step, number, True)
                for number, tokens in enumerate(answers)
            ]
            self._append(rows, answers)
        return answers

    def _append(self, rows: list[Row], answers: list[list[int]]) -> None:
        self.decode(rows)
        for index, (_, _, number, has_logits) in enumerate(rows):
            if has_logits:
                logits = self.library.llama_get_logits_ith(self.context, index)
                row = np.ctypeslib.as_array(logits, (self.vocab_size,))
                answers[number].append(int(row.argmax()))


class LongContext(Model):
    """Sequences of one length. The first is computed, the others get a copy of its state."""

    def __init__(self, path: str, rows: int, context: int, flash: str) -> None:
        flash_type = {"on": 1, "off": 0}[flash]
        settings = {"swa_full": False, "kv_unified": False, "flash_attn_type": flash_type}
        super().__init__(path, rows, context + BESIDE, **settings)
        random = Random(0)
        self.tokens = [random.randrange(10, 30_000) for _ in range(context + STEPS)]
        self.filled, self.untimed = 0, context - CHUNKS * BATCH

    def fill(self) -> bool:
        """Compute some of the tokens that are not timed; whether there are more."""
        self._chunks(min(8, (self.untimed - self.filled) // BATCH))
        return self.filled < self.untimed

    def prompt(self) -> list[float]:
        """The seconds of the last batches of the prompt; the other sequences get copies."""
        seconds = self._chunks(CHUNKS)
        library = self.library
        size = library.llama_state_seq_get_size(self.context, 0)
        state = (ctypes.c_uint8 * size)()
        size = library.llama_state_seq_get_data(self.context, state, size, 0)
        for row in range(1, self.sequences):
            if library.llama_state_seq_set_data(self.context, state, size, row) != size:
                raise RuntimeError("the state of a sequence was not copied")
        return seconds

    def steps(self) -> list[float]:
        """The seconds of decode steps of all sequences."""
        return [
            self.decode([(self.tokens[at], at, row, True) for row in range(self.sequences)])
            for at in range(self.filled, self.filled + STEPS)
        ]

    def _chunks(self, count: int) -> list[float]:
        seconds = []
        for _ in range(count):
            end = self.filled + BATCH
            positions = range(self.filled, end)
            seconds.append(
                self.decode([(self.tokens[at], at, 0, at == end - 1) for at in positions])
            )
            self.filled = end
        return seconds


def main() -> None:
    """Answer line by line: fill (again and again), prompt, decode."""
    path, rows, context, flash = sys.argv[1:]
    model = LongContext(path, int(rows), int(context), flash)
    stages = {"fill": model.fill, "prompt": model.prompt, "decode": model.steps}
    for line in sys.stdin:
        print(json.dumps(stages[json.loads(line)]()), flush=True)


if __name__ == "__main__":
    main()
