"""Paged attention: one interface, one file per backend."""
