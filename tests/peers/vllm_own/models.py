"""Local folders for the models that vLLM's tests name: configurations, no weights.

The tests make Schedulers for them and never load them; llava's processor needs a tokenizer, which
is one of unused words.
"""

import json
from pathlib import Path
from typing import Any

OPT = {
    "model_type": "opt",
    "architectures": ["OPTForCausalLM"],
    "vocab_size": 50272,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "ffn_dim": 3072,
    "word_embed_proj_dim": 768,
    "max_position_embeddings": 2048,
    "torch_dtype": "float16",
}
LONG = "pyengine/long"  # for tests of ours
LLAVA = {
    "model_type": "llava",
    "architectures": ["LlavaForConditionalGeneration"],
    "image_token_index": 32000,
    "pad_token_id": 32001,
    "torch_dtype": "float16",
    "text_config": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
    },
    "vision_config": {
        "model_type": "clip_vision_model",
        "hidden_size": 1024,
        "image_size": 336,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_hidden_layers": 24,
        "patch_size": 14,
        "projection_dim": 768,
    },
    "vision_feature_layer": -2,
    "vision_feature_select_strategy": "default",
}
IMAGES = {
    "image_processor_type": "CLIPImageProcessor",
    "processor_class": "LlavaProcessor",
    "crop_size": {"height": 336, "width": 336},
    "size": {"shortest_edge": 336},
}
PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "image_token": "<image>",
    "num_additional_image_tokens": 1,
    "patch_size": 14,
    "vision_feature_select_strategy": "default",
}


def words(num_words: int, special: dict[str, int]) -> str:
    """A tokenizer of words that stand for nothing, and special tokens, as a file."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(num_words)}
    taken = set(special.values())
    kept = {word: number for word, number in vocabulary.items() if number not in taken}
    tokenizer = Tokenizer(models.WordLevel(kept | special, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(special))
    text: str = tokenizer.to_str()
    return text


def write(folder: Path, files: dict[str, Any]) -> None:
    """JSON files in a folder, which is made."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content, indent=1)
        (folder / name).write_text(text, encoding="utf-8")


def write_all(root: Path) -> None:
    """The folders, as their names on the hub are written, below `root`."""
    opt = {"<unk>": 3, "<s>": 0, "</s>": 2, "<pad>": 1}
    llava = {"<unk>": 0, "<s>": 1, "</s>": 2, "<image>": 32000, "<pad>": 32001}
    for name in ("facebook/opt-125m", "facebook/opt-350m", LONG):
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
        write(
            root / name,
            {
                "config.json": OPT | ({"max_position_embeddings": 131072} if name == LONG else {}),
                "tokenizer.json": words(50265, opt),
                "tokenizer_config.json": settings | {"bos_token": "</s>", "eos_token": "</s>"},
            },
        )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "processor_class": "LlavaProcessor",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "image_token": "<image>",
    }
    write(
        root / "llava-hf/llava-1.5-7b-hf",
        {
            "config.json": LLAVA,
            "preprocessor_config.json": IMAGES,
            "processor_config.json": PROCESSOR,
            "tokenizer.json": words(32002, llava),
            "tokenizer_config.json": settings,
        },
    )
