"""An engine in one file: continuous batching, chunked prefill, shared prefixes, preemption.

It needs NumPy only. The model is a toy, but each of its tokens depends on all tokens so far, which
it reads from `kv` through block tables. Ten blocks are too few for five prompts at once, so some
sequences are preempted. When they restart, they find their own blocks in the cache.
"""

import numpy as np

from pyengine import BlockManager, Prefilled, Sequence, StepBuffers, StepPlan

BLOCK, BLOCKS, BUDGET, MAX_SEQUENCES, NEW_TOKENS = 4, 10, 12, 4, 6
VOCABULARY = 97
COMMON = list(range(1, 9))
PROMPTS = [[*COMMON, 20], [*COMMON, 21, 22, 23], list(range(40, 60)), [*COMMON, 20], [3]]


class ToyEngine:
    """Generates `NEW_TOKENS` tokens for each prompt."""

    def __init__(self) -> None:
        self.manager = BlockManager(BLOCKS, BLOCK)
        sizes: dict[str, int | tuple[int, int]] = {
            "query_start_loc": MAX_SEQUENCES + 1,
            "seq_lens": MAX_SEQUENCES,
            "block_tables": (MAX_SEQUENCES, 8),
        }
        for name in ("input_ids", "positions", "slot_mapping", "logits_indices"):
            sizes[name] = BUDGET
        self.arrays = {name: np.zeros(size, np.int64) for name, size in sizes.items()}
        self.buffers = StepBuffers(**self.arrays)
        self.kv = np.zeros((BLOCKS + 1, BLOCK), np.int64)  # the last block is the null block
        self.num_preemptions = 0

    def generate(self, prompts: list[list[int]]) -> list[list[int]]:
        """Generate for all prompts. Returns each prompt with its new tokens."""
        waiting = [self.manager.sequence(prompt) for prompt in prompts]
        order = [sequence.id for sequence in waiting]
        lengths = {sequence.id: sequence.num_tokens + NEW_TOKENS for sequence in waiting}
        running: list[Sequence] = []
        outputs: dict[int, list[int]] = {}
        while waiting or running:
            plan = self.schedule(waiting, running)
            plan.commit(self.forward(plan))
            for sequence in list(running):
                if sequence.num_tokens == lengths[sequence.id]:
                    outputs[sequence.id] = sequence.tokens()
                    running.remove(sequence)
                    sequence.free()
        return [outputs[number] for number in order]

    def schedule(self, waiting: list[Sequence], running: list[Sequence]) -> StepPlan:
        """Plan one step: all decodes, then prefills while budget and blocks last."""
        plan = self.manager.begin_step(BUDGET)
        for index in reversed(plan.decode(running)):  # too few blocks: preempt these
            running[index].reset()
            waiting.append(running.pop(index))
            self.num_preemptions += 1
        while waiting and plan.num_sequences < MAX_SEQUENCES:
            answer = plan.prefill(waiting[0], BUDGET, spare_blocks=0)
            if not isinstance(answer, Prefilled) or not answer.samples:
                break  # too few blocks, no budget, or a chunk: the rest comes later
            running.append(waiting.pop(0))
        return plan

    def forward(self, plan: StepPlan) -> np.ndarray:
        """Compute the next token: the sum of token * (position + 1) over all tokens so far."""
        for source, destination in plan.copies():  # before anything else of the step
            self.kv[destination] = self.kv[source]
        plan.fill(self.buffers)
        ids, positions = self.arrays["input_ids"], self.arrays["positions"]
        slots = self.arrays["slot_mapping"]
        new = np.flatnonzero(slots[: plan.num_tokens] >= 0)  # -1: its KV is already cached
        self.kv.reshape(-1)[slots[new]] = ids[new] * (positions[new] + 1)
        starts = self.arrays["query_start_loc"][: plan.num_sequences + 1]
        sampled = []
        for row in self.arrays["logits_indices"][: plan.num_samples]:
            index = np.searchsorted(starts, row, side="right") - 1
            context = self.kv[self.arrays["block_tables"][index]].reshape(-1)
            sampled.append(context[: positions[row] + 1].sum() % VOCABULARY)
        return np.array(sampled, np.int64)


def alone(prompt: list[int]) -> list[int]:
    """Tokens of one prompt, without an engine and without a cache."""
    tokens = list(prompt)
    for _ in range(NEW_TOKENS):
        tokens.append(sum(token * at for at, token in enumerate(tokens, start=1)) % VOCABULARY)
    return tokens


def main() -> None:
    """Run five prompts through ten blocks and compare them with each prompt alone."""
    engine = ToyEngine()
    outputs = engine.generate(PROMPTS)
    stats = engine.manager.stats()
    print("the same tokens as each prompt alone:", outputs == [alone(each) for each in PROMPTS])
    print("preemptions:", engine.num_preemptions)
    print("tokens from the cache:", stats.cached_tokens)
    print("blocks evicted:", stats.evicted_blocks)


if __name__ == "__main__":
    main()
