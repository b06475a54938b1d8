"""Codes of weights in planes of bytes, and the numbers that they stand for: what kernels of dense layers and of experts
share.

A block of columns of a feature is a few pieces of 32 bytes, all features of a piece side by side: uint8 [blocks,
pieces, features, 32]. Byte i of a piece has a part of the codes of columns 32 s + i of the block (s = 0, 1, ...), so
that unpacking moves nothing from one place to another:

    bits     columns  pieces
    8        32       1       the code
    4        64       1       that of s = 0 in the low half of the byte, of s = 1 in the high half
    5, 6     256      5, 6    piece s % 4: the low four bits, those of s < 4 in the low half of the byte
    5                         piece 4: the fifth bit, at bit s
    6                         piece 4 + s // 4: two more bits, at bits 2 (s % 4) and 2 (s % 4) + 1

A weight is scale * number (+ offset) in float32. The number of a code is code - zero; of MXFP4 one of e2m1, whose scale
is a byte with the exponent of a power of two; of fp8 one of e4m3. A small float becomes one of half precision by a
shift, subnormals too, on any chip: its exponent then is too small by a constant, which the scale makes good.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

INTEGERS, E2M1, E4M3 = 0, 1, 2
"""Kinds of numbers."""
PIECE = 32
_COLUMNS = {4: 64, 5: 256, 6: 256, 8: 32}
_E2M1, _E4M3 = tl.constexpr(E2M1), tl.constexpr(E4M3)
_E2M1_SHORT, _E4M3_SHORT = 2.0**14, 2.0**8
"""Half precision, which has a bias of 15, makes numbers with biases of 1 and 7 so much too small."""
_MORE_E2M1, _MORE_E4M3 = tl.constexpr(_E2M1_SHORT), tl.constexpr(_E4M3_SHORT)


def columns_of(bits: int) -> int:
    """Of a block."""
    return _COLUMNS[bits]


def planes(codes: Tensor, bits: int) -> Tensor:
    """uint8 [blocks, pieces, features, 32] of codes uint8 [features, width]; columns are filled up with zeros."""
    features, width = codes.shape
    columns = _COLUMNS[bits]
    blocks = -(-width // columns)
    if width % columns:
        codes = torch.nn.functional.pad(codes, (0, blocks * columns - width))
    parts = codes.reshape(features, blocks, columns // PIECE, PIECE).permute(1, 2, 0, 3)
    if bits == 8:
        return parts.contiguous()
    if bits == 4:
        return (parts[:, :1] | parts[:, 1:] << 4).contiguous()
    pieces = torch.empty(blocks, bits, features, PIECE, dtype=torch.uint8, device=codes.device)
    for place in range(4):
        pieces[:, place] = parts[:, place] & 15 | (parts[:, place + 4] & 15) << 4
    each, extra = bits - 4, pieces[:, 4:].zero_()
    for place in range(8):
        extra[:, place * each // 8] |= parts[:, place] >> 4 << place * each % 8
    return pieces


def codes_in(pieces: Tensor, bits: int) -> Tensor:
    """uint8 [features, columns]: what `planes` was given, filled up to whole blocks."""
    parts = pieces.permute(2, 0, 1, 3)
    if bits < 8:
        lows = 1 if bits == 4 else 4
        found = torch.cat([parts[:, :, :lows] & 15, parts[:, :, :lows] >> 4], 2)
        if bits > 4:
            each = bits - 4
            high = [parts[:, :, 4 + s * each // 8] >> s * each % 8 & (1 << each) - 1 for s in range(8)]
            found = found | torch.stack(high, 2) << 4
        parts = found
    return parts.reshape(pieces.shape[2], -1)


def numbers_in(codes: Tensor, zero: int, kind: int) -> Tensor:
    """float32: the numbers of codes, without their scales."""
    if kind == INTEGERS:
        return codes.float() - zero
    wide = codes.to(torch.int32)
    bits, short = ((wide & 7) << 9 | (wide & 8) << 12, _E2M1_SHORT) if kind == E2M1 else (
        (wide & 127) << 7 | (wide & 128) << 8, _E4M3_SHORT)  # fmt: skip
    return bits.to(torch.int16).view(torch.float16).float() * short


def scales_in(scales: Tensor, kind: int) -> Tensor:
    """float32: scales as they are stored."""
    return torch.exp2(scales.float() - 127) if kind == E2M1 else scales.float()


@triton.jit
def codes_of(low, extra, more, S: tl.constexpr, BITS: tl.constexpr):
    """The codes of part S of a block. `low` is the piece with their low bits; 5 and 6 bits have `extra` and `more`."""
    if BITS == 8:
        return low
    elif BITS == 4:
        return (low >> (S * 4)) & 15
    elif BITS == 5:
        return (low >> (S // 4 * 4)) & 15 | ((extra >> S) & 1) << 4
    else:
        high = extra if S < 4 else more
        return (low >> (S // 4 * 4)) & 15 | ((high >> (S % 4 * 2)) & 3) << 4


@triton.jit
def numbers_of(
    code, first, lane, feature, scales, offsets, num_features, WIDTH: tl.constexpr, ZERO: tl.constexpr,
    GROUP: tl.constexpr, OFFSETS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """float32: the weights of codes [..., features, 32] in columns first + lane, where `first` is a multiple of 32 and
    `feature` and `lane` have the shapes [features, 1] and [1, 32], or one dimension more as `first` does. Columns
    behind the last have some number. Scales and offsets are [groups, num_features]."""
    GROUPS: tl.constexpr = (WIDTH + GROUP - 1) // GROUP
    if GROUPS == 1:
        place = feature
    elif GROUP % 32 == 0:
        place = tl.minimum(first // GROUP, GROUPS - 1) * num_features + feature
    else:
        place = tl.minimum((first + lane) // GROUP, GROUPS - 1) * num_features + feature
    stored = tl.load(scales + place)
    if NUMBERS == _E2M1:
        wide = code.to(tl.uint16)
        number = ((wide & 7) << 9 | (wide & 8) << 12).to(tl.float16, bitcast=True).to(tl.float32)
        power = stored.to(tl.int32)
        scale = tl.where(power == 0, 1 << 22, power << 23).to(tl.float32, bitcast=True) * _MORE_E2M1
    elif NUMBERS == _E4M3:
        wide = code.to(tl.uint16)
        number = ((wide & 127) << 7 | (wide & 128) << 8).to(tl.float16, bitcast=True).to(tl.float32)
        scale = stored.to(tl.float32) * _MORE_E4M3
    else:
        number = (code.to(tl.int32) - ZERO).to(tl.float32)
        scale = stored.to(tl.float32)
    found = number * scale
    if OFFSETS:
        found += tl.load(offsets + place).to(tl.float32)
    return found
