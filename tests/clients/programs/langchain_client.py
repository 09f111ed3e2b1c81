"""Calls of `langchain-openai` to the server at the given address.

Run by the Python of .venv-clients. Fails by an assertion.
"""

import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


class City(BaseModel):
    """A city and whether it is a capital."""

    is_capital: bool


@tool
def is_raining(in_paris: bool) -> bool:
    """Whether it rains."""
    return in_paris


def main(address: str) -> None:
    """Invoke, stream, batch, a form, a tool that is demanded."""
    # A bound: a greedy answer that begins with a near tie may never come to its end.
    chat = ChatOpenAI(
        base_url=f"{address}/v1", api_key="none", model=sys.argv[2], temperature=0, max_tokens=64
    )
    question = "What is the capital of Japan?"
    answer = chat.invoke(question)
    assert "Tokyo" in answer.content and answer.usage_metadata["input_tokens"] > 5
    assert "".join(part.content for part in chat.stream(question)) == answer.content
    assert len(chat.batch([question, "What is the capital of France?"])) == 2
    assert isinstance(chat.with_structured_output(City).invoke("Is Paris a capital?"), City)
    called = chat.bind_tools([is_raining], tool_choice="required").invoke("Is it raining in Paris?")
    assert [tool_call["name"] for tool_call in called.tool_calls] == ["is_raining"]
    print("langchain is served")


if __name__ == "__main__":
    main(sys.argv[1])
