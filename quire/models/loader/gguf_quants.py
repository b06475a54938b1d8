"""GGUF block formats: how long a block is, which codes and scales it holds, and how these become float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

# Source bytes dequantized at once; of 16 KiB to 1 MiB this was the fastest (SmolLM2: 0.33 s on two threads).
CHUNK_BYTES = 256 << 10

# (blocks [n, block_bytes] uint8, out [n, block_elements] float32) -> None
Decoder = Callable[[np.ndarray, np.ndarray], None]
# (blocks [n, block_bytes] uint8, codes [n, block_elements] uint8) -> (scales, offsets), float32 [n, groups] each
Splitter = Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray | None]]


@dataclass(frozen=True, slots=True)
class Coding:
    """How a quantized block is made: scale * (code - zero) + offset, one scale (and offset) for `group` numbers.

    `split` fills the codes of whole blocks and gives their scales and offsets (None: the format has none). Scales have
    so few bits that a product is exact: the sum rounds, once.
    """

    bits: int
    zero: int
    group: int
    split: Splitter
    offsets: bool = False
    steps: tuple[int, ...] = ()
    """Of blocks of several groups: at which bytes the numbers are that scales, and the negative of offsets, are
    multiples of."""

    def decode(self, blocks: np.ndarray, out: np.ndarray) -> None:
        codes = np.empty(out.shape, np.uint8)
        scales, offsets = self.split(blocks, codes)
        if self.zero:
            np.subtract(codes, self.zero, out=codes)  # wraps, as the signed number does
        grouped = (len(blocks), -1, self.group)
        values = out.reshape(grouped)
        np.multiply(codes.view(np.int8).reshape(grouped), scales[..., None], out=values)
        if offsets is not None:
            np.add(values, offsets[..., None], out=values)


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One storage type of the format; `decode` fills float32 values from whole blocks."""

    name: str
    block_elements: int
    block_bytes: int
    decode: Decoder
    coding: Coding | None = None
    """None: the numbers are floats."""


def _half(blocks: np.ndarray, start: int) -> np.ndarray:
    """The float16 at byte `start` of every block, as a float32 column."""
    return blocks[:, start : start + 2].copy().view(np.float16).astype(np.float32)


def _nibbles(packed: np.ndarray, out: np.ndarray) -> None:
    """Low nibbles of the bytes into the first half of `out`'s last axis, high nibbles into the second."""
    half = packed.shape[-1]
    np.bitwise_and(packed, 15, out=out[..., :half])
    np.right_shift(packed, 4, out=out[..., half:])


