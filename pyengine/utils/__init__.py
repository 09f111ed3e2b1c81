"""Helpers without a package of their own: validation, settings, processors, packaging."""
