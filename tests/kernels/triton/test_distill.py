"""The loss of a trained head and its gradient in one kernel, against torch's."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from quire.kernels.triton import distill as kernel
from quire.training import distill

N, HIDDEN = 7, 24


def check_distilled(device: str, dtype: torch.dtype, width: int) -> None:
    torch.manual_seed(1)
    rows = (0.5 * torch.randn(width, HIDDEN, device=device)).to(dtype)
    taught = (2.0 * torch.randn(5, width, device=device)).to(dtype)
    which = torch.tensor([4, 0, 0, 2, 1, 3, 4], device=device)
    weights = torch.tensor([0.5, 0.0, 1.0, 0.2, 0.1, 2.0, 0.3], device=device)
    x = torch.randn(N, HIDDEN, device=device).to(dtype)
    found = x.clone().requires_grad_()
    loss = distill._Distilled.apply(found, rows, taught, which, weights, 0.7)
    (3.0 * loss).backward()
    want = x.float().cpu().requires_grad_()
    parts = (part.float().cpu() for part in (rows, taught))
    right = distill.distilled(want, *parts, which.cpu(), weights.cpu(), 0.7)
    (3.0 * right).backward()
    bound = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(loss.detach().cpu(), right.detach(), rtol=bound, atol=bound)
    assert found.grad is not None and want.grad is not None
    torch.testing.assert_close(found.grad.float().cpu(), want.grad, rtol=bound, atol=bound)
    assert not found.grad[1].any()  # a place that does not count
    with torch.no_grad():
        assert torch.equal(distill._Distilled.apply(x, rows, taught, which, weights, 0.7), loss)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [kernel._BLOCK + 77, 2 * kernel._BLOCK, 100])
def test_the_loss_and_its_gradient_are_those_of_torch(dtype: torch.dtype, width: int) -> None:
    check_distilled("cuda" if torch.cuda.is_available() else "cpu", dtype, width)
