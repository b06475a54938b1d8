"""Checkpoints that compressed-tensors itself has written: what is read is what it says they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("compressed_tensors")

from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from compressed_tensors.quantization.utils import calculate_qparams

from quire.kernels.quantized import Fp8Weight, QuantizedWeight
from quire.kernels.unread import UnreadWeight
from quire.models.loader.source import resolve_model
from tests.checkpoints import make_model

SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
                         "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 1}
BLOCK = 128
INPUT_SCALE = 0.03125
LARGEST_GAP = 0.004
"""Of the largest weight: it rounds to bfloat16 what it unpacks."""


def groups_of(weight: Tensor, shape: torch.Size, strategy: str) -> Tensor:
    """float32 [scales, numbers of each], in the order of the scales."""
    rows, columns = weight.shape
    if strategy == "block":
        blocks = weight.view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK).transpose(1, 2)
        return blocks.reshape(*shape, -1)
    return weight.reshape(*shape, -1) if shape.numel() > 1 else weight.reshape(1, 1, -1)


def calibrated(module: Any) -> Tensor:
    """Gives a module the scales that its scheme finds, and says what its weight becomes."""
    scheme = module.quantization_scheme.weights
    numbers = groups_of(module.weight.data.float(), module.weight_scale.shape, scheme.strategy)
    scales, zeros = calculate_qparams(numbers.amin(-1), numbers.amax(-1), scheme)
    module.weight_scale.data.copy_(scales.reshape(module.weight_scale.shape))
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zeros.reshape(module.weight_scale.shape))
    if hasattr(module, "input_scale"):
        module.input_scale.data.fill_(INPUT_SCALE)
    return fake_quantize(module.weight.data, module.weight_scale, getattr(module, "weight_zero_point", None), scheme)


def write(folder: Path, preset: str) -> dict[str, Tensor]:
    """What the projections stand for, by the names of their weights."""
    model = make_model("llama", **SIZES).to(torch.bfloat16)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    found = {f"{name}.weight": calibrated(module) for name, module in model.named_modules()
             if getattr(module, "quantization_scheme", None) is not None}
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return found


@pytest.mark.parametrize(("preset", "kind"), [
    ("FP8_DYNAMIC", Fp8Weight), ("FP8", Fp8Weight), ("FP8_BLOCK", Fp8Weight), ("W8A8", QuantizedWeight),
    ("W4A16", QuantizedWeight), ("W4A16_ASYM", QuantizedWeight), ("W8A16", QuantizedWeight),
])  # fmt: skip
def test_what_the_library_writes_is_read_in_its_own_bits(preset: str, kind: type, tmp_path: Path) -> None:
    expected = write(tmp_path, preset)
    source = resolve_model(str(tmp_path))
    stored, floats = dict(source.stored_weights()), dict(source.weights())
    assert len(expected) == 7
    for name, want in expected.items():
        held = stored[name]
        held = held.whole() if isinstance(held, UnreadWeight) else held
        assert isinstance(held, kind)
        gap = (floats[name].float() - want.float()).abs().max()
        assert gap < LARGEST_GAP * want.float().abs().max()
        if isinstance(held, Fp8Weight):
            assert held.input_scale == (INPUT_SCALE if preset == "FP8" else None)
        if isinstance(held, QuantizedWeight):
            assert held.int8_rows == (preset == "W8A8")
