"""The decoder's building blocks, each written against the operations of `quire.ops.interface.Ops` and nothing else."""
