"""Decode attention of rows that read each other's keys, on a real GPU."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.triton import attention_few
    from quire.kernels.types import HeadShape
    from tests.kernels.triton.cases import check_rope_decode
    from tests.kernels.triton.drafted import check_drafted_rows


def needs_hopper() -> None:
    if attention_few.few_decode_kernel is None or torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("needs Hopper and a Triton with Gluon")


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16])
@torch.inference_mode()
def test_few_sequences_attend_to_keys_in_fp8(kind: torch.dtype, scaled: bool) -> None:
    """Pieces of one tile and of several, one or two sequences; twenty times: a race would show as a difference."""
    needs_hopper()
    for heads, lengths in ((16, [1]), (32, [129]), (40, [600]), (64, [2048, 700]), (32, [9_000])):
        torch.manual_seed(heads)
        check_rope_decode("cuda", kind, HeadShape(heads, 8, 128), 16, lengths, extra=16, few=True, pdl=True, repeat=20,
                          rows=heads == 32, window=300 if heads == 40 else None, norms=heads != 64,
                          kv_dtype=torch.float8_e4m3fn, kv_scale=0.5 if scaled else 1.0)


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("heads", [(32, 8), (16, 8), (40, 8)])
@torch.inference_mode()
def test_drafts_read_the_keys_of_rows_before_them(heads: tuple[int, int], fp8: bool) -> None:
    """One sequence with all rows, some with few, and new keys in several pieces."""
    needs_hopper()
    shape = HeadShape(*heads, 128)
    for sequences in ([(5, 5)], [(131, 5)], [(300, 3), (77, 1), (140, 4)], [(1, 1), (2, 2), (0, 1)], [(9_000, 5)]):
        for window in (None, 100):
            torch.manual_seed(sequences[0][0])
            check_drafted_rows("cuda", torch.bfloat16, shape, sequences, window=window, extra=16,
                               kv_dtype=torch.float8_e4m3fn if fp8 else None, scaled=fp8)
