"""The worker of a GPU: request table on the device, graphs, sampling without the host, results as futures.

All of it also runs on CPU tensors (with torch in place of the kernels), which is how it is tested without a
GPU.
"""
