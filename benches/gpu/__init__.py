"""Speed of the GPU path: decode against the roofline, transformers, sharing, the host's work."""
