"""Drafts from the text itself: fewer steps where an answer repeats it, and the same tokens."""

from pyengine import LLM, SamplingParams

PROMPT = (
    "Repeat this list.\n"
    "Monday: reading. Tuesday: writing. Wednesday: swimming. Thursday: cooking. Friday: music.\n"
    "Monday: reading. Tuesday: writing. Wednesday: swimming. Thursday: cooking. Friday: music.\n"
    "Monday:"
)


def main() -> None:
    """Generate with drafts and without, and compare."""
    params = SamplingParams(temperature=0, max_tokens=40)
    llm = LLM(speculation="ngram", num_speculative_tokens=7, dtype="float32")
    [drafted] = llm.generate([PROMPT], params, use_tqdm=False)
    stats = llm.stats()
    plain_params = SamplingParams(temperature=0, max_tokens=40, speculate=False)
    [plain] = llm.generate([PROMPT], plain_params, use_tqdm=False)
    print(repr(drafted.outputs[0].text))
    print("the same tokens:", drafted.outputs[0].token_ids == plain.outputs[0].token_ids)
    accepted = stats.counters["accepted_draft_tokens"]
    print(f"{stats.num_drafts} steps with drafts, {accepted} drafts accepted")


if __name__ == "__main__":
    main()
