"""Tests of kernels that are off by default since no chip has run them yet: `QUIRE_UNTRIED_KERNELS=1` runs them."""

from __future__ import annotations

import os

import pytest

untried = pytest.mark.skipif(
    "QUIRE_UNTRIED_KERNELS" not in os.environ,
    reason="the kernel is off by default, since no chip has run it yet: QUIRE_UNTRIED_KERNELS=1 runs it",
)
