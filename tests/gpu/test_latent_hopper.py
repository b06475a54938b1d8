"""Decode attention over latents by TMA and wgmma on a real GPU agrees with its reference."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.types import LatentShape

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.triton.latent_hopper import available
    from tests.kernels.triton.latent_cases import hopper_difference


@pytest.mark.parametrize("heads", [4, 16, 24, 40, 128])
@pytest.mark.parametrize("page", [8, 16, 64])
@torch.inference_mode()
def test_decode_agrees(heads: int, page: int) -> None:
    if not available(torch.device("cuda")):
        pytest.skip("needs Hopper, and the Triton that the kernel is written for")
    for lengths, extra in (([1, 63, 64, 65, 0, 777, 2000, 130, 1999], 64), ([5000], 132), ([300] * 70, 1)):
        for dtype in (torch.bfloat16, torch.float16):
            found = hopper_difference("cuda", LatentShape(heads, 512, 64), page, lengths, extra, dtype=dtype, rows=True)
            assert found < 1e-2, (lengths, dtype)
