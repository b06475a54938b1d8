"""gpt-oss checkpoints with experts in MXFP4, as published: blocks and scales beside floats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from quire.models.loader.mxfp4 import dequantized
from tests.checkpoints import config_of, weights_of


def _packed(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[experts, columns, rows] as MXFP4 blocks and scales: the nearest magnitude at a scale that fits."""
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    groups = weight.transpose(1, 2).contiguous().unflatten(-1, (-1, 32))
    exponent = torch.ceil(torch.log2(groups.abs().amax(-1) / 6.0))
    scaled = groups / torch.exp2(exponent).unsqueeze(-1)
    code = (scaled.abs().unsqueeze(-1) - table).abs().argmin(-1) + 8 * (scaled < 0)
    pairs = code.to(torch.uint8).unflatten(-1, (-1, 2))
    return pairs[..., 0] | pairs[..., 1] << 4, (exponent + 127).to(torch.uint8)


def write_mxfp4(folder: Path, model: Any) -> dict[str, torch.Tensor]:
    """What was stored. The model gets the weights that its experts were rounded to."""
    stored: dict[str, torch.Tensor] = {}
    floats = dict(model.state_dict())
    for name, tensor in weights_of(model):
        if name.endswith(("gate_up_proj", "down_proj")):
            stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales = _packed(tensor)
            floats[name] = dequantized(blocks, scales, name).transpose(1, 2).contiguous()
            assert (floats[name] - tensor).abs().max() < 0.3  # it was packed well
        else:
            stored[name] = tensor.contiguous()
    model.load_state_dict(floats)
    config = config_of(model) | {"quantization_config": {"quant_method": "mxfp4"}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors")
    return stored
