"""Decode attention of rows that read each other's keys, on a real GPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.triton import attention_few
    from quire.kernels.types import HeadShape
    from tests.kernels.triton.drafted import check_drafted_rows


@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (40, 8)])
@torch.inference_mode()
def test_drafts_read_the_keys_of_rows_before_them(heads: tuple[int, int]) -> None:
    """One sequence with all rows, some with few, and new keys in several pieces."""
    if attention_few.few_decode_kernel is None or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs Hopper and a Triton with Gluon")
    shape = HeadShape(*heads, 128)
    for sequences in ([(5, 5)], [(131, 5)], [(300, 3), (77, 1), (140, 4)], [(1, 1), (2, 2), (0, 1)], [(9_000, 5)]):
        for window in (None, 100):
            torch.manual_seed(sequences[0][0])
            check_drafted_rows("cuda", torch.bfloat16, shape, sequences, window=window, extra=16)
