"""The decoder's building blocks, each written against the operations of `ops.Ops` and nothing else."""
