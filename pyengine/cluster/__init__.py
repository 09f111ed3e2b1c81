"""Replicas on Ray Serve behind a cache-aware router."""
