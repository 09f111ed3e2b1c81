"""Tests of `pyengine.server.middleware`."""
