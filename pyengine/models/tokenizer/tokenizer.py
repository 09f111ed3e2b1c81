"""A tokenizer of the library `tokenizers`, with its special tokens and chat templates."""

from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from pyengine.models.tokenizer.chat import Templates, chosen_template, render

SPECIAL = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens with names: `bos_token`, `bos_token_id`."""
NO_LIMIT = int(1e30)
"""`model_max_length` of a tokenizer whose files have none."""

_CLEANED = (
    *((" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't")),
    *((" 'm", "'m"), (" 's", "'s"), (" 've", "'ve"), (" 're", "'re")),
)
"""Texts of `clean_up_tokenization_spaces`, and what replaces them."""


class Tokenizer:
    """Turns text into token ids and back, and conversations into prompts. Thread-safe.

    Its methods are called, and answer, as those of transformers' tokenizers.
    """

    def __init__(
        self,
        backend: RustTokenizer,
        special_tokens: Mapping[str, str | None] | None = None,
        *,
        extra_special_tokens: Sequence[str] = (),
        chat_template: Templates = None,
        cleans_up_spaces: bool = False,
    ) -> None:
        """`special_tokens`: the texts of special tokens by name, as `bos_token`.

        `backend` gets no padding and no truncation. With `cleans_up_spaces`, `decode` removes
        spaces before punctuation by default, unless the model is BPE, whose text it would change.
        """
        backend.no_padding()
        backend.no_truncation()
        self.backend_tokenizer = backend
        self.chat_template = chat_template
        self.model_max_length = NO_LIMIT
        self.special_tokens_map = {
            name: token for name, token in (special_tokens or {}).items() if token is not None
        }
        """The texts of special tokens by name, such as `eos_token`."""
        self.extra_special_tokens = list(extra_special_tokens)
        """The texts of further special tokens."""
        self.clean_up_tokenization_spaces = cleans_up_spaces
        self._may_clean_up = type(backend.model).__name__ != "BPE"

    def __getattr__(self, name: str) -> Any:
        stem = name.removesuffix("_id")
        if stem.endswith("_token") and not name.startswith("_"):
            known = self.__dict__.get("special_tokens_map", {})
            if stem in known or stem.removesuffix("_token") in SPECIAL:
                token = known.get(stem)
                return token if stem == name or token is None else self._id_of(token)
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

    def __len__(self) -> int:
        return self.backend_tokenizer.get_vocab_size()

    def __bool__(self) -> bool:
        return True

    def __deepcopy__(self, memo: dict[int, Any]) -> "Tokenizer":
        """A copy with the same backend, which no method changes."""
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__)
        copied.special_tokens_map = dict(self.special_tokens_map)
        copied.extra_special_tokens = list(self.extra_special_tokens)
        return copied

    @property
    def vocab_size(self) -> int:
        """The number of tokens without added ones."""
        return self.backend_tokenizer.get_vocab_size(with_added_tokens=False)

    @property
    def all_special_tokens(self) -> list[str]:
        """The texts of all special tokens."""
        named = [self.special_tokens_map.get(f"{name}_token") for name in SPECIAL]
        texts = [*named, *self.special_tokens_map.values(), *self.extra_special_tokens]
        return list(dict.fromkeys(token for token in texts if token is not None))

    @property
    def all_special_ids(self) -> list[int]:
        """The ids of all special tokens."""
        return [self._id_of(token) for token in self.all_special_tokens]

    def get_vocab(self) -> dict[str, int]:
        """Ids by the texts of tokens, added ones included."""
        return self.backend_tokenizer.get_vocab()

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> Any:
        """The id of a token, or of each; that of the unknown token if there is none."""
        if isinstance(tokens, str):
            return self._id_of(tokens)
        return [self._id_of(token) for token in tokens]

    def _id_of(self, token: str) -> Any:
        token_id = self.backend_tokenizer.token_to_id(token)
        if token_id is None and token != (unknown := self.special_tokens_map.get("unk_token")):
            return None if unknown is None else self.backend_tokenizer.token_to_id(unknown)
        return token_id

    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> Any:
        """The token of an id, or of each; None for ids that are not in the vocabulary."""
        if isinstance(ids, int):
            return self.backend_tokenizer.id_to_token(ids)
        return [self.backend_tokenizer.id_to_token(int(token)) for token in ids]

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, with the special tokens that prompts begin or end with."""
        # The library's `encode` holds the interpreter's lock meanwhile, `encode_batch` does not
        (encoding,) = self.backend_tokenizer.encode_batch(
            [text], add_special_tokens=add_special_tokens
        )
        return encoding.ids

    def __call__(
        self,
        text: str | Sequence[str],
        *,
        add_special_tokens: bool = True,
        return_offsets_mapping: bool = False,
    ) -> dict[str, Any]:
        """`input_ids` and `attention_mask` of a text, or of several as lists.

        With `return_offsets_mapping`, also `offset_mapping`: where the text of each token begins
        and ends, in characters.
        """
        texts = [text] if isinstance(text, str) else list(text)
        batch = self.backend_tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
        encoded: dict[str, list[Any]] = {
            "input_ids": [encoding.ids for encoding in batch],
            "attention_mask": [encoding.attention_mask for encoding in batch],
        }
        if return_offsets_mapping:
            encoded["offset_mapping"] = [encoding.offsets for encoding in batch]
        if isinstance(text, str):
            return {name: values[0] for name, values in encoded.items()}
        return encoded

    def decode(
        self,
        token_ids: Any,
        *,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> Any:
        """The text of token ids, or of each of several lists."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else token_ids
        ids = [ids] if isinstance(ids, int) else list(ids)
        cleans = clean_up_tokenization_spaces
        if ids and isinstance(ids[0], list | tuple):
            return self.batch_decode(
                ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=cleans
            )
        text = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        if cleans is None:
            cleans = self.clean_up_tokenization_spaces
        return _cleaned(text) if cleans and self._may_clean_up else text

    def batch_decode(self, sequences: Any, **options: Any) -> list[str]:
        """The text of each list of token ids; `options` as of `decode`."""
        return [self.decode(sequence, **options) for sequence in sequences]

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        tokenize: bool = True,
        return_dict: bool = True,
        **variables: Any,
    ) -> Any:
        """The prompt of a conversation by the chat template: text, or token ids if `tokenize`.

        `chat_template` is a template or the name of one of the model's. `variables` are for the
        template; of these, `continue_final_message` ends the prompt within the last message. With
        `return_dict`, token ids are `input_ids` of a dictionary.
        """
        text = chosen_template(self.chat_template, chat_template, has_tools=tools is not None)
        if text is None:
            raise ValueError("the tokenizer has no chat template: give one")
        if not conversation:
            raise ValueError("the conversation is empty")
        is_continued = bool(variables.pop("continue_final_message", False))
        if is_continued and variables.get("add_generation_prompt"):
            raise ValueError("continue_final_message and add_generation_prompt exclude each other")
        rendered = render(
            text,
            conversation,
            tools=tools,
            continue_final_message=is_continued,
            variables={**self.special_tokens_map, **variables},
        )
        if not tokenize:
            return rendered
        if return_dict:
            return self(rendered, add_special_tokens=False)
        return self.encode(rendered, add_special_tokens=False)


def _cleaned(text: str) -> str:
    for old, new in _CLEANED:
        text = text.replace(old, new)
    return text
