"""Items of a stream that bring text alone: as the models write them, whatever the text."""

import json

from hypothesis import example, given
from hypothesis import strategies as st

from pyengine.server.schemas.responses import (
    ChatChunkChoice,
    ChatCompletionChunk,
    ChatMessage,
    CompletionChoice,
    CompletionResponse,
    ServerModel,
    TextItems,
)

WORDS = st.text(st.characters(exclude_categories=["Cs"]))


@given(name=WORDS, model=WORDS, texts=st.lists(WORDS, min_size=1))
@example(name='"text":""', model="{}%s\\", texts=['"', "\\", "\0\x1f", "\u2028 \U0001f600", ""])
def test_an_item_with_a_text_is_what_the_model_says(
    name: str, model: str, texts: list[str]
) -> None:
    def completion(text: str) -> ServerModel:
        choice = CompletionChoice(index=3, text=text, finish_reason=None, stop_reason=None)
        return CompletionResponse(
            id=name, object="text_completion", created=7, model=model, choices=[choice]
        )

    def chat(text: str) -> ServerModel:
        choice = ChatChunkChoice(index=3, delta=ChatMessage(content=text), finish_reason=None)
        return ChatCompletionChunk(
            id=name, object="chat.completion.chunk", created=7, model=model, choices=[choice]
        )

    for make in (completion, chat):
        items = TextItems(make)
        for text in texts:
            serialized = items.with_text(text)
            assert json.loads(serialized) == json.loads(make(text).to_json())
            assert "\n" not in serialized  # an item is a line
