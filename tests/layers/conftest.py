"""Kernels run here through Triton's interpreter where there is no GPU."""

from tests.kernels.triton.interpreter import prepare

prepare()
