"""Loading: from a name, a folder, a GGUF file or nothing to a model and its tokenizer."""
