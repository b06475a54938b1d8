"""The operations that a decoder is made of: one interface, and a backend for each device on top of its kernels."""
