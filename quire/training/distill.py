"""The loss of guessed tokens: cross-entropy against the target's distribution over the draft vocabulary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def distilled(x: Tensor, rows: Tensor, taught: Tensor, which: Tensor, weights: Tensor, temperature: float) -> Tensor:
    """The sum over places of their weight [n] times the cross-entropy of the logits x [n, hidden] · rows^T against the
    softmax of rows `which` of the logits `taught` at a temperature. Rows of the vocabulary are not learned."""
    if x.device.type == "cpu":
        wanted = (taught[which].float() / temperature).softmax(-1)
        each = -(wanted * F.linear(x, rows).float().log_softmax(-1)).sum(-1)
        return (each * weights).sum()
    return _Distilled.apply(x, rows, taught, which, weights, temperature)


class _Distilled(torch.autograd.Function):
    """On a GPU: logits live only while their loss is computed, and their gradient takes their place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor, taught: Tensor, which: Tensor, weights: Tensor,
                temperature: float) -> Tensor:
        from quire.kernels.triton.distill import distill

        logits, losses = F.linear(x, rows), torch.empty_like(weights)
        learns = ctx.needs_input_grad[0]
        distill(logits, taught, which, weights, temperature, losses, learns)
        ctx.save_for_backward(*((logits @ rows,) if learns else ()))
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return gradient * grads[0].to(gradient.dtype), None, None, None, None, None
