"""AWQ, GPTQ and compressed-tensors: weights are the floats they stand for, in their own bits; the rest is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.kernels.quantized import CodedWeight, QuantizedWeight
from quire.models.build import build_decoder, stored_parts
from quire.models.loader.quantization_config import integer_scheme
from quire.models.loader.source import resolve_model
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.models.stored_parts import NOTHING, take
from quire.ops.reference import TorchOps
from quire.parallel.place import Place
from tests.fp8_checkpoints import BLOCKS
from tests.integer_checkpoints import AWQ, GPTQ, Packer, awq, compressed, compressed_config, gptq, write_checkpoint

COMPRESSED = compressed_config()
W8A8 = compressed_config(8, -1, plain=True)

KEPT: dict[str, tuple[Packer, dict[str, Any], int, int]] = {
    "awq": (awq(), AWQ, 4, 32),
    "awq in groups of 64, bfloat16 scales": (awq(64, torch.bfloat16), AWQ | {"group_size": 64}, 4, 64),
    "gptq": (gptq(), GPTQ, 4, 32),
    "gptq without g_idx's order, one group a row": (gptq(group=-1), GPTQ | {"group_size": -1}, 4, 0),
    "gptq of 8 bits": (gptq(8), GPTQ | {"bits": 8}, 8, 32),
    "gptq with zero points": (gptq(symmetric=False), GPTQ | {"sym": False}, 4, 32),
    "gptq of 8 bits with zero points": (gptq(8, symmetric=False), GPTQ | {"bits": 8, "sym": False}, 8, 32),
    "gptq v2 by its other name": (gptq(symmetric=False, stored_less=0), GPTQ | {"format": "gptq_v2"}, 4, 32),
    "gptq v2": (gptq(symmetric=False, stored_less=0), GPTQ | {"checkpoint_format": "gptq_v2"}, 4, 32),
    "compressed": (compressed(), COMPRESSED, 4, 32),
    "compressed of 8 bits": (compressed(8), compressed_config(8), 8, 32),
    "compressed, one scale a row": (compressed(group=-1), compressed_config(group=-1), 4, 0),
    "compressed with zero points": (compressed(symmetric=False), compressed_config(symmetric=False), 4, 32),
    "w8a8": (compressed(8, -1, plain=True), W8A8, 8, 0),
    "w8a8 of older tools": (compressed(8, -1, plain=True), W8A8 | {"quantization_status": "frozen"}, 8, 0),
    "w8a8 with zero points": (compressed(8, -1, False, plain=True), compressed_config(8, -1, False, plain=True), 8, 0),
    "gptq with act-order": (gptq(act_order=True), GPTQ | {"desc_act": True}, 4, 32),
    "gptq with act-order, 8 bits, zero points": (gptq(8, 32, False, True), GPTQ | {"bits": 8, "desc_act": True}, 8, 32),
    "compressed with act-order": (compressed(act_order=True), COMPRESSED, 4, 32),
}
IN_FLOATS: dict[str, tuple[Packer, dict[str, Any]]] = {
    "gptq in groups that no kernel has": (gptq(group=8), GPTQ | {"group_size": 8}),
}


@pytest.mark.parametrize("kind", KEPT)
def test_a_weight_is_the_floats_of_its_format_and_stays_in_its_bits(kind: str, tmp_path: Path) -> None:
    pack, config, bits, group = KEPT[kind]
    expected = write_checkpoint(tmp_path, pack, config)
    source = resolve_model(str(tmp_path))
    found = dict(source.weights())
    assert found.keys() == expected.keys()
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []
    for name, weight in source.stored_weights():
        assert isinstance(weight, QuantizedWeight) == name.endswith("_proj.weight")
        if isinstance(weight, QuantizedWeight):
            assert (weight.bits, weight.group) == (bits, group or expected[name].shape[1])
            assert (weight.offsets is None) == ("zero points" not in kind and "awq" not in kind and "v2" not in kind)
            assert (weight.order is not None) == ("act-order" in kind)
            assert weight.int8_rows == (kind in ("w8a8", "w8a8 of older tools"))


@pytest.mark.parametrize("kind", IN_FLOATS)
def test_groups_that_no_kernel_has_are_read_as_floats(kind: str, tmp_path: Path) -> None:
    pack, config = IN_FLOATS[kind]
    expected = write_checkpoint(tmp_path, pack, config)
    found = dict(resolve_model(str(tmp_path)).stored_weights())
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert isinstance(weight, torch.Tensor) and torch.equal(weight, expected[name])


def test_a_decoder_of_integers_computes_what_one_of_their_floats_computes(tmp_path: Path) -> None:
    expected = write_checkpoint(tmp_path, awq(), AWQ, "qwen2")
    source = resolve_model(str(tmp_path))
    config = {key: value for key, value in source.config.items() if key != "quantization_config"}
    decoder = build_decoder(source.config, source.weights(), TorchOps(), max_model_len=64)
    floats = build_decoder(config, expected.items(), TorchOps(), max_model_len=64)
    for mine, other in zip(decoder.layers, floats.layers, strict=True):
        assert torch.equal(mine.attn.qkv.packed.weight, other.attn.qkv.packed.weight)  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["awq in groups of 64, bfloat16 scales", "gptq with act-order", "w8a8"])
def test_ranks_read_their_parts(kind: str, tmp_path: Path) -> None:
    pack, config = (KEPT | IN_FLOATS)[kind][:2]  # type: ignore[operator]
    expected = write_checkpoint(tmp_path, pack, config)
    source = resolve_model(str(tmp_path))
    spec, seen = read_spec(source.config), set()
    for place in Place.all(2, 2):
        parts = stored_parts(source.config, shard_of(spec, place))
        found = dict(source.weights(parts=parts))
        kept = {name: weight.dequantized() if isinstance(weight, CodedWeight) else weight
                for name, weight in source.stored_weights(parts=parts)}
        assert all(torch.equal(kept[name], found[name]) for name in found)
        for name, tensor in expected.items():
            ranges = parts.ranges(name, tuple(tensor.shape))
            if ranges == NOTHING:
                assert name not in found
            else:
                assert torch.equal(found[name], tensor if ranges is None else take(tensor, ranges)), (place, name)
        seen |= found.keys()
    assert seen == expected.keys()


def test_members_may_lie_in_different_files(tmp_path: Path) -> None:
    expected = write_checkpoint(tmp_path, gptq(), GPTQ)
    stored = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    files = {name: "a.safetensors" if "qzeros" in name else "b.safetensors" for name in stored}
    for file in set(files.values()):
        save_file({name: stored[name] for name in stored if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = dict(resolve_model(str(tmp_path)).weights())
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def _group(**changes: Any) -> dict[str, Any]:
    weights = {**COMPRESSED["config_groups"]["group_0"]["weights"], **changes.pop("weights", {})}
    return COMPRESSED | {"config_groups": {"group_0": {**COMPRESSED["config_groups"]["group_0"], "weights": weights,
                                                       **changes}}}


DYNAMIC = {"num_bits": 8, "dynamic": True}


@pytest.mark.parametrize(
    ("config", "field"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({"quant_method": "bitnet"}, "quant_method"),
        ({"bits": 4}, "quant_method"),
        ("awq", "quantization_config"),
        (AWQ | {"version": "gemv"}, "version"),
        (AWQ | {"bits": 8}, "bits"),
        (AWQ | {"zero_point": False}, "zero_point"),
        (AWQ | {"group_size": 0}, "group_size"),
        (GPTQ | {"bits": 3}, "bits"),
        (GPTQ | {"bits": True}, "bits"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (GPTQ | {"format": "marlin"}, "format"),
        (AWQ | {"checkpoint_format": "gemv"}, "checkpoint_format"),
        (AWQ | {"format": "gemv"}, "format"),
        (AWQ | {"pack_dtype": "int16"}, "pack_dtype"),
        (GPTQ | {"dynamic": {"+:.*": {"bits": 8}}}, "dynamic"),
        (GPTQ | {"pack_dtype": "int16"}, "pack_dtype"),
        (GPTQ | {"desc_act": [1]}, "desc_act"),
        (GPTQ | {"sym": "no"}, "sym"),
        (GPTQ | {"static_groups": "x"}, "static_groups"),
        (COMPRESSED | {"format": "float-quantized"}, "format"),
        (COMPRESSED | {"format": "marlin-24"}, "format"),
        (COMPRESSED | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme.type"),
        (COMPRESSED | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
        (COMPRESSED | {"transform_config": {"config_groups": {"a": {}}}}, "transform_config"),
        (COMPRESSED | {"quantization_status": "calibration"}, "quantization_status"),
        (COMPRESSED | {"config_groups": {}}, "config_groups"),
        (_group(weights={"type": "float"}), "format"),
        (_group(weights={"num_bits": 2}), "config_groups.group_0.weights.num_bits"),
        (_group(weights={"symmetric": "no"}), "config_groups.group_0.weights.symmetric"),
        (_group(weights={"actorder": "banana"}), "config_groups.group_0.weights.actorder"),
        (_group(weights={"actorder": 3}), "config_groups.group_0.weights.actorder"),
        (_group(weights={"type": ["float"]}), "config_groups.group_0.weights.type"),
        (_group(format="marlin-24"), "config_groups.group_0.format"),
        (COMPRESSED | {"config_groups": {"group_0": "W4A16"}}, "config_groups.group_0"),
        (COMPRESSED | {"config_groups": {"group_0": {"targets": ["Linear"]}}}, "config_groups"),
        (_group(weights={"strategy": "block"}), "config_groups.group_0.weights.strategy"),
        (_group(input_activations={"num_bits": 8, "dynamic": False}), "group_0.input_activations.dynamic"),
        (_group(input_activations={"num_bits": 8, "type": "float", "dynamic": True}), "input_activations.type"),
        (_group(input_activations=DYNAMIC | {"symmetric": False}), "input_activations.symmetric"),
        (_group(input_activations=DYNAMIC | {"strategy": "tensor"}), "input_activations.strategy"),
        (_group(output_activations={"num_bits": 8}), "output_activations"),
    ],
)
def test_what_is_not_supported_is_refused_by_the_name_of_its_field(config: Any, field: str) -> None:
    with pytest.raises(UnsupportedModelError, match=field.replace(".", r"\.") + "="):
        integer_scheme({"quantization_config": config})


def test_a_spec_is_refused_for_its_quantization(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, awq(), AWQ | {"version": "gemv"})
    with pytest.raises(UnsupportedModelError, match="version"):
        read_spec(resolve_model(str(tmp_path)).config)
    write_checkpoint(tmp_path, awq(), {"quant_method": "mxfp4"})
    with pytest.raises(UnsupportedModelError, match="quantization_config"):
        read_spec(resolve_model(str(tmp_path)).config)


WRONG = [
    ("qweight", "awq", AWQ, lambda t: t[:, :-1]),
    ("qweight", "awq", AWQ, lambda t: t.to(torch.int64)),
    ("qzeros", "awq", AWQ, lambda t: t[:-1]),
    ("scales", "awq", AWQ, lambda t: t.flatten()),
    ("scales", "awq", AWQ | {"group_size": 64}, lambda t: t),
    ("qweight", "gptq", GPTQ, lambda t: t[:, :-8]),
    ("scales", "gptq", GPTQ | {"bits": 8}, lambda t: t),
    ("g_idx", "gptq", GPTQ, lambda t: t[:-1]),
    ("g_idx", "gptq", GPTQ, lambda t: t + 1),
    ("weight_packed", "compressed", COMPRESSED, lambda t: t[:, :-1]),
    ("weight_packed", "compressed", COMPRESSED, lambda t: t[:-1]),
    ("weight_scale", "compressed", COMPRESSED, lambda t: t[:-1]),
    ("weight_scale", "compressed", COMPRESSED, lambda t: t[:, :-1]),
    ("weight_shape", "compressed", COMPRESSED, lambda t: t[:1]),
    ("weight", "w8a8", W8A8, lambda t: t.float()),
    ("weight", "w8a8", W8A8 | {"quantization_status": "frozen"}, lambda t: t.float()),
    ("weight_scale", "w8a8", W8A8, lambda t: t[:-1]),
]


@pytest.mark.parametrize(("member", "kind", "config", "change"), WRONG)
def test_a_wrong_shape_is_refused_by_the_name_of_its_tensor(
    member: str, kind: str, config: dict[str, Any], change: Any, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, KEPT[kind][0], config)
    stored = load_file(tmp_path / "model.safetensors")
    name = f"model.layers.1.mlp.down_proj.{member}"
    stored[name] = change(stored[name]).contiguous()
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"layers\.\d\.(mlp|self_attn)\.\w+_proj"):
        dict(resolve_model(str(tmp_path)).weights())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("kind", "member"), [
    ("awq in groups of 64, bfloat16 scales", "scales"), ("gptq", "scales"), ("compressed", "weight_scale"),
    ("w8a8", "weight_scale"),
])  # fmt: skip
def test_a_scale_that_is_no_number_is_refused(kind: str, member: str, value: float, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *KEPT[kind][:2])
    name = f"model.layers.1.mlp.down_proj.{member}"
    _change(tmp_path, name, lambda scales: scales.view(-1)[:1].fill_(value))
    with pytest.raises(ModelLoadError, match=f"{name}' has a scale that is infinite or no number"):
        list(resolve_model(str(tmp_path)).stored_weights())


@pytest.mark.parametrize("kind", ["awq in groups of 64, bfloat16 scales", "compressed"])
def test_scales_of_zero_and_below_are_numbers_like_others(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *KEPT[kind][:2])
    before = dict(resolve_model(str(tmp_path)).weights())
    member = "weight_scale" if kind == "compressed" else "scales"
    _change(tmp_path, f"model.layers.1.mlp.down_proj.{member}", lambda scales: scales.mul_(-1)[..., :1].fill_(0))
    after = dict(resolve_model(str(tmp_path)).weights())
    changed = "model.layers.1.mlp.down_proj.weight"
    assert after[changed].eq(-before[changed]).logical_or(after[changed] == 0).all()
    assert 0 < (after[changed] == 0).sum() < after[changed].numel()


def _change(folder: Path, name: str, change: Callable[[torch.Tensor], object]) -> None:
    stored = load_file(folder / "model.safetensors")
    change(stored[name])
    save_file(stored, folder / "model.safetensors")


def test_a_weight_without_its_codes_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, awq(), AWQ)
    stored = load_file(tmp_path / "model.safetensors")
    del stored["model.layers.0.self_attn.k_proj.qweight"]
    save_file(stored, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"k_proj\.scales.*qweight beside it"):
        dict(resolve_model(str(tmp_path)).weights())


def _with_bias(folder: Path, names: list[str], value: float) -> None:
    stored = load_file(folder / "model.safetensors")
    for name in names:
        rows = stored[f"{name}.scales"].shape[1] if f"{name}.scales" in stored else len(stored[f"{name}.weight"])
        stored[f"{name}.bias"] = torch.full((rows,), value, dtype=torch.float16)
    save_file(stored, folder / "model.safetensors")


LAYERS = {"llama": ["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"], "phi3": ["self_attn.qkv_proj"]}


@pytest.mark.parametrize("family", LAYERS)
def test_biases_of_zeros_that_a_tool_added_are_left_out(family: str, tmp_path: Path) -> None:
    """As AutoGPTQ wrote them for models without any: Llama-2's published checkpoints have one in every layer."""
    modules = [f"model.layers.{layer}.{module}" for layer in (0, 1) for module in LAYERS[family]]
    expected = write_checkpoint(tmp_path, gptq(), GPTQ, family)
    _with_bias(tmp_path, modules, 0.0)
    source = resolve_model(str(tmp_path))
    for weights in (source.weights, source.stored_weights):
        decoder = build_decoder(source.config, weights(), TorchOps(), max_model_len=64)
        floats = build_decoder(source.config, expected.items(), TorchOps(), max_model_len=64)
        for mine, other in zip(decoder.layers, floats.layers, strict=True):
            assert torch.equal(mine.attn.qkv.packed.weight, other.attn.qkv.packed.weight)  # type: ignore[attr-defined]
            assert mine.attn.qkv.packed.bias is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("module", "value", "config"), [
    ("model.layers.1.self_attn.q_proj", 0.5, GPTQ),  # it would change what the model computes
    ("model.layers.1.input_layernorm", 0.0, GPTQ),  # a norm of another kind
    ("model.layers.1.self_attn.q_proj", 0.0, None),
])  # fmt: skip
def test_another_bias_that_the_model_does_not_have_is_refused(
    module: str, value: float, config: dict[str, Any] | None, tmp_path: Path
) -> None:
    floats = write_checkpoint(tmp_path, gptq(), GPTQ)
    if config is None:
        save_file({name: tensor.contiguous() for name, tensor in floats.items()}, tmp_path / "model.safetensors")
        said = json.loads((tmp_path / "config.json").read_text())
        del said["quantization_config"]
        (tmp_path / "config.json").write_text(json.dumps(said))
    _with_bias(tmp_path, [module], value)
    source = resolve_model(str(tmp_path))
    with pytest.raises(ModelLoadError, match=rf"{module}\.bias"):
        build_decoder(source.config, source.stored_weights(), TorchOps(), max_model_len=64)


