"""From logits to tokens. Imports torch and plain data; nothing of models or the KV cache."""
