"""Benchmarks of the engine on a GPU, and the tuning of its kernels."""