def test_ranks_leave_out_biases_of_zeros(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, gptq(), GPTQ)
    names = [f"model.layers.0.{module}" for module in LAYERS["llama"]]
    _with_bias(tmp_path, names, 0.0)
    source = resolve_model(str(tmp_path))
    shard = shard_of(read_spec(source.config), Place.all(1, 2)[1])
    parts = stored_parts(source.config, shard)
    build_decoder(source.config, source.stored_weights(parts=parts), TorchOps(), max_model_len=64, shard=shard)


@pytest.mark.parametrize("method", [AWQ, GPTQ, COMPRESSED, BLOCKS, {"quant_method": "mxfp4"}])
@pytest.mark.parametrize(("field", "value", "named"), [
    ("kv_cache_scheme", {"num_bits": 4, "type": "float"}, "kv_cache_scheme.num_bits"),
    ("kv_cache_scheme", "static", "kv_cache_scheme"),
    ("dynamic", {"-:.*down.*": {}}, "dynamic"),
    ("rotation", "hadamard", "rotation"),
    ("transform_config", {"config_groups": {"a": {}}}, "transform_config"),
])  # fmt: skip
def test_what_changes_results_is_refused_whatever_the_method(
    method: dict[str, Any], field: str, value: Any, named: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=named.replace(".", r"\.") + "="):
        integer_scheme({"quantization_config": method | {field: value}})


