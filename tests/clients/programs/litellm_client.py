"""Calls of `litellm` to the server at the given address.

Run by the Python of .venv-clients/litellm. Fails by an assertion.
"""

import asyncio
import sys

import litellm

QUESTION = [{"role": "user", "content": "What is the capital of Japan?"}]


def main(address: str, model: str) -> None:
    """A chat, a stream, a completion, as `hosted_vllm` and as any OpenAI-compatible server."""
    for provider in ("hosted_vllm", "openai"):
        to = {"model": f"{provider}/{model}", "api_base": f"{address}/v1", "api_key": "none"}
        answer = litellm.completion(**to, messages=QUESTION, temperature=0)
        text = answer.choices[0].message.content
        assert "Tokyo" in text and answer.usage.prompt_tokens > 5
        stream = litellm.completion(**to, messages=QUESTION, temperature=0, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == text
        several = asyncio.run(
            litellm.acompletion(**to, messages=QUESTION, n=2, max_tokens=4, stop=["\n"], seed=1)
        )
        assert len(several.choices) == 2
    to["model"] = f"text-completion-openai/{model}"
    plain = litellm.text_completion(**to, prompt="The capital of France is", max_tokens=4)
    assert plain.choices[0].text
    try:
        litellm.completion(**to, messages=QUESTION, max_tokens=-1)
    except litellm.BadRequestError as error:
        assert "max_tokens" in str(error)
    else:
        raise AssertionError("max_tokens=-1 was taken")
    print("litellm is served")


if __name__ == "__main__":
    main(*sys.argv[1:])
