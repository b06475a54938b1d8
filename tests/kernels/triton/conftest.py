"""Kernels run here through Triton's interpreter where there is no GPU; without Triton the tests are
skipped."""

from tests.kernels.triton.interpreter import prepare

if not prepare():
    collect_ignore_glob = ["test_*.py"]
