"""Benchmarks of the router, and a cluster of servers on one machine."""
