"""Tokenizers, chat templates and the tokens that end an answer, without transformers.

`load_tokenizer` reads a model folder, `tokenizer_of_gguf` the header of a GGUF file. Folders whose
files the library `tokenizers` cannot read are read by transformers.
"""

from pyengine.models.tokenizer.chat import chosen_template
from pyengine.models.tokenizer.ends import eos_token_ids
from pyengine.models.tokenizer.files import load_tokenizer
from pyengine.models.tokenizer.gguf import GGUFTokens, tokenizer_of_gguf
from pyengine.models.tokenizer.tokenizer import Tokenizer

__all__ = [
    "GGUFTokens",
    "Tokenizer",
    "chosen_template",
    "eos_token_ids",
    "load_tokenizer",
    "tokenizer_of_gguf",
]
