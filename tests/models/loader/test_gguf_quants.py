"""Every block format dequantizes to the bits that the gguf package gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from quire.models.loader.gguf_quants import CHUNK_BYTES, QUANT_FORMATS, dequantize_into, unread_format

SCALE_BYTES = {"Q4_K": (0, 4), "Q5_K": (0, 4), "Q6_K": (208, 210), "Q4_1": (0, 4), "Q5_1": (0, 4)}


def random_blocks(name: str, block_bytes: int, count: int) -> np.ndarray:
    """Random bytes with finite scales: an infinite one would hide the rest."""
    rng = np.random.default_rng(5)
    if name in ("F32", "F16", "BF16"):
        values = rng.standard_normal(count).astype(np.float32)
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[name]).view(np.uint8).reshape(count, -1)
    blocks = rng.integers(0, 256, (count, block_bytes), dtype=np.uint8)
    start, stop = SCALE_BYTES.get(name, (0, 2))
    scales = rng.standard_normal((count, (stop - start) // 2)).astype(np.float16)
    blocks[:, start:stop] = scales.view(np.uint8)
    return blocks


@pytest.mark.parametrize("kind", QUANT_FORMATS)
@pytest.mark.parametrize("chunks", [0.01, 2.5])
def test_values_are_bit_equal_to_the_gguf_package(kind: int, chunks: float) -> None:
    quant = QUANT_FORMATS[kind]
    blocks = random_blocks(
        quant.name, quant.block_bytes, max(1, int(chunks * CHUNK_BYTES / quant.block_bytes))
    )
    raw = memoryview(blocks.tobytes())

    def read_at(offset: int, into: memoryview) -> None:
        into[:] = raw[offset : offset + len(into)]

    out = np.empty(len(blocks) * quant.block_elements, np.float32)
    dequantize_into(quant, read_at, out)
    expected = gguf.quants.dequantize(blocks.reshape(-1), gguf.GGMLQuantizationType(kind))
    assert np.array_equal(out.view(np.uint32), expected.reshape(-1).view(np.uint32))


def test_block_sizes_are_those_of_the_format() -> None:
    for kind, quant in QUANT_FORMATS.items():
        assert gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)] == (
            quant.block_elements,
            quant.block_bytes,
        )
        assert gguf.GGMLQuantizationType(kind).name == quant.name


def test_formats_that_are_not_read_have_the_names_of_the_gguf_package() -> None:
    others = [kind for kind in gguf.GGMLQuantizationType if kind not in QUANT_FORMATS]
    assert {gguf.GGMLQuantizationType.Q2_K, gguf.GGMLQuantizationType.IQ4_XS} <= set(others)
    assert [unread_format(kind) for kind in others] == [kind.name for kind in others]
    assert unread_format(999) == "type 999, which has no name here"
