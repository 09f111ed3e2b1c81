"""From logits to tokens. Knows nothing of models or the KV cache.

Only `tensor_operations` imports torch.
"""
