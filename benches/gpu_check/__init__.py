"""Does the engine work on this machine's GPU, and how fast is it? See docs/gpu.md."""
