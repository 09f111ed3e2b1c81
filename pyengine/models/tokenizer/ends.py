"""The tokens that end an answer: by the files of a model, and by their texts in a vocabulary.

Some GGUF files name the end of a turn or of a message to a tool. llama.cpp finds such tokens by
their text in other files. Source of the lists below:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pyengine.models.transformers_calls import read_json

_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>"),
    *("<end_of_turn>", "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]"),
    *("<|end_of_text|>", "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "[e~["),
    "<\N{FULLWIDTH VERTICAL LINE}end\N{LOWER ONE EIGHTH BLOCK}of\N{LOWER ONE EIGHTH BLOCK}sentence"
    "\N{FULLWIDTH VERTICAL LINE}>",
)
"""Texts of tokens that end an answer."""

_FILL_IN_ENDS = (
    *("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    *("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
)
"""Texts of tokens that end the completion of code."""

_FAMILY_ENDS: Mapping[str, int] = {
    **dict.fromkeys(("llama", "mistral", "mixtral", "granite", "granitemoe"), 2),
}
"""`eos_token_id` of transformers' configurations, which config.json may leave out."""


def eos_token_ids(
    folder: Path, tokenizer: Any, vocab_size: int, *, default: object = None
) -> frozenset[int]:
    """Token ids that end a generation, by the folder's files and the tokenizer.

    generation_config.json comes first, then config.json, then the family's `default`. Numbers
    outside the vocabulary (for instance negative ones, which some files use for "none") are left
    out.
    """
    declared = read_json(folder / "generation_config.json").get("eos_token_id")
    if declared is None:
        declared = _of_config(read_json(folder / "config.json"))
    if declared is None:
        declared = default
    found = [*(declared if isinstance(declared, list) else [declared])]
    found.append(getattr(tokenizer, "eos_token_id", None))
    known = range(vocab_size)
    return frozenset(token for token in found if type(token) is int and token in known)


def _of_config(config: Mapping[str, Any]) -> object:
    """What config.json says, for the model or for its text part."""
    text = config.get("text_config")
    inner = text.get("eos_token_id") if isinstance(text, dict) else None
    return config.get("eos_token_id") if inner is None else inner


def ends_by_text(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Ids of the tokens that end an answer, by their texts in the vocabulary."""
    found = {
        text: vocabulary[text] for text in (*_ENDS, *_FILL_IN_ENDS) if text in vocabulary
    }
    if found.keys() >= {"<|call|>", "<|return|>"} or found.keys() >= {"<|calls|>", "<|flush|>"}:
        found.pop("<|end|>", None)  # ends a message, after which others of the answer follow
    if "<|tool_response>" in found:
        found.pop("</s>", None)  # Gemma 4's is no end
    return found
