"""Tests of `pyengine.server.routes`."""
