"""Chat templates of the kinds that models have, and a small tokenizer that renders them."""

from typing import Any

from tokenizers import AddedToken

from pyengine.models.tokenizer import Tokenizer
from tests.support.tokenizers import byte_level, wrapped
from tests.support.without_torch import MISSING

VOCAB_SIZE = 300

CHATML = """\
{%- if tools %}<|im_start|>system
Functions:{% for tool in tools %}
{{ tool | tojson }}{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls %}
<call>{"name": "{{ call.function.name }}", \
"arguments": {{ call.function.arguments | tojson }}}</call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
"""Takes tools, calls, and the variable `enable_thinking`."""

CONCATENATES = """\
{% for message in messages %}\
{{ '[' + message['role'] + ']' + message['content'] + '\n' }}\
{% endfor %}\
{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"""
"""Fails where a message has no content."""

LOOKS_FOR_CONTENT = """\
{% for message in messages %}[{{ message.role }}]\
{% if 'content' in message %}says: {{ message.content }}{% else %}says nothing{% endif %}
{% endfor %}"""
"""Tells no content from empty content."""

NO_SYSTEM = """\
{{ bos_token }}{% if messages[0]['role'] == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}\
{% for message in messages %}\
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}\
<turn>{{ message['role'] }}
{{ message['content'] | trim }}</turn>
{% endfor %}{% if add_generation_prompt %}<turn>model
{% endif %}"""
"""Of the gemma-2 kind."""

WALKS_PARTS = """\
{% for message in messages %}[{{ message.role }}]\
{% if message.content is string %}{{ message.content }}{% else %}\
{% for part in message.content %}({{ part.text }}){% endfor %}{% endif %}
{% endfor %}"""
"""Of the kind that models with images have."""


STRIPS_THINKING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
"""Of the kind that Qwen3 has."""

BEGINS_THINKING = STRIPS_THINKING.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
"""Of the kind that DeepSeek-R1 has: the prompt begins the thinking."""


def chat_tokenizer(template: str | dict[str, str] | None) -> Tokenizer:
    """A byte-level tokenizer of 300 tokens, with this chat template."""
    backend = byte_level(VOCAB_SIZE).tokenizer
    tokenizer = wrapped(backend, bos_token="<|end|>", eos_token="<|end|>")
    tokenizer.chat_template = template
    return tokenizer


def thinking_tokenizer(template: str, *marks: str) -> Tokenizer:
    """The same, with a token more for each of the marks of thinking and calls, or for these."""
    tokenizer = chat_tokenizer(template)
    marks = marks or ("<think>", "</think>", "<tool_call>")
    tokenizer.backend_tokenizer.add_tokens([AddedToken(mark, special=False) for mark in marks])
    return tokenizer


def by_template(tokenizer: Tokenizer, messages: list[dict[str, Any]], **options: Any) -> list[int]:
    """The token ids of a conversation as transformers makes them by itself.

    Where transformers is not installed, they are those of the engine's tokenizer.
    """
    options = {"add_generation_prompt": True, "return_dict": False, **options}
    judge = tokenizer if "transformers" in MISSING else of_transformers(tokenizer)
    ids: list[int] = judge.apply_chat_template(messages, **options)
    return ids


def of_transformers(tokenizer: Tokenizer) -> Any:
    """The same tokenizer as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    found = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend_tokenizer, **tokenizer.special_tokens_map
    )
    found.chat_template = tokenizer.chat_template
    return found
