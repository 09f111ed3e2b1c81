"""A model folder of a few kilobytes, with and without a tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast


def save_tiny_model(folder: Path, *, shard_size: str = "1GB", **settings: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **{
            "vocab_size": 32,
            "hidden_size": 16,
            "intermediate_size": 24,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "max_position_embeddings": 64,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 0,
            "dtype": "bfloat16",
            **settings,
        }
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return model


def save_tiny_tokenizer(folder: Path) -> None:
    words = {"<unk>": 0, "<s>": 1, "</s>": 2, "<end>": 3, "hello": 4}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.save_pretrained(folder)
