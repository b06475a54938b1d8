"""The operations of deterministic mode, row by row, in the interpreter: what the GPU suite then compares compiled."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.types import HeadShape
from tests.kernels.triton import bits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    torch.manual_seed(2)
    found = []
    for checks in (
        bits.row_wise(DEVICE, torch.float32, 11, 48, 34),
        bits.logits(DEVICE, torch.float32, 11, 90),
        bits.rotations(DEVICE, torch.float32, 11, HeadShape(4, 2, 16)),
    ):
        for name, part in checks:
            found += bits.differences(name, part, 11, (1, 8, 9))
    assert found == []


@pytest.mark.parametrize(("dtype", "window", "fp8"), [
    (torch.float32, None, False), (torch.float32, 21, False), (torch.bfloat16, None, True),
])
def test_a_query_has_the_same_bits_in_any_chunk(dtype: torch.dtype, window: int | None, fp8: bool) -> None:
    torch.manual_seed(2)
    part = bits.attention(DEVICE, dtype, 70, HeadShape(4, 2, 16), window, None, fp8)
    assert bits.differences("attention", part, 70, (1, 31, 40)) == []


def test_a_difference_is_named() -> None:
    rows = torch.arange(12.0).view(6, 2)
    found = bits.differences("mean", lambda a, b: [rows[a:b] - rows[a:b].mean()], 6, (3,))
    assert len(found) == 3 and found[0].startswith("mean, result 0: rows 0 to 3 of 6 differ by")
