"""What the GPU path gives: decode against the roofline, transformers, sharing, the host's work."""
