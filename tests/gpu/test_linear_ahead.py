"""Products that ask ahead for their weights, on a real GPU: right, the same each time, and never too early."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.kernels.triton.linear_ahead import AheadShape, available, fits, linear_ahead, padded
    from quire.kernels.triton.linear_split import SplitScratch

ROWS = (1, 2, 7, 8, 16, 32, 48, 64, 100, 128)
SHAPES = ((64, 5, 4, 4, 0), (64, 6, 2, 4, 0), (64, 4, 2, 4, 1), (128, 3, 2, 4, 1), (256, 4, 1, 8, 0))
FEATURES = (2048, 1008)
"""Of two products in a row: the second is no multiple of any tile, but compiled as the first is."""


def numbers(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", dtype=torch.float32)


@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_a_product_is_right_and_the_same_each_time_though_it_begins_before_its_rows_are_there(
    shape: tuple[int, int, int, int, int],
) -> None:
    if not available(torch.device("cuda")):
        pytest.skip("needs Hopper and a Triton with Gluon")
    sizes, scratch, tried = AheadShape(*shape), SplitScratch.allocate("cuda"), 0
    torch.manual_seed(5)
    weights = [(numbers(features, 2048) / 2048**0.5).bfloat16() for features in FEATURES]
    for rows in ROWS:
        x = numbers(rows, 2048).bfloat16()
        if not all(fits(x, weight, sizes, scratch) for weight in weights):
            continue
        # Padded rows that share a kernel share this, too: compilation takes all the time of this test.
        more = padded(rows) in (8, 32, 128)
        added = [numbers(rows, features).bfloat16() if more else None for features in FEATURES]
        for pdl in (True, False) if padded(rows) == 8 else (True,):
            seen: list[list[Tensor]] = []
            for _ in range(2):
                seen.append([x])
                for weight, residual in zip(weights, added):  # the rows of the second are the result of the first
                    got = linear_ahead(seen[-1][-1], weight, residual, sizes=sizes, scratch=scratch, pdl=pdl)
                    seen[-1].append(got)
            for place, (weight, residual) in enumerate(zip(weights, added)):
                want = seen[0][place].double() @ weight.double().t()
                want = want if residual is None else want + residual.double()
                wrong = (seen[0][place + 1].double() - want).abs() > 2**-8 * want.abs() + 2e-3
                assert not wrong.any(), f"{rows} rows, product {place}, pdl {pdl}: {int(wrong.sum())} are wrong"
                assert torch.equal(seen[0][place + 1], seen[1][place + 1]), f"{rows} rows, product {place}, pdl {pdl}"
            assert not scratch.arrived.any(), f"{rows} rows, pdl {pdl}"
            tried += 1
    assert tried >= 5
