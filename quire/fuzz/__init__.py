"""A differential fuzzer: random workloads through the whole engine must give the tokens of the plain path."""
