"""Kernels in CUDA C, compiled where they run by the compiler library that torch brings (NVRTC): for what Triton cannot
say, such as copies to several multiprocessors at once."""
