"""Draft tokens from earlier text: the same tokens in fewer steps if an answer repeats it."""

from pyengine import LLM, SamplingParams

PROMPT = (
    "Repeat this list.\n"
    "Monday: reading. Tuesday: writing. Wednesday: swimming. Thursday: cooking. Friday: music.\n"
    "Monday: reading. Tuesday: writing. Wednesday: swimming. Thursday: cooking. Friday: music.\n"
    "Monday:"
)


def main() -> None:
    """Generate with and without drafts, and compare the tokens."""
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
