"""Multiple choice by log-probabilities: which answer does the model find most likely?

Each question is computed once for all of its answers: with `prompt_logprobs=1`, prompts use the
prefix cache, which also keeps the log-probabilities of cached prefixes.
"""

from pyengine import LLM, SamplingParams

QUESTIONS = [
    ("The capital of France is", [" Paris", " Berlin", " Madrid"], 0),
    ("Water is made of hydrogen and", [" iron", " oxygen", " gold"], 1),
    ("The opposite of hot is", [" round", " seven", " cold"], 2),
    ("One, two, three, four,", [" five", " nine", " one"], 0),
]


def main() -> None:
    """Score all answers in one call, and count the correct choices."""
    llm = LLM()
    questions, tokens = [], []
    for question, answers, _ in QUESTIONS:
        for answer in answers:
            questions.append(len(llm.encode(question)))
            tokens.append(llm.encode(question + answer))
    params = SamplingParams(max_tokens=0, prompt_logprobs=1)
    outputs = iter(llm.generate(tokens, params, use_tqdm=False))
    starts = iter(questions)
    right = 0
    for question, answers, expected in QUESTIONS:
        scores = []
        for _ in answers:
            output, start = next(outputs), next(starts)
            ids, logprobs = output.prompt_token_ids, output.prompt_logprobs
            assert logprobs is not None
            score = 0.0
            for token, entry in zip(ids[start:], logprobs[start:], strict=True):
                assert entry is not None
                score += entry[token].logprob
            scores.append(score)
        chosen = scores.index(max(scores))
        right += chosen == expected
        print(f"{question}{answers[chosen]} ({', '.join(f'{score:.1f}' for score in scores)})")
    print(f"{right} of {len(QUESTIONS)} right")


if __name__ == "__main__":
    main()
