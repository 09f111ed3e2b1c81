"""Endpoints: `/v1/completions`, `/v1/chat/completions`, `/v1/embeddings` and others."""
