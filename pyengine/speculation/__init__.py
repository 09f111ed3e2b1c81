"""Speculative decoding: drafters, and how many drafts are worth computing."""
