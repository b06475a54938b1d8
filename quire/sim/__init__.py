"""The real bookkeeping over recorded or made-up workloads, without a model."""
