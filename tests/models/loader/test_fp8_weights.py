"""fp8 checkpoints: weights are the floats they stand for, in their own bits; what is not supported is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.kernels.quantized import Fp8Weight, joined_fp8
from quire.kernels.types import pair_cache
from quire.models.build import build_decoder
from quire.models.kv_scales import KVScales
from quire.models.loader.fp8_config import fp8_scheme
from quire.models.loader.source import resolve_model
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.ops.reference import TorchOps
from quire.parallel.place import Place
from tests.fp8_checkpoints import BLOCKS, KINDS, MODELOPT, TRANSFORMERS, compressed_fp8, fp8, static
from tests.integer_checkpoints import write_checkpoint
from tests.paged_driver import PagedDriver

pytest.importorskip("triton")
from quire.ops.triton import TritonOps

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


def floats(weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    return {"weight": weight}, weight


KV_SCHEME = {"num_bits": 8, "type": "float", "dynamic": False, "symmetric": True, "strategy": "tensor"}
NO_WEIGHTS: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "dense", "kv_cache_scheme": KV_SCHEME}
ONLY_KV: list[tuple[dict[str, Any], str]] = [
    (NO_WEIGHTS, "{}_scale"),
    (NO_WEIGHTS | {"config_groups": {}}, "{}_scale"),
    (NO_WEIGHTS | {"config_groups": {"group_0": {"targets": [], "weights": None}}}, "{}_scale"),
    (MODELOPT | {"quant_algo": None, "kv_cache_quant_algo": "FP8"}, "{}_proj.{}_scale"),
    (MODELOPT | {"quant_algo": None, "kv_cache_scheme": KV_SCHEME}, "{}_proj.{}_scale"),
]
"""Checkpoints that quantize nothing else."""


@pytest.mark.parametrize("config", [config for config, _ in ONLY_KV])
def test_where_keys_and_values_alone_are_quantized_weights_are_floats(config: dict[str, Any], tmp_path: Path) -> None:
    expected = write_checkpoint(tmp_path, floats, config)
    source = resolve_model(str(tmp_path))
    assert not source.stores_codes and source.stored_forms() == {}
    for weights in (source.weights, source.stored_weights, source.unread_weights):
        found = dict(weights())
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], want) for name, want in expected.items())  # type: ignore[arg-type]


def test_fp8_weights_that_the_config_does_not_know_of_are_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, fp8(), NO_WEIGHTS)
    with pytest.raises(ModelLoadError, match=r"_proj\.weight.*float8_e4m3fn"):
        list(resolve_model(str(tmp_path)).stored_weights())


@pytest.mark.parametrize(("config", "part"), [
    (compressed_fp8() | {"kv_cache_scheme": KV_SCHEME}, "{}_scale"),
    (MODELOPT | {"kv_cache_quant_algo": "FP8"}, "{}_proj.{}_scale"),
    *ONLY_KV,
])  # fmt: skip
def test_scales_of_keys_and_values_come_to_the_fp8_caches_of_their_layers_and_ranks(
    config: dict[str, Any], part: str, tmp_path: Path
) -> None:
    pack = static(fp8("tensor")) if config["quant_method"] == "modelopt" else fp8()
    write_checkpoint(tmp_path, floats if (config, part) in ONLY_KV else pack, config)
    stored = load_file(tmp_path / "model.safetensors")
    heads = json.loads((tmp_path / "config.json").read_text())["num_key_value_heads"]
    for_layer = "model.layers.1.self_attn."
    stored[for_layer + part.format("k", "k")] = torch.tensor(0.25)
    stored[for_layer + part.format("v", "v")] = torch.arange(1.0, heads + 1).view(heads, 1, 1)
    save_file(stored, tmp_path / "model.safetensors")
    source = resolve_model(str(tmp_path))
    for kv_dtype in (torch.float8_e4m3fn, None):
        ops = TritonOps("cpu", torch.bfloat16, kv_dtype=kv_dtype)
        caches = build_decoder(source.config, source.stored_weights(), ops).allocate_caches([2], 16)
        assert caches[0].scales is None and (caches[1].scales is None) == (kv_dtype is None)
        if caches[1].scales is not None:
            assert caches[1].scales.tolist() == [[0.25] * heads, [float(head + 1) for head in range(heads)]]
    scales = KVScales(shard_of(read_spec(source.config), Place.all(2, 1)[1]))
    scales.receive(1, "v", torch.arange(1.0, heads + 1), "v_scale")
    cache = pair_cache(*(torch.zeros(1, heads // 2, 16, 8, dtype=torch.float8_e4m3fn) for _ in range(2)), 16)
    scales.give_to(cache, 1)
    assert cache.scales is not None and cache.scales[1].tolist() == list(range(heads // 2 + 1, heads + 1))
    with pytest.raises(ModelLoadError, match="'here' is no scale of"):
        scales.receive(1, "k", torch.zeros(1), "here")


def test_modelopts_own_file_beside_the_config_counts(tmp_path: Path) -> None:
    """As its exporter writes it where config.json says nothing of quantization."""
    write_checkpoint(tmp_path, *KINDS["modelopt"])
    place, config = tmp_path / "config.json", json.loads((tmp_path / "config.json").read_text())
    want = resolve_model(str(tmp_path)).config
    del config["quantization_config"]
    place.write_text(json.dumps(config))
    beside = tmp_path / "hf_quant_config.json"
    said = {"quant_algo": "FP8", "kv_cache_quant_algo": None, "exclude_modules": ["lm_head"]}
    beside.write_text(json.dumps({"producer": {"name": "modelopt", "version": "0.29.0"}, "quantization": said}))
    assert fp8_scheme(resolve_model(str(tmp_path)).config) == fp8_scheme(want) is not None
    beside.write_text(json.dumps({"quantization": {**said, "quant_algo": "NVFP4"}}))
    with pytest.raises(UnsupportedModelError, match="quant_algo='NVFP4'"):
        fp8_scheme(resolve_model(str(tmp_path)).config)
    beside.write_text("{}")
    with pytest.raises(ModelLoadError, match=r"hf_quant_config\.json does not say its 'quantization'"):
        resolve_model(str(tmp_path))


def test_a_file_of_older_tools_says_frozen_and_is_read_as_its_tensors_are(tmp_path: Path) -> None:
    pack, config = KINDS["compressed, static"]
    expected = write_checkpoint(tmp_path, pack, config | {"quantization_status": "frozen"})
    found = dict(resolve_model(str(tmp_path)).stored_weights())[f"{PROJECTION}.weight"]
    assert isinstance(found, Fp8Weight) and torch.equal(found.dequantized(), expected[f"{PROJECTION}.weight"])
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{PROJECTION}.weight"] = expected[f"{PROJECTION}.weight"].contiguous()  # frozen, but never compressed
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{PROJECTION}.weight.*fp8"):
        list(resolve_model(str(tmp_path)).stored_weights())


CHANGED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (BLOCKS, {"weight_block_size": [64, 128]}, "weight_block_size"),
    (BLOCKS, {"activation_scheme": "static"}, "activation_scheme"),
    (BLOCKS, {"scale_fmt": "banana"}, "scale_fmt"),
    (TRANSFORMERS, {"activation_scheme": ["static"]}, "activation_scheme"),
    (MODELOPT, {"quant_algo": None}, "quant_algo"),
    (NO_WEIGHTS, {"kv_cache_scheme": KV_SCHEME | {"num_bits": 4}}, "kv_cache_scheme.num_bits"),
    (BLOCKS, {"fmt": "e5m2"}, "fmt"),
    (MODELOPT, {"quant_algo": "NVFP4"}, "quant_algo"),
    (MODELOPT, {"kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "kv_cache_scheme.num_bits"),
    (MODELOPT, {"kv_cache_quant_algo": "NVFP4"}, "kv_cache_quant_algo"),
    (compressed_fp8(), {"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "kv_cache_scheme.type"),
    (compressed_fp8(), {"kv_cache_scheme": KV_SCHEME | {"dynamic": True}}, "kv_cache_scheme.dynamic"),
    (compressed_fp8(), {"format": "pack-quantized"}, "format"),
    (compressed_fp8(), {"quantization_status": "initialized"}, "quantization_status"),
]


@pytest.mark.parametrize(("config", "change", "field"), CHANGED)
def test_what_is_not_supported_is_refused_by_its_field(
    config: dict[str, Any], change: dict[str, Any], field: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=f"quantization_config.{field}="):
        fp8_scheme({"quantization_config": config | change})


@pytest.mark.parametrize(("part", "field", "value"), [
    ("weights", "num_bits", 4), ("weights", "strategy", "group"), ("input_activations", "strategy", "tensor"),
    ("weights", "symmetric", False), ("weights", "symmetric", "no"), ("input_activations", "group_size", -5),
])  # fmt: skip
def test_a_group_of_layers_is_refused_by_its_field(part: str, field: str, value: Any) -> None:
    config = json.loads(json.dumps(compressed_fp8()))
    config["config_groups"]["group_0"][part][field] = value
    with pytest.raises(UnsupportedModelError, match=f"group_0.{part}.{field}="):
        fp8_scheme({"quantization_config": config})


@pytest.mark.parametrize(("group", "field"), [
    ("x", ""), (None, ""), ({"weights": "x"}, ".weights"),
    ({"weights": None, "input_activations": {"num_bits": 8}}, ".input_activations"),  # quantized attention
    ({"weights": {"type": "int", "num_bits": 4}, "format": "pack-quantized"}, ".weights.type"),
    ({"weights": {"type": "float"}, "format": "pack-quantized"}, ".format"),
])  # fmt: skip
def test_a_second_group_is_refused_by_what_is_wrong_with_it(group: Any, field: str) -> None:
    config = json.loads(json.dumps(compressed_fp8() | {"format": "mixed-precision"}))
    config["config_groups"]["group_0"]["format"] = "float-quantized"
    config["config_groups"]["group_1"] = group
    with pytest.raises(UnsupportedModelError, match=f"quantization_config.config_groups.group_1{field}="):
        fp8_scheme({"quantization_config": config})


def test_a_group_that_asks_for_nothing_changes_nothing() -> None:
    config = compressed_fp8()
    more = {**config["config_groups"], "group_1": {"targets": ["re:.*gate"]}}
    want = fp8_scheme({"quantization_config": config})
    assert fp8_scheme({"quantization_config": config | {"config_groups": more}}) == want is not None


@pytest.mark.parametrize("value", [0.0, -0.5, float("nan"), float("inf")])
@pytest.mark.parametrize(("kind", "member"), [
    ("compressed, a scale a row", "weight_scale"), ("blocks", "weight_scale_inv"), ("modelopt", "input_scale"),
    ("transformers, static", "activation_scale"),
])  # fmt: skip
def test_a_scale_that_is_no_positive_number_is_refused(kind: str, member: str, value: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *KINDS[kind])
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{PROJECTION}.{member}"].view(-1)[0] = value
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=f"{PROJECTION}.{member}' has a scale that is zero"):
        list(resolve_model(str(tmp_path)).stored_weights())


def test_scales_that_are_exponents_are_refused_for_their_type(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *KINDS["blocks"])
    stored = load_file(tmp_path / "model.safetensors")
    stored[f"{PROJECTION}.weight_scale_inv"] = stored[f"{PROJECTION}.weight_scale_inv"].to(torch.float8_e8m0fnu)
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"scales of type torch\.float8_e8m0fnu are not supported"):
        list(resolve_model(str(tmp_path)).stored_weights())


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
    assert weight.finer([(0, 128), (256, 384)]) is weight
    finer = weight.finer([(0, 64), (96, 384)])
    assert finer.group == 32 and torch.equal(finer.columns(96, 384).dequantized(), floats[:, 96:])
    assert torch.equal(joined_fp8([weight.columns(0, 128), weight.columns(256, 384)], 1).dequantized(),
                       torch.cat([floats[:, :128], floats[:, 256:]], 1))
    alike = Fp8Weight(codes[:, :256], torch.rand(256, 2), 128)
    assert torch.equal(joined_fp8([alike, alike], 1).dequantized(), torch.cat([alike.dequantized()] * 2, 1))
    one = Fp8Weight(codes, torch.rand(256, 1), 384)
    assert torch.equal(joined_fp8([one.columns(0, 64), one.columns(96, 384)], 1).dequantized(),
                       torch.cat([one.dequantized()[:, :64], one.dequantized()[:, 96:]], 1))
    with pytest.raises(ModelLoadError, match="cut a block"):
        weight.columns(64, 384)
    with pytest.raises(ModelLoadError, match="scales"):
        Fp8Weight(codes, torch.rand(256, 2), 128)
