"""Greedy generations by llama.cpp, all sequences in one batch, as its server's slots are.

    .venv-llama/bin/python -m benches.engine.llama_batch FILE SEQUENCES < WORKS

Called by `gguf.py`, and by `serve.py` in its process. Nothing ends a sequence before its last
token. Needs llama-cpp-python alone. Every line of WORKS is a JSON object with
`prompts` (token ids) and `max_tokens`; every line of the output has the seconds and the tokens.
"""

import ctypes
import json
import os
import sys
from time import perf_counter

import numpy as np

CONTEXT = 1024
"""Tokens of a sequence."""
BATCH = 512


class Engine:
    """A model with room for some sequences; `build` are the instructions it was compiled for."""

    def __init__(self, path: str, sequences: int) -> None:
        import llama_cpp

        self.library, self.sequences = llama_cpp, sequences
        silent = llama_cpp.llama_log_callback(lambda *given: None)
        self._silent = silent  # called as long as the process lives
        llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self.build = llama_cpp.llama_print_system_info().decode().strip(" |")
        options = llama_cpp.llama_model_default_params()
        options.use_extra_bufts = os.environ.get("LLAMA_EXTRA_BUFTS", "1") != "0"
        model = llama_cpp.llama_model_load_from_file(path.encode(), options)
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx, settings.n_batch, settings.n_ubatch = CONTEXT * sequences, BATCH, BATCH
        settings.n_seq_max = sequences
        settings.n_threads = settings.n_threads_batch = len(os.sched_getaffinity(0))
        self.context = llama_cpp.llama_init_from_model(model, settings)
        vocabulary = llama_cpp.llama_model_get_vocab(model)
        self.vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self.batch = llama_cpp.llama_batch_init(BATCH, 0, 1)

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """The tokens after each prompt.

        Raises `ValueError` for more prompts than there is room for, or longer ones.
        """
        library, longest = self.library, max(map(len, prompts)) + max_tokens
        if len(prompts) > self.sequences or longest > CONTEXT:
            raise ValueError(
                f"{len(prompts)} sequences of up to {longest} tokens: there is room for "
                f"{self.sequences} of {CONTEXT}"
            )
        library.llama_memory_clear(library.llama_get_memory(self.context), True)
        found: list[list[int]] = [[] for _ in prompts]
        rows = [
            (token, place, number, place == len(prompt) - 1)
            for number, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
        ]
        for start in range(0, len(rows), BATCH):
            self._decode(rows[start : start + BATCH], found)
        for step in range(max_tokens - 1):
            rows = [
                (tokens[-1], len(prompts[number]) + step, number, True)
                for number, tokens in enumerate(found)
            ]
            self._decode(rows, found)
        return found

    def _decode(self, rows: list[tuple[int, int, int, bool]], found: list[list[int]]) -> None:
        """Compute tokens, and append the next one where it is asked for."""
        batch, library = self.batch, self.library
        batch.n_tokens = len(rows)
        for index, (token, place, number, is_asked) in enumerate(rows):
            batch.token[index], batch.pos[index] = token, place
            batch.n_seq_id[index], batch.seq_id[index][0] = 1, number
            batch.logits[index] = is_asked
        if library.llama_decode(self.context, batch):
            raise RuntimeError("llama_decode failed")
        for index, (_, _, number, is_asked) in enumerate(rows):
            if is_asked:
                logits = library.llama_get_logits_ith(self.context, index)
                found[number].append(
                    int(np.ctypeslib.as_array(logits, (self.vocab_size,)).argmax())
                )


def main() -> None:
    """Answer line by line."""
    engine = Engine(sys.argv[1], int(sys.argv[2]))
    for line in sys.stdin:
        asked = json.loads(line)
        begin = perf_counter()
        tokens = engine.generate(asked["prompts"], asked["max_tokens"])
        print(json.dumps({"seconds": perf_counter() - begin, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
