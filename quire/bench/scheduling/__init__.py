"""Benchmarks of the scheduler: cost of a step, growth with the load, batching policies, memory pressure."""
