"""Tiny models are faster on one thread than on several; Triton kernels run through the interpreter without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton.interpreter import prepare

prepare()


@pytest.fixture(autouse=True)
def one_torch_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.inference_mode():
        yield
    torch.set_num_threads(before)
