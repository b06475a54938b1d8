"""fp8 checkpoints: weights are the floats they stand for, in their own bits; what is not supported is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.kernels.quantized import Fp8Weight
from quire.models.build import build_decoder
from quire.models.loader.fp8_config import fp8_scheme
from quire.models.loader.source import resolve_model
from quire.ops.reference import TorchOps
from tests.fp8_checkpoints import BLOCKS, KINDS, MODELOPT, compressed_fp8, fp8
from tests.integer_checkpoints import write_checkpoint
from tests.paged_driver import PagedDriver

PROJECTION = "model.layers.1.mlp.down_proj"


@pytest.mark.parametrize("kind", KINDS)
def test_a_weight_is_the_floats_of_its_format_and_stays_in_fp8(kind: str, tmp_path: Path) -> None:
    pack, config = KINDS[kind]
    expected = write_checkpoint(tmp_path, pack, config, intermediate_size=320)
    source = resolve_model(str(tmp_path))
    found = dict(source.weights())
    assert found.keys() == expected.keys()
    for name, want in expected.items():
        assert torch.equal(found[name], want.float())
    for name, weight in source.stored_weights():
        assert isinstance(weight, Fp8Weight) == name.endswith("_proj.weight"), name
        if isinstance(weight, Fp8Weight):
            assert torch.equal(weight.dequantized(), expected[name])
            assert (weight.input_scale is not None) == ("static" in kind or kind == "modelopt")


@pytest.mark.parametrize("kind", KINDS)
def test_a_decoder_takes_them(kind: str, tmp_path: Path) -> None:
    pack, config = KINDS[kind]
    write_checkpoint(tmp_path, pack, config)
    source = resolve_model(str(tmp_path))
    build_decoder(source.config, source.stored_weights(), TorchOps())


def test_experts_and_latents_as_deepseek_v3_publishes_them(tmp_path: Path) -> None:
    """Blocks that latents, heads and experts do not fill; rows of q and k that change places."""
    sizes = {"hidden_size": 160, "moe_intermediate_size": 136, "kv_lora_rank": 130, "q_lora_rank": 140}
    expected = write_checkpoint(tmp_path, *KINDS["blocks"], family="deepseek_v3", num_key_value_heads=4, **sizes)
    source = resolve_model(str(tmp_path))
    tokens = list(range(20))
    want, *found = (
        PagedDriver(build_decoder(source.config, weights, TorchOps())).run(0, tokens, [20])
        for weights in (((name, each.clone()) for name, each in expected.items()), source.weights(),
                        source.stored_weights())
    )  # fmt: skip
    assert all(torch.equal(each, want) for each in found)


CHANGED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (BLOCKS, {"weight_block_size": [64, 128]}, "weight_block_size"),
    (BLOCKS, {"activation_scheme": "static"}, "weight_block_size"),
    (BLOCKS, {"fmt": "e5m2"}, "fmt"),
    (MODELOPT, {"quant_algo": "NVFP4"}, "quant_algo"),
    (MODELOPT, {"kv_cache_quant_algo": "FP8"}, "kv_cache_quant_algo"),
    (compressed_fp8(), {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
    (compressed_fp8(), {"format": "pack-quantized"}, "format"),
]


@pytest.mark.parametrize(("config", "change", "field"), CHANGED)
def test_what_is_not_supported_is_refused_by_its_field(
    config: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quantization_config.{field}="):
        fp8_scheme({"quantization_config": config | change})


@pytest.mark.parametrize(("part", "field", "value"), [
    ("weights", "num_bits", 4), ("weights", "strategy", "group"), ("input_activations", "strategy", "tensor"),
    ("weights", "symmetric", False),
])  # fmt: skip
def test_a_group_of_layers_is_refused_by_its_field(part: str, field: str, value: Any) -> None:
    config = json.loads(json.dumps(compressed_fp8()))
    config["config_groups"]["group_0"][part][field] = value
    with pytest.raises(UnsupportedModelError, match=f"group_0.{part}.{field}="):
        fp8_scheme({"quantization_config": config})


@pytest.mark.parametrize(("member", "tensor", "complaint"), [
    ("weight_scale", torch.ones(3), "a weight of 64 rows"),
    ("weight", torch.ones(64, 128), "fp8"),
    ("input_scale", torch.ones(1), "activations that find their own scales"),
])  # fmt: skip
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    member: str, tensor: torch.Tensor, complaint: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, fp8(), compressed_fp8())
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{PROJECTION}.{member}"] = tensor
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{PROJECTION}.{member}.*{complaint}"):
        list(resolve_model(str(tmp_path)).stored_weights())


def test_rows_columns_and_parts_of_an_fp8_weight_are_those_of_its_floats() -> None:
    codes = torch.randn(256, 384).to(torch.float8_e4m3fn)
    weight = Fp8Weight(codes, torch.rand(256, 3), 128)
    floats = weight.dequantized()
    assert torch.equal(weight.rows([3, 1, 200]).dequantized(), floats[[3, 1, 200]])
    assert torch.equal(weight.columns(128, 384).dequantized(), floats[:, 128:384])
    assert torch.equal(torch.cat([part.dequantized() for part in weight.split([100, 156])]), floats)
    with pytest.raises(ModelLoadError, match="cut a block"):
        weight.columns(64, 384)
    with pytest.raises(ModelLoadError, match="scales"):
        Fp8Weight(codes, torch.rand(256, 2), 128)
