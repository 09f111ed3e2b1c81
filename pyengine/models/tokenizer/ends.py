"""The tokens that end an answer: by the files of a model, and by their texts in a vocabulary.

Some GGUF files name the end of a turn or of a message to a tool. llama.cpp finds such tokens by
their text in other files. Source of the lists below:
https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
"""

from collections.abc import Mapping
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

FAMILY_ENDS: Mapping[str, int | list[int]] = {
    **dict.fromkeys(("llama", "mistral", "ministral3", "mixtral", "granite", "granitemoe"), 2),
    **dict.fromkeys(("seed_oss", "exaone4", "granitemoehybrid", "nemotron_h", "falcon_h1"), 2),
    **dict.fromkeys(("jamba", "lfm2", "lfm2_moe"), 2),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "gemma4_text"), 1),
    **dict.fromkeys(("deepseek_v3", "glm4_moe_lite"), 1),
    **dict.fromkeys(("olmo2", "olmo3"), 50279),
    **dict.fromkeys(("gpt2", "starcoder2"), 50256),
    **{"phi3": 32000, "smollm3": 128001, "cohere2": 255001, "granite_swa": 100257},
    **{"nemotron": 3, "stablelm": 0, "minimax_m2": 200020, "glm4": [151329, 151336, 151338]},
    **{"olmo_hybrid": 100257, "kimi_linear": 163586},
}
"""`eos_token_id` by family, for a config.json without it: transformers writes no defaults."""


def eos_token_ids(
    folder: Path, tokenizer: Any, vocab_size: int, *, default: object = None
) -> frozenset[int]:
    """Token ids that end a generation, by the folder's files and the tokenizer.

    generation_config.json comes first, then config.json, then `default`. Without one, it is what
    transformers has for the family, unless there is a generation_config.json. Numbers outside the
    vocabulary (for instance negative ones, which some files use for "none") are left out.
    """
    generation = read_json(folder / "generation_config.json")
    config = read_json(folder / "config.json")
    inner = config.get("text_config")
    texts = (generation, inner if isinstance(inner, dict) else {}, config)
    if not generation and default is None:
        default = FAMILY_ENDS.get(str(config.get("model_type")))
    declared = next((text["eos_token_id"] for text in texts if "eos_token_id" in text), default)
    ids = [*(declared if isinstance(declared, list) else [declared])]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    known = range(vocab_size)
    return frozenset(token for token in ids if type(token) is int and token in known)


def ends_by_text(vocabulary: Mapping[str, int]) -> dict[str, int]:
    """Ids of the tokens that end an answer, by their texts in the vocabulary."""
    ends = {text: vocabulary[text] for text in (*_ENDS, *_FILL_IN_ENDS) if text in vocabulary}
    if ends.keys() >= {"<|call|>", "<|return|>"} or ends.keys() >= {"<|calls|>", "<|flush|>"}:
        ends.pop("<|end|>", None)  # ends a message, after which others of the answer follow
    if "<|tool_response>" in ends:
        ends.pop("</s>", None)  # Gemma 4's is no end
    return ends
