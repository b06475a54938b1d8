"""Floats as blocks of a GGUF file: the nearest codes, at scales that span a group's numbers (or, in MXFP4, nearly do).
What llama.cpp searches better scales for is not searched for here.

`models/loader/gguf_quants.py` reads these blocks, and says how their bytes lie.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Encoder = Callable[[Tensor], Tensor]
"""Blocks float32 [n, elements] to their bytes, uint8 [n, bytes]."""
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The magnitude of each code of three bits."""


def _bytes(values: Tensor) -> Tensor:
    """[n, k] of any type as uint8 [n, k * size]."""
    return values.contiguous().view(torch.uint8)


def _half(values: Tensor) -> Tensor:
    """[n] as it is stored, two bytes each; and as it will be read."""
    return values.to(torch.float16).unsqueeze(1)


def _divided(x: Tensor, scale: Tensor) -> Tensor:
    return x / torch.where(scale == 0, torch.ones_like(scale), scale)


def _farthest(x: Tensor) -> Tensor:
    """[..., 1]: the number farthest from zero, with its sign."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True))


def _codes(x: Tensor, scale: Tensor, zero: Tensor | float, top: int) -> Tensor:
    return (_divided(x, scale) + zero).round().clamp(0, top).to(torch.uint8)


def _nibbles(codes: Tensor) -> Tensor:
    """Of the last axis: the first half in low nibbles, the second in high ones."""
    low, high = (codes & 15).chunk(2, -1)
    return low | high << 4


def _fifth_bits(codes: Tensor) -> Tensor:
    """uint8 [n, 4]: the fifth bits of 32 codes, the first lowest."""
    bits = (codes >> 4).unflatten(-1, (4, 8)).to(torch.int32) << torch.arange(8, device=codes.device)
    return bits.sum(-1).to(torch.uint8)


def _around_zero(bits: int) -> Encoder:
    """Q4_0, Q5_0: the farthest number is the least code, so that its sign is the scale's."""

    def encode(x: Tensor) -> Tensor:
        middle = 1 << (bits - 1)
        scale = _half((_farthest(x) / -middle).squeeze(1))
        codes = _codes(x, scale.float(), middle, 2 * middle - 1)
        high = [_fifth_bits(codes)] if bits == 5 else []
        return torch.cat([_bytes(scale), *high, _nibbles(codes)], 1)

    return encode


def _from_least(bits: int) -> Encoder:
    """Q4_1, Q5_1."""

    def encode(x: Tensor) -> Tensor:
        top = (1 << bits) - 1
        low = _half(x.amin(1))
        scale = _half((x.amax(1) - x.amin(1)) / top)
        codes = _codes(x - low.float(), scale.float(), 0, top)
        high = [_fifth_bits(codes)] if bits == 5 else []
        return torch.cat([_bytes(scale), _bytes(low), *high, _nibbles(codes)], 1)

    return encode


def _q8_0(x: Tensor) -> Tensor:
    scale = _half(x.abs().amax(1) / 127)
    codes = _divided(x, scale.float()).round().clamp(-127, 127).to(torch.int8)
    return torch.cat([_bytes(scale), _bytes(codes)], 1)


def _six_bits(scales: Tensor, minima: Tensor) -> Tensor:
    """Eight numbers of six bits each in twelve bytes."""
    first, second = scales[:, :4] | (scales[:, 4:] >> 4) << 6, minima[:, :4] | (minima[:, 4:] >> 4) << 6
    return torch.cat([first, second, (scales[:, 4:] & 15) | (minima[:, 4:] & 15) << 4], 1)


def _k_quant(bits: int) -> Encoder:
    """Q4_K, Q5_K: eight groups of 32, each with a scale and a minimum of six bits."""

    def encode(x: Tensor) -> Tensor:
        top = (1 << bits) - 1
        groups = x.unflatten(1, (8, 32))
        below = -groups.amin(2).clamp(max=0)
        spans = (groups.amax(2) + below).clamp(min=0) / top
        scale, least = _half(spans.amax(1) / 63), _half(below.amax(1) / 63)
        scales, minima = _codes(spans, scale.float(), 0, 63), _codes(below, least.float(), 0, 63)
        shifted = groups + (least.float() * minima).unsqueeze(2)
        codes = _codes(shifted, (scale.float() * scales).unsqueeze(2), 0, top)
        high = []
        if bits == 5:
            planes = (codes >> 4).to(torch.int32) << torch.arange(8, device=x.device)[:, None]
            high = [planes.sum(1).to(torch.uint8)]
        low = _nibbles(codes.reshape(-1, 4, 64)).flatten(1)
        return torch.cat([_bytes(scale), _bytes(least), _six_bits(scales, minima), *high, low], 1)

    return encode


def _q6_k(x: Tensor) -> Tensor:
    """Sixteen groups of 16, each with a scale of eight bits."""
    groups = x.unflatten(1, (16, 16))
    wanted = (_farthest(groups) / -32).squeeze(2)
    scale = _half((_farthest(wanted) / -128).squeeze(1))
    scales = _divided(wanted, scale.float()).round().clamp(-128, 127).to(torch.int8)
    codes = _codes(groups, (scale.float() * scales).unsqueeze(2), 32, 63).flatten(1)
    low = _nibbles(codes.reshape(-1, 2, 128)).flatten(1)
    quarters = (codes >> 4).reshape(-1, 2, 4, 32).to(torch.int32)
    high = (quarters << torch.arange(0, 8, 2, device=x.device)[:, None]).sum(2).to(torch.uint8).flatten(1)
    return torch.cat([low, high, _bytes(scales), _bytes(scale)], 1)


def _mxfp4(x: Tensor) -> Tensor:
    """By the formula of OCP's specification: the largest magnitude's power of two, over that of e2m1's largest number,
    is the scale. Ties go to even codes; magnitudes that are above 6 then become 6."""
    exponent = (torch.frexp(x.abs().amax(1, keepdim=True)).exponent - 3).clamp(min=-127)
    scaled = x * torch.exp2(-exponent)
    magnitude = scaled.abs()
    step = torch.exp2(torch.frexp(magnitude).exponent.clamp(min=1) - 2)
    nearest = (magnitude / step).round() * step
    codes = torch.bucketize(nearest.clamp(max=_E2M1[-1]), torch.tensor(_E2M1, device=x.device)) + 8 * (scaled < 0)
    return torch.cat([(exponent + 127).to(torch.uint8), _nibbles(codes.to(torch.uint8))], 1)


ENCODERS: dict[str, Encoder] = {
    "F32": _bytes,
    "BF16": lambda x: _bytes(x.to(torch.bfloat16)),
    "Q4_0": _around_zero(4),
    "Q4_1": _from_least(4),
    "Q5_0": _around_zero(5),
    "Q5_1": _from_least(5),
    "Q8_0": _q8_0,
    "Q4_K": _k_quant(4),
    "Q5_K": _k_quant(5),
    "Q6_K": _q6_k,
    "MXFP4": _mxfp4,
}
NARROW = {"Q4_K": "Q5_0", "Q5_K": "Q5_1", "Q6_K": "Q8_0"}
"""What llama.cpp stores rows in whose width is no multiple of 256."""
