"""CPU kernels: C sources, how they are built and found, and the operations made of them."""
