"""Attention of unrolled drafts: a causal part by the flash kernel, and one key of each drafted step before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class ChainAttention(torch.autograd.Function):
    """Query p, all [B, heads, n, dim], sees keys 0 to p of the text, and key p of each drafted step.

    The softmax is over both, so the flash kernel's own result is scaled by its share. Backward it is told the sum and
    the result of the whole: then its gradients are those of its share.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, *given: Tensor) -> Tensor:
        """`given`: keys and values of the text, then of each drafted step."""
        (k, v), steps = given[:2], list(zip(given[2::2], given[3::2], strict=True))
        scale = q.shape[-1] ** -0.5
        if q.device.type == "cpu":
            mixed, total = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
            ctx.kernel = ()
        else:
            mixed, total, *kernel, _ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)
            ctx.kernel = tuple(kernel)
        scores = torch.stack([total.float(), *(_dot(q, near) * scale for near, _ in steps)])
        whole = scores.logsumexp(0)
        shares = (scores - whole).exp().unsqueeze(-1).to(q.dtype)
        mixed = mixed * shares[0]
        for share, (_, near) in zip(shares[1:], steps, strict=True):
            mixed = mixed.addcmul(share, near)
        ctx.save_for_backward(q, *given, mixed, whole, shares)
        return mixed

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        q, *given, mixed, whole, shares = ctx.saved_tensors
        grad, (k, v), scale = grads[0].contiguous(), given[:2], q.shape[-1] ** -0.5
        if q.device.type == "cpu":
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, mixed, whole, 0.0, True)
        else:
            *sizes, seed, offset = ctx.kernel
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad, q, k, v, mixed, whole, *sizes, 0.0, True, seed, offset)
        found, mean = [dk, dv], _dot(grad, mixed)
        for share, near_k, near_v in zip(shares[1:], given[2::2], given[3::2], strict=True):
            turn = share * ((_dot(grad, near_v) - mean) * scale).unsqueeze(-1).to(q.dtype)
            dq = dq.addcmul(turn, near_k)
            found += [turn * q, share * grad]
        return dq, *found


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(-1, dtype=torch.float32)


def chain_attention(q: Tensor, steps: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Of the last of the drafted steps, [B, heads, T, dim] each: slot p sees the text's keys up to p - j, then the key
    of each step since where its own chain had it. Slots before the j-th have no chain: zeros."""
    j, length = len(steps) - 1, q.shape[2]
    if j >= length:
        return torch.zeros_like(q)
    given = [part[:, :, i : length - j + i] for i, pair in enumerate(steps) for part in pair]
    mixed = ChainAttention.apply(q[:, :, j:], *given)
    return mixed if j == 0 else torch.nn.functional.pad(mixed, (0, 0, j, 0))
