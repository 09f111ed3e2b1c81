"""Tests of `pyengine.server.dashboard`."""
