"""Triton kernels for a GPU, one job per file, each beside the torch function it is checked against.

Only the GPU worker and the tests of these kernels import this package, so a machine without Triton never does.
"""