def _f32(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = blocks.view(np.float32)


def _f16(blocks: np.ndarray, out: np.ndarray) -> None:
    out[...] = blocks.view(np.float16)


def _bf16(blocks: np.ndarray, out: np.ndarray) -> None:
    np.left_shift(blocks.view(np.uint16), 16, out=out.view(np.uint32), dtype=np.uint32)


def _q8_0(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, None]:
    np.bitwise_xor(blocks[:, 2:], 128, out=codes)
    return _half(blocks, 0), None


def _q4_0(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, None]:
    _nibbles(blocks[:, 2:], codes)
    return _half(blocks, 0), None


def _q4_1(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _nibbles(blocks[:, 4:], codes)
    return _half(blocks, 0), _half(blocks, 2)


def _five_bits(high: np.ndarray, low: np.ndarray, codes: np.ndarray) -> None:
    """32 five-bit values a block: a bit of `high` [n, 4] over a nibble of `low` [n, 16]."""
    _nibbles(low, codes)
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    np.left_shift(fifth, 4, out=fifth)
    np.bitwise_or(codes, fifth, out=codes)


def _q5_0(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, None]:
    _five_bits(blocks[:, 2:6], blocks[:, 6:], codes)
    return _half(blocks, 0), None


def _q5_1(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _five_bits(blocks[:, 4:8], blocks[:, 8:], codes)
    return _half(blocks, 0), _half(blocks, 2)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and offset of the 8 groups of a Q4_K or Q5_K block, [n, 8] each, block scale applied.

    Twelve bytes hold sixteen 6-bit numbers: groups 0-3 lie in the low six bits of bytes 0-3 (scales) and
    4-7 (minima); groups 4-7 take four bits of bytes 8-11 and the top two bits of bytes 0-7.
    """
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (mixed & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (mixed >> 4) | ((second >> 2) & 48)], axis=1)
    return _half(blocks, 0) * scales, -(_half(blocks, 2) * minima)


def _q4_k(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), codes.reshape(-1, 4, 64))
    return _k_scales(blocks)


def _q5_k(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), codes.reshape(-1, 4, 64))
    groups = codes.reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    np.bitwise_or(groups, (high & 1) << 4, out=groups)
    return _k_scales(blocks)


def _q6_k(blocks: np.ndarray, codes: np.ndarray) -> tuple[np.ndarray, None]:
    _nibbles(blocks[:, :128].reshape(-1, 2, 64), codes.reshape(-1, 2, 128))
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    quarters = codes.reshape(-1, 2, 4, 32)
    np.bitwise_or(quarters, ((high >> shifts) & 3) << 4, out=quarters)
    return _half(blocks, 208) * blocks[:, 192:208].view(np.int8), None


MXFP4 = "MXFP4"
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)
"""Twice the number that each code stands for."""


def _mxfp4(blocks: np.ndarray, out: np.ndarray) -> None:
    """A power of two, then 32 codes."""
    codes = np.empty(out.shape, np.uint8)
    _nibbles(blocks[:, 1:], codes)
    np.take(_MXFP4, codes, out=out)
    np.ldexp(out, blocks[:, :1].astype(np.int32) - 128, out=out)


def _coded(name: str, elements: int, nbytes: int, coding: Coding) -> QuantFormat:
    return QuantFormat(name, elements, nbytes, coding.decode, coding)


# Keyed by the type number stored in the file.
QUANT_FORMATS: dict[int, QuantFormat] = {
    0: QuantFormat("F32", 1, 4, _f32),
    1: QuantFormat("F16", 1, 2, _f16),
    2: _coded("Q4_0", 32, 18, Coding(4, 8, 32, _q4_0)),
    3: _coded("Q4_1", 32, 20, Coding(4, 0, 32, _q4_1, offsets=True)),
    6: _coded("Q5_0", 32, 22, Coding(5, 16, 32, _q5_0)),
    7: _coded("Q5_1", 32, 24, Coding(5, 0, 32, _q5_1, offsets=True)),
    8: _coded("Q8_0", 32, 34, Coding(8, 128, 32, _q8_0)),
    12: _coded("Q4_K", 256, 144, Coding(4, 0, 32, _q4_k, offsets=True, steps=(0, 2))),
    13: _coded("Q5_K", 256, 176, Coding(5, 0, 32, _q5_k, offsets=True, steps=(0, 2))),
    14: _coded("Q6_K", 256, 210, Coding(6, 32, 16, _q6_k, steps=(208,))),
    30: QuantFormat("BF16", 1, 2, _bf16),
    39: QuantFormat(MXFP4, 32, 17, _mxfp4),
}


# The others that ggml has had, for whoever is told that his file is in one of them.
_UNREAD_FORMATS = {
    4: "Q4_2", 5: "Q4_3", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS",
    19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64",
    28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 40: "NVFP4", 41: "Q1_0",
}  # fmt: skip


def unread_format(kind: int) -> str:
    """What a type that is not read is called."""
    return _UNREAD_FORMATS.get(kind, f"type {kind}, which has no name here")


def known_formats() -> str:
    return ", ".join(quant.name for quant in QUANT_FORMATS.values())


ReadAt = Callable[[int, memoryview], None]
"""Fills a buffer with source bytes from an offset on."""


def dequantize_into(quant: QuantFormat, read_at: ReadAt, out: np.ndarray) -> None:
    """Fill `out` (flat float32) block by block."""
    rows = out.reshape(-1, quant.block_elements)
    for start, blocks in _chunks(quant, read_at, len(rows)):
        quant.decode(blocks, rows[start : start + len(blocks)])


class Codes(NamedTuple):
    """Of blocks, or of rows of them."""

    codes: np.ndarray
    scales: np.ndarray
    offsets: np.ndarray | None
    steps: np.ndarray | None
    """[..., 1 or 2]: what every scale of a block is a multiple of, and every offset."""


def read_codes(quant: QuantFormat, coding: Coding, read_at: ReadAt, count: int) -> Codes:
    """Of `count` blocks, flat but for the steps."""
    codes = np.empty((count, quant.block_elements), np.uint8)
    scales = np.empty((count, quant.block_elements // coding.group), np.float32)
    offsets: np.ndarray | None = None
    steps = np.empty((count, len(coding.steps)), np.float32) if coding.steps else None
    for start, blocks in _chunks(quant, read_at, count):
        part = slice(start, start + len(blocks))
        scales[part], found = coding.split(blocks, codes[part])
        if found is not None:
            offsets = np.empty_like(scales) if offsets is None else offsets
            offsets[part] = found
        if steps is not None:
            steps[part] = np.concatenate([_half(blocks, at) for at in coding.steps], 1)
            steps[part, 1:] *= -1
    return Codes(codes.reshape(-1), scales.reshape(-1), None if offsets is None else offsets.reshape(-1), steps)


def read_mxfp4(quant: QuantFormat, read_at: ReadAt, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Of `count` blocks of MXFP4: codes uint8 [count, 16], two columns a byte, and exponents uint8 [count]."""
    packed, scales = np.empty((count, 16), np.uint8), np.empty(count, np.uint8)
    for start, blocks in _chunks(quant, read_at, count):
        codes = np.empty((len(blocks), 32), np.uint8)
        _nibbles(blocks[:, 1:], codes)
        part = slice(start, start + len(blocks))
        packed[part], scales[part] = codes[:, ::2] | codes[:, 1::2] << 4, blocks[:, 0]
    return packed, scales


def _chunks(quant: QuantFormat, read_at: ReadAt, total: int) -> Iterator[tuple[int, np.ndarray]]:
    """Number of the first block, and blocks [n, block_bytes]: a few at a time, in one buffer."""
    per_chunk = max(1, CHUNK_BYTES // quant.block_bytes)
    buffer = np.empty((min(per_chunk, total), quant.block_bytes), np.uint8)
    for start in range(0, total, per_chunk):
        blocks = buffer[: min(per_chunk, total - start)]
        read_at(start * quant.block_bytes, blocks.reshape(-1).data)
        yield start, blocks
