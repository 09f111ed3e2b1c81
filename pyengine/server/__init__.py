"""An OpenAI-compatible HTTP server around `AsyncEngine`: `create_app`, and `serve` to run it."""

from pyengine.server.app import create_app

__all__ = ["create_app"]
