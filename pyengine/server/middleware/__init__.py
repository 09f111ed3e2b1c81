"""ASGI middleware: keys, origins, limits, refusals."""