@pytest.mark.parametrize(("pack", "config", "member"), [
    (gptq(act_order=True), GPTQ | {"desc_act": True}, "g_idx"),
    (compressed(act_order=True), _group(weights={"actorder": "group"}), "weight_g_idx"),
])  # fmt: skip
def test_act_order_without_the_group_of_each_column_is_refused(
    pack: Packer, config: dict[str, Any], member: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, pack, config)
    list(resolve_model(str(tmp_path)).stored_weights())
    stored = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in stored.items() if not name.endswith("g_idx")},
              tmp_path / "model.safetensors")
    field = "desc_act" if "desc_act" in config else "actorder"
    with pytest.raises(ModelLoadError, match=rf"act-order \({field}\).*_proj has no {member}"):
        list(resolve_model(str(tmp_path)).stored_weights())


@pytest.mark.parametrize("kind", ["compressed with zero points", "w8a8 with zero points"])
def test_zero_points_that_a_file_lost_are_missed(kind: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *KEPT[kind][:2])
    stored = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in stored.items() if not name.endswith("weight_zero_point")},
              tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"symmetric=false.*_proj has no weight_zero_point"):
        list(resolve_model(str(tmp_path)).stored_weights())


@pytest.mark.parametrize(("pack", "config"), [
    (gptq(), GPTQ | {"desc_act": True, "static_groups": True}),  # columns are quantized in another order, no more
    (gptq(group=-1), GPTQ | {"desc_act": True, "group_size": -1}),
    (compressed(), _group(weights={"actorder": "weight"})),
])  # fmt: skip
def test_an_order_that_leaves_groups_together_needs_no_group_of_each_column(
    pack: Packer, config: dict[str, Any], tmp_path: Path
) -> None:
    expected = write_checkpoint(tmp_path, pack, config)
    stored = load_file(tmp_path / "model.safetensors")
    save_file({name: tensor for name, tensor in stored.items() if not name.endswith("g_idx")},
              tmp_path / "model.safetensors")
    found = dict(resolve_model(str(tmp_path)).weights())
    assert all(torch.equal(found[name], want) for name, want in expected.items())
