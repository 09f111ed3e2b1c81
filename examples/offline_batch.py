"""Many prompts in one call: the engine batches them and computes their shared prefix once."""

from pyengine import LLM, SamplingParams

PREAMBLE = (
    "You are a careful assistant for a travel agency. You answer questions about countries and "
    "their capitals with a single short sentence. You never guess, and you never add anything. "
)
COUNTRIES = ["France", "Japan", "Italy", "Egypt", "Norway", "Peru", "Kenya", "Canada"]


def main() -> None:
    """Answer eight questions, and print how many prompt tokens came from the cache."""
    llm = LLM()
    prompts = [f"{PREAMBLE}The capital of {country} is" for country in COUNTRIES]
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    for country, output in zip(COUNTRIES, outputs, strict=True):
        print(f"{country}:{output.outputs[0].text!r}")
    total = sum(len(output.prompt_token_ids) for output in outputs)
    cached = sum(output.num_cached_tokens for output in outputs)
    print(f"{total} prompt tokens, {cached} of them from the cache")


if __name__ == "__main__":
    main()
