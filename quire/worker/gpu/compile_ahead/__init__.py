"""Kernels that a start needs, compiled in processes beside it: all at once, where the engine would one by one."""
