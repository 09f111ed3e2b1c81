"""Stream a conversation. The second prompt begins with the first turn and reuses its blocks."""

from pyengine import LLM, RequestOutputKind, SamplingParams

QUESTIONS = ["What is the capital of Japan?", "And which language do people speak there?"]


def main() -> None:
    """Ask two questions in one conversation and print each answer as it comes."""
    llm = LLM()
    params = SamplingParams(temperature=0, max_tokens=40, output_kind=RequestOutputKind.DELTA)
    messages: list[dict[str, str]] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        prompt = llm.apply_chat_template(messages)
        print(f"> {question}")
        answer, cached = "", 0
        for output in llm.stream(prompt, params):
            text = output.outputs[0].text  # the new text of this step
            print(text, end="", flush=True)
            answer, cached = answer + text, output.num_cached_tokens
        print(f"\n({len(prompt)} prompt tokens, {cached} from the cache)")
        messages.append({"role": "assistant", "content": answer})


if __name__ == "__main__":
    main()
