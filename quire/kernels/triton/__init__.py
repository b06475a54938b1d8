"""Triton kernels for a GPU, one job per file, each beside the torch function it is checked against.

Nothing here is imported on a machine without Triton: the worker of a GPU does, and the tests that ask for it.
"""
