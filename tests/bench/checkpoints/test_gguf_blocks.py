"""Blocks of a GGUF file: gguf-py reads what was written, and no code is farther from its number than another."""

from __future__ import annotations

import gguf
import pytest
import torch

from quire.bench.checkpoints.gguf_blocks import ENCODERS
from quire.models.loader.gguf_quants import QUANT_FORMATS

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


@pytest.mark.parametrize("name", ["F32", "BF16"])
def test_floats_come_back(name: str) -> None:
    x = _blocks(5, 64).bfloat16().float()
    found = torch.empty_like(x)
    BY_NAME[name].decode(ENCODERS[name](x).numpy().reshape(-1, BY_NAME[name].block_bytes),
                         found.numpy().reshape(-1, BY_NAME[name].block_elements))
    assert torch.equal(found, x)
