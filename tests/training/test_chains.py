"""Attention of unrolled drafts against the plain formula: what it sees and its gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from quire.training.chains import chain_attention


def plain(q: Tensor, steps: list[tuple[Tensor, Tensor]]) -> Tensor:
    """One softmax over all keys of all steps, most of them masked."""
    j, length = len(steps) - 1, q.shape[2]
    keys, values = (torch.cat(parts, 2) for parts in zip(*steps, strict=True))
    row, column = torch.arange(length)[:, None], torch.arange(length)[None]
    seen = [column <= row - j, *(column == row - (j - i) for i in range(1, j + 1))]
    scores = (q @ keys.transpose(2, 3) * q.shape[-1] ** -0.5).masked_fill(~torch.cat(seen, 1), float("-inf"))
    return (scores[:, :, j:].softmax(-1)) @ values


@pytest.mark.parametrize("j", [0, 1, 3])
def test_chains_see_the_text_and_their_own_steps(j: int) -> None:
    generator = torch.Generator().manual_seed(j)
    parts = [torch.randn(2, 3, 40, 16, generator=generator, requires_grad=True) for _ in range(2 * j + 3)]
    steps = list(zip(parts[1::2], parts[2::2], strict=True))
    found, want = chain_attention(parts[0], steps), plain(parts[0], steps)
    assert not found[:, :, :j].any()
    torch.testing.assert_close(found[:, :, j:], want, rtol=1e-4, atol=1e-5)
    weight = torch.randn(want.shape, generator=generator)
    given = torch.autograd.grad((found[:, :, j:] * weight).sum(), parts)
    for one, other in zip(given, torch.autograd.grad((want * weight).sum(), parts), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_chains_longer_than_the_text_see_nothing() -> None:
    step = torch.randn(1, 2, 4, 8), torch.randn(1, 2, 4, 8)
    assert torch.equal(chain_attention(torch.randn(1, 2, 4, 8), [step] * 5), torch.zeros(1, 2, 4, 8))
