"""GGUF block formats: how long a block is, and how its values become float32."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

# Source bytes dequantized at once; of 16 KiB to 1 MiB this was the fastest (SmolLM2: 0.33 s on two threads).
CHUNK_BYTES = 256 << 10

# (blocks [n, block_bytes] uint8, out [n, block_elements] float32) -> None
Decoder = Callable[[np.ndarray, np.ndarray], None]


@dataclass(frozen=True, slots=True)
class QuantFormat:
    """One storage type of the format; `decode` fills float32 values from whole blocks."""

    name: str
    block_elements: int
    block_bytes: int
    decode: Decoder


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


def _q8_0(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(blocks[:, 2:].view(np.int8), _half(blocks, 0), out=out)


def _q4_0(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = np.empty((len(blocks), 32), np.uint8)
    _nibbles(blocks[:, 2:], quants)
    np.subtract(quants, 8, out=quants)
    np.multiply(quants.view(np.int8), _half(blocks, 0), out=out)


def _q4_1(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = np.empty((len(blocks), 32), np.uint8)
    _nibbles(blocks[:, 4:], quants)
    np.multiply(quants, _half(blocks, 0), out=out)
    np.add(out, _half(blocks, 2), out=out)


def _five_bits(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    """32 five-bit values a block: a bit of `high` [n, 4] over a nibble of `low` [n, 16]."""
    quants = np.empty((len(low), 32), np.uint8)
    _nibbles(low, quants)
    fifth = np.unpackbits(high, axis=1, bitorder="little")
    np.left_shift(fifth, 4, out=fifth)
    np.bitwise_or(quants, fifth, out=quants)
    return quants


def _q5_0(blocks: np.ndarray, out: np.ndarray) -> None:
    quants = _five_bits(blocks[:, 2:6], blocks[:, 6:])
    np.subtract(quants, 16, out=quants)
    np.multiply(quants.view(np.int8), _half(blocks, 0), out=out)


def _q5_1(blocks: np.ndarray, out: np.ndarray) -> None:
    np.multiply(_five_bits(blocks[:, 4:8], blocks[:, 8:]), _half(blocks, 0), out=out)
    np.add(out, _half(blocks, 2), out=out)


def _k_scales(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum of the 8 groups of a Q4_K or Q5_K block, [n, 8, 1] each, block scale applied.

    Twelve bytes hold sixteen 6-bit numbers: groups 0-3 lie in the low six bits of bytes 0-3 (scales) and
    4-7 (minima); groups 4-7 take four bits of bytes 8-11 and the top two bits of bytes 0-7.
    """
    first, second, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([first & 63, (mixed & 15) | ((first >> 2) & 48)], axis=1)
    minima = np.concatenate([second & 63, (mixed >> 4) | ((second >> 2) & 48)], axis=1)
    return (_half(blocks, 0) * scales)[..., None], (_half(blocks, 2) * minima)[..., None]


def _q4_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, minima = _k_scales(blocks)
    quants = np.empty((len(blocks), 4, 64), np.uint8)
    _nibbles(blocks[:, 16:].reshape(-1, 4, 32), quants)
    groups = out.reshape(-1, 8, 32)
    np.multiply(quants.reshape(-1, 8, 32), scales, out=groups)
    np.subtract(groups, minima, out=groups)


def _q5_k(blocks: np.ndarray, out: np.ndarray) -> None:
    scales, minima = _k_scales(blocks)
    quants = np.empty((len(blocks), 4, 64), np.uint8)
    _nibbles(blocks[:, 48:].reshape(-1, 4, 32), quants)
    quants = quants.reshape(-1, 8, 32)
    high = blocks[:, None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None]
    np.bitwise_or(quants, (high & 1) << 4, out=quants)
    groups = out.reshape(-1, 8, 32)
    np.multiply(quants, scales, out=groups)
    np.subtract(groups, minima, out=groups)


def _q6_k(blocks: np.ndarray, out: np.ndarray) -> None:
    low = blocks[:, :128].reshape(-1, 2, 64)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32)
    nibbles = np.empty((len(blocks), 2, 128), np.uint8)
    _nibbles(low, nibbles)
    quants = nibbles.reshape(-1, 2, 4, 32)
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    np.bitwise_or(quants, ((high >> shifts) & 3) << 4, out=quants)
    np.subtract(quants, 32, out=quants)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8)
    np.multiply(quants.reshape(-1, 16, 16).view(np.int8), scales[..., None], out=out.reshape(-1, 16, 16))


# Keyed by the type number stored in the file.
QUANT_FORMATS: dict[int, QuantFormat] = {
    0: QuantFormat("F32", 1, 4, _f32),
    1: QuantFormat("F16", 1, 2, _f16),
    2: QuantFormat("Q4_0", 32, 18, _q4_0),
    3: QuantFormat("Q4_1", 32, 20, _q4_1),
    6: QuantFormat("Q5_0", 32, 22, _q5_0),
    7: QuantFormat("Q5_1", 32, 24, _q5_1),
    8: QuantFormat("Q8_0", 32, 34, _q8_0),
    12: QuantFormat("Q4_K", 256, 144, _q4_k),
    13: QuantFormat("Q5_K", 256, 176, _q5_k),
    14: QuantFormat("Q6_K", 256, 210, _q6_k),
    30: QuantFormat("BF16", 1, 2, _bf16),
}


def known_formats() -> str:
    return ", ".join(quant.name for quant in QUANT_FORMATS.values())


def dequantize_into(quant: QuantFormat, read_at: Callable[[int, memoryview], None], out: np.ndarray) -> None:
    """Fill `out` (flat float32) block by block; `read_at(offset, buffer)` supplies the source bytes."""
    per_chunk = max(1, CHUNK_BYTES // quant.block_bytes)
    total = out.size // quant.block_elements
    buffer = np.empty((min(per_chunk, total), quant.block_bytes), np.uint8)
    rows = out.reshape(total, quant.block_elements)
    for start in range(0, total, per_chunk):
        stop = min(start + per_chunk, total)
        blocks = buffer[: stop - start]
        read_at(start * quant.block_bytes, blocks.reshape(-1).data)
        quant.decode(blocks, rows[start:stop])
