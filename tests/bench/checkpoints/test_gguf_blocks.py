"""Blocks of a GGUF file: gguf-py reads what was written, and no code is farther from its number than another."""

from __future__ import annotations

import gguf
import pytest
import torch

from quire.bench.checkpoints.gguf_blocks import ENCODERS
from quire.kernels.quantized import Mxfp4Weight
from quire.models.loader.gguf_quants import QUANT_FORMATS, read_mxfp4

BY_NAME = {quant.name: quant for quant in QUANT_FORMATS.values()}
STEPS = {"Q4_0": 8, "Q4_1": 15, "Q5_0": 16, "Q5_1": 31, "Q8_0": 127, "Q4_K": 15, "Q5_K": 31, "Q6_K": 32}
"""Into which a format divides the largest magnitude of a block, or its span."""


def _blocks(count: int, elements: int) -> torch.Tensor:
    x = torch.randn(count, elements, generator=torch.Generator().manual_seed(5))
    x[1] = x[1].abs()
    x[2] = -x[2].abs()
    x[3] = 0
    x[4, 1:] = 0
    return x


@pytest.mark.parametrize("name", STEPS)
def test_numbers_come_back_as_near_as_the_format_has_steps(name: str) -> None:
    x = _blocks(40, BY_NAME[name].block_elements)
    stored = ENCODERS[name](x)
    assert stored.shape == (40, BY_NAME[name].block_bytes) and stored.dtype == torch.uint8
    found = torch.from_numpy(gguf.dequantize(stored.numpy(), gguf.GGMLQuantizationType[name]))
    span = x.abs().amax(1) if name.endswith("_0") or name == "Q6_K" else x.amax(1).clamp(min=0) - x.amin(1).clamp(max=0)
    # Half a step; a whole one at the end that a code around zero lacks; scales of K-quants and of half precision round.
    slack = 1.0 if name in ("Q4_0", "Q5_0") else 0.5
    slack += 0.3 if name.endswith("_K") else 0.1
    assert ((found - x).abs().amax(1) <= slack * span / STEPS[name] + 1e-6).all()
    assert float((found - x).pow(2).mean()) < 0.2 * float((span / STEPS[name]).pow(2).mean())


def _mxfp4(x: torch.Tensor) -> torch.Tensor:
    """As gguf-py reads what was written, and as the loader does in floats and in the file's bits."""
    stored = ENCODERS["MXFP4"](x).numpy()
    found = torch.from_numpy(gguf.dequantize(stored, gguf.GGMLQuantizationType.MXFP4))
    quant, own = BY_NAME["MXFP4"], torch.empty_like(x)
    quant.decode(stored, own.numpy())
    assert torch.equal(own, found)

    def read_at(offset: int, buffer: memoryview) -> None:
        buffer[:] = stored.reshape(-1)[offset : offset + len(buffer)].data

    codes, scales = map(torch.from_numpy, read_mxfp4(quant, read_at, len(stored)))
    assert torch.equal(Mxfp4Weight(codes, scales[:, None]).dequantized(), found)
    return found


def test_mxfp4_rounds_to_the_nearest_and_ties_to_even_codes() -> None:
    magnitudes = {6.0: 6, 7.5: 6, 0.0: 0, 0.25: 0, 0.26: 0.5, 0.75: 1, 1.0: 1, 1.25: 1, 1.75: 2, 2.5: 2, 2.6: 3,
                  3.5: 4, 5.0: 4, 5.01: 6}  # fmt: skip
    x, wanted = (torch.zeros(1, 32) for _ in range(2))
    for column, (value, nearest) in enumerate(magnitudes.items()):
        x[0, [column, column + 16]] = torch.tensor([value, -value])
        wanted[0, [column, column + 16]] = torch.tensor([float(nearest), -float(nearest)])
    for exponent in (-125, -9, 0, 60):
        scale = 2.0**exponent
        assert torch.equal(_mxfp4(x * scale), wanted * scale), exponent


def test_mxfp4_numbers_are_as_near_as_gguf_makes_them() -> None:
    x = _blocks(400, 32)
    kind = gguf.GGMLQuantizationType.MXFP4
    theirs = torch.from_numpy(gguf.dequantize(gguf.quantize(x.numpy(), kind), kind))
    found = _mxfp4(x)
    assert torch.equal((found - x).abs(), (theirs - x).abs())
    assert torch.equal(_mxfp4(found), found)


@pytest.mark.parametrize("name", ["F32", "BF16"])
def test_floats_come_back(name: str) -> None:
    x = _blocks(5, 64).bfloat16().float()
    found = torch.empty_like(x)
    BY_NAME[name].decode(ENCODERS[name](x).numpy().reshape(-1, BY_NAME[name].block_bytes),
                         found.numpy().reshape(-1, BY_NAME[name].block_elements))
    assert torch.equal(found, x)
