"""Generate several answers to one prompt, which share its blocks, and print the likeliest first."""

from pyengine import LLM, SamplingParams

PROMPT = "A short poem about the sea, in one sentence:"


def main() -> None:
    """Sample four answers and print them, the likeliest first."""
    llm = LLM()
    params = SamplingParams(n=4, seed=7, temperature=0.9, top_p=0.95, max_tokens=24, logprobs=0)
    [output] = llm.generate([PROMPT], params, use_tqdm=False)

    def mean_logprob(index: int) -> float:
        answer = output.outputs[index]
        assert answer.cumulative_logprob is not None
        return answer.cumulative_logprob / len(answer.token_ids)

    for index in sorted(range(4), key=mean_logprob, reverse=True):
        print(f"{mean_logprob(index):.2f} {output.outputs[index].text!r}")
    counters = llm.stats().counters
    print(f"{len(output.prompt_token_ids)} prompt tokens, computed once for 4 answers")
    print(f"{counters['forked_tokens']} tokens of forks were not computed again")


if __name__ == "__main__":
    main()
