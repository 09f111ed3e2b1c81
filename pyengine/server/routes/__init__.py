"""Endpoints: `/v1/completions`, `/v1/chat/completions`, `/tokenize`, `/health` and others."""
