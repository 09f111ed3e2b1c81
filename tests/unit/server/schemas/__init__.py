"""Tests of `pyengine.server.schemas`."""
