"""Benchmarks of the server and of the engine's own process, and the load clients they use."""
