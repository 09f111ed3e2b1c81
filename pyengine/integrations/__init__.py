"""The block manager inside other engines: vLLM by a plugin, nano-vllm by one line."""
