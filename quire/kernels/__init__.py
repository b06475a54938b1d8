"""Compute kernels: one implementation of the layers' operations per device, and a plain torch reference."""
