"""Helpers: validation, settings, processors, packaging."""
