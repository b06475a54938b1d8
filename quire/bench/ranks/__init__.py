"""Benchmarks of one model over several ranks."""
