"""Benchmarks of KV that is cached, offloaded, pooled or sent to another engine."""
