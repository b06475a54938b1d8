"""Benchmarks: commands that print one JSON line per case, with the machine, the workload and the share of the limit."""
