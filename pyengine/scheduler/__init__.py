"""Admission, token budget, preemption. Plain data and blocks; no torch."""
