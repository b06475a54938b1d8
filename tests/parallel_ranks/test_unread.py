"""Weights that stay in their file until they are packed are packed as those that were read before."""

from __future__ import annotations

import json
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.errors import ModelLoadError
from quire.kernels.quantized import CodedWeight, Rounding, StoredWeight
from quire.kernels.unread import UnreadRows, UnreadWeight
from quire.models.build import build_decoder, dummy_weights, stored_parts, undrawn_weights
from quire.models.decoder import Decoder
from quire.models.loader.source import ModelSource, resolve_model
from quire.models.registry import family_of, read_spec
from quire.models.rotary_rows import half_split
from quire.models.shard import shard_of
from quire.models.stored_parts import StoredParts
from quire.ops.cpu import CpuOps
from quire.parallel.place import Place
from quire.parallel.shared import SharedGroup, shared_group_bytes
from tests.checkpoints import FAMILY_NAMES, config_of, make_checkpoint, make_model, weights_of
from tests.integer_checkpoints import write_checkpoint
from tests.models.loader.test_members import KINDS, ORDERED, SIZES
from tests.models.loader.tiny_gguf import tiny_model, write_gguf
from tests.mxfp4_checkpoints import write_mxfp4

Weights = Callable[[StoredParts | None], Iterator[tuple[str, StoredWeight]]]
ROUNDINGS = {"floats": None, "file": Rounding(None), "int8": Rounding(8), "int4": Rounding(4, zero_points=True)}
PLACES = [Place(), Place.all(2, 1)[1], Place.all(1, 2)[1]]


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every matrix is large, and read in many pieces."""
    for name, value in (("models.loader.safetensors.READ_BYTES", 128), ("models.loader.integer_weights.LARGE", 1),
                        ("models.loader.integer_weights._NUMBERS_AT_ONCE", 1), ("kernels.unread.LARGE", 1),
                        ("kernels.unread.NUMBERS_AT_ONCE", 1), ("ops.cpu_integer._LARGE", 1),
                        ("ops.cpu_panels._NUMBERS_AT_ONCE", 1), ("models.build.LARGE_BYTES", 0),
                        ("models.random_rows.AT_ONCE", 777)):
        monkeypatch.setattr(f"quire.{name}", value)


def packed(config: dict[str, Any], weights: Weights, place: Place, rounding: Rounding | None) -> list[Any]:
    """Of every linear layer of a rank: its form, its bytes, and its numbers."""
    shard = shard_of(read_spec(config), place)
    group = None
    if place.tensor_size > 1:
        group = SharedGroup(mmap.mmap(-1, shared_group_bytes(2)), place.tensor_rank, 2)
    ops = CpuOps(num_threads=1, rounding=rounding)
    parts = None if shard.is_whole else stored_parts(config, shard)
    decoder = build_decoder(config, weights(parts), ops, shard=shard, ranks=group, dtype=None)
    held = [linear.packed for linear in linears(decoder) if linear.is_loaded]
    return [(each.format, each.nbytes, ops.embed(torch.arange(each.out_features), each)) for each in held]


def linears(decoder: Decoder) -> list[Any]:
    ends = [each for each in (decoder.embed, decoder.head, decoder.positions) if each is not None]
    return [*ends, *(each for layer in decoder.layers for each in (*layer.attn.linears, *layer.mlp.all_linears))]


def check(config: dict[str, Any], read: Weights, left: Weights, rounding: str) -> None:
    for place in PLACES:
        mine, other = (packed(config, weights, place, ROUNDINGS[rounding]) for weights in (left, read))
        assert len(mine) == len(other) > 4
        for (form, count, numbers), (form_read, count_read, expected) in zip(mine, other, strict=True):
            assert (form, count) == (form_read, count_read)
            assert torch.equal(numbers, expected)


def check_source(source: ModelSource, rounding: str) -> None:
    check(source.config, source.stored_weights, source.unread_weights, rounding)


def unread(source: ModelSource) -> set[str]:
    return {name for name, weight in source.unread_weights() if isinstance(weight, UnreadRows | UnreadWeight)}


def matrices(source: ModelSource) -> set[str]:
    """Names of what is large in a real model."""
    found = source.stored_weights()
    return {name for name, weight in found if weight.dim() > 1 and "norm" not in name and "bias" not in name}


@pytest.mark.parametrize(("family", "rounding"), [
    *((family, "floats") for family in FAMILY_NAMES),
    *((family, rounding) for family in ("llama", "phi3", "gpt2", "glm") for rounding in ("file", "int8", "int4"))])
def test_floats(family: str, rounding: str, tiny: None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, shards=3)
    source = resolve_model(str(tmp_path))
    assert unread(source) >= matrices(source)
    check_source(source, rounding)


@pytest.mark.parametrize("rounding", ["floats", "int8"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_merged_experts(family: str, rounding: str, tiny: None, tmp_path: Path) -> None:
    model = make_model(family)
    stored = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights_of(model, merged=True)}
    assert any(tensor.dim() == 3 for tensor in stored.values())
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))
    source = resolve_model(str(tmp_path))
    assert unread(source) >= {name for name, tensor in stored.items() if tensor.dim() == 3}
    check_source(source, rounding)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_mxfp4(rounding: str, tiny: None, tmp_path: Path) -> None:
    write_mxfp4(tmp_path, make_model("gpt_oss", hidden_size=64, intermediate_size=96))
    source = resolve_model(str(tmp_path))
    assert {name for name in matrices(source) if "experts" in name} <= unread(source)
    check_source(source, rounding)


@pytest.mark.parametrize(("family", "rounding"), [("llama", "floats"), ("llama", "file"), ("phi3", "file")])
@pytest.mark.parametrize("kind", [*KINDS, *(f"act-order {kind}" for kind in ORDERED)])
def test_codes_of_safetensors(kind: str, family: str, rounding: str, tiny: None, tmp_path: Path) -> None:
    pack, quantization = KINDS[kind] if kind in KINDS else ORDERED[kind.removeprefix("act-order ")]
    write_checkpoint(tmp_path, pack, quantization, family, **SIZES[family])
    source = resolve_model(str(tmp_path))
    assert unread(source) >= matrices(source)
    check_source(source, rounding)


@pytest.mark.parametrize("rounding", ["floats", "file"])
@pytest.mark.parametrize("quant", ["F32", "F16", "Q8_0", "Q5_1"])
@pytest.mark.parametrize("arch", ["llama", "phi3", "gpt2"])
def test_gguf(arch: str, quant: str, rounding: str, tiny: None, tmp_path: Path) -> None:
    """Llama's converter changes the order of rows; GPT-2's matrices are stored turned."""
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", arch, tiny_model(arch), quant)))
    kinds = {name: type(weight) for name, weight in source.unread_weights()}
    assert (UnreadWeight in kinds.values()) == quant.startswith("Q")
    if arch != "gpt2":
        assert {name for name, kind in kinds.items() if issubclass(kind, UnreadRows | UnreadWeight)} >= matrices(source)
    check_source(source, rounding)


@pytest.mark.parametrize("quant", ["Q4_K", "Q6_K"])
@pytest.mark.parametrize("width", [256, 512])
def test_k_quants(quant: str, width: int, tiny: None, tmp_path: Path) -> None:
    """Of 512 columns two ranks have whole blocks each; a block of 256 is cut, and then read before it is packed."""
    model = tiny_model("llama", hidden_size=256, intermediate_size=width, head_dim=64)
    source = resolve_model(str(write_gguf(tmp_path / "m.gguf", "llama", model, quant)))
    check_source(source, "file")
    parts = stored_parts(source.config, shard_of(read_spec(source.config), Place.all(2, 1)[1]))
    down = dict(source.unread_weights(parts))["model.layers.0.mlp.down_proj.weight"]
    assert isinstance(down, UnreadWeight) == (width == 512)


@pytest.mark.parametrize("rounding", ["floats", "int4"])
@pytest.mark.parametrize("kept", [1 << 30, 0])
@pytest.mark.parametrize("family", ["llama", "phi3", "mixtral", "gpt_oss"])
def test_random_weights(
    family: str, kept: int, rounding: str, tiny: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What waits for another part is kept, or drawn once more."""
    monkeypatch.setattr("quire.models.random_rows.KEPT_BYTES", kept)
    config = config_of(make_model(family)) | {"torch_dtype": "bfloat16"}
    assert any(isinstance(weight, UnreadRows) for _, weight in undrawn_weights(config, 3))
    check(config, lambda parts: dummy_weights(config, 3, parts), lambda parts: undrawn_weights(config, 3, parts),
          rounding)


def test_random_rows_can_be_asked_for_in_any_order(tiny: None) -> None:
    config = config_of(make_model("llama"))
    expected, left = dict(dummy_weights(config, 3)), dict(undrawn_weights(config, 3))
    for name, weight in left.items():
        if isinstance(weight, CodedWeight):
            rows = weight.shape[0]
            for start, stop in ((rows // 2, rows), (0, 3), (rows // 3, rows // 3), (1, rows)):
                found = weight.rows(slice(start, stop)).dequantized()
                assert torch.equal(found, expected[name][start:stop]), (name, start, stop)


def test_a_file_that_is_cut_while_it_is_packed_is_named(tiny: None, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    path = tmp_path / "model.safetensors"
    left = dict(resolve_model(str(tmp_path)).unread_weights())
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match="truncated or corrupted"):
        left["model.embed_tokens.weight"].dequantized()


def load(source: ModelSource) -> None:
    build_decoder(source.config, source.unread_weights(), CpuOps(num_threads=1, rounding=Rounding(None)), dtype=None)


def test_large_blocks_of_another_type_are_refused(tiny: None, tmp_path: Path) -> None:
    write_mxfp4(tmp_path, make_model("gpt_oss", hidden_size=64, intermediate_size=96))
    path, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj_blocks"
    stored = load_file(path)
    save_file(stored | {name: stored[name].half()}, path)
    with pytest.raises(ModelLoadError, match="down_proj: MXFP4 blocks and scales"):
        load(resolve_model(str(tmp_path)))


@pytest.mark.parametrize(("family", "kind"), [
    ("cohere", "floats"), ("glm4", "floats"), ("deepseek_v3", "floats"), ("cohere", "awq"), ("cohere", "w8a8"),
    ("cohere", "fp8: blocks"), ("cohere", "gptq in floats")])
def test_features_in_another_order_stay_in_their_file(family: str, kind: str, tiny: None, tmp_path: Path) -> None:
    """Where rotated pairs are interleaved: the rows of a head are read when they are packed."""
    if kind == "floats":
        make_checkpoint(tmp_path, family)
    else:
        write_checkpoint(tmp_path, *KINDS[kind], family, **SIZES["llama"])
    source = resolve_model(str(tmp_path))
    names, spec, turned = family_of(source.config).names, read_spec(source.config), 0
    stored = dict(source.stored_weights())
    for source_name, left in source.unread_weights():
        for name in names.targets(source_name):
            found, read = half_split(name, left, spec), stored[source_name]
            if found is left:
                continue
            assert isinstance(found, UnreadRows | UnreadWeight) or "weight" not in name or "norm" in name
            expected, rows = floats(half_split(name, read, spec)), left.shape[0]
            assert torch.equal(floats(found), expected)
            for start, stop in ((0, 1), (3, rows - 2), (rows - 5, rows)):
                if not isinstance(found, torch.Tensor):
                    assert torch.equal(floats(found.rows(slice(start, stop))), expected[start:stop])
            turned += 1
    assert turned >= 4
    check_source(source, "file")


def floats(weight: StoredWeight) -> torch.Tensor:
    return weight.dequantized() if isinstance(weight, CodedWeight) else weight


def change(path: Path, name: str, to: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """One tensor of a file; None leaves it out."""
    stored = {each: tensor.clone() for each, tensor in load_file(path).items()}
    changed = to(stored.pop(name))
    path.unlink()
    save_file(stored if changed is None else stored | {name: changed}, path)


@pytest.mark.parametrize("read_bytes", [128, 16 << 20])
@pytest.mark.parametrize(("kind", "name", "to"), [
    ("w8a8", "model.layers.0.mlp.down_proj.weight_scale", lambda tensor: None),
    ("fp8: blocks", "model.layers.0.mlp.down_proj.weight_scale_inv", lambda tensor: None),
    ("awq", "model.embed_tokens.weight", lambda tensor: tensor.to(torch.int8)),
    ("fp8: modelopt", "lm_head.weight", lambda tensor: tensor.to(torch.float8_e4m3fn))])
def test_codes_without_scales_are_refused(
    kind: str, name: str, to: Callable[[torch.Tensor], torch.Tensor | None], read_bytes: int, tiny: None,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("quire.models.loader.safetensors.READ_BYTES", read_bytes)
    write_checkpoint(tmp_path, *KINDS[kind], **SIZES["llama"])
    change(tmp_path / "model.safetensors", name, to)
    source, weight = resolve_model(str(tmp_path)), name.partition("_scale")[0]
    for weights in (source.unread_weights(), source.stored_weights()):
        with pytest.raises(ModelLoadError, match=f"{weight}.*has type.*or have scales beside them"):
            build_decoder(source.config, weights, CpuOps(num_threads=1), dtype=None)


@pytest.mark.parametrize("to", [lambda tensor: tensor[:10], lambda tensor: tensor[:, :10], torch.Tensor.half])
def test_a_file_that_is_replaced_while_it_is_packed_is_named(
    to: Callable[[torch.Tensor], torch.Tensor], tiny: None, tmp_path: Path
) -> None:
    make_checkpoint(tmp_path, "llama")
    source, name = resolve_model(str(tmp_path)), "model.layers.1.mlp.gate_proj.weight"

    def weights() -> Iterator[tuple[str, StoredWeight]]:
        for source_name, weight in source.unread_weights():
            yield source_name, weight
            if source_name == name:
                change(tmp_path / "model.safetensors", name, lambda tensor: to(tensor).contiguous())

    with pytest.raises(ModelLoadError, match=r"model.safetensors was replaced while .*gate_proj.* was read"):
        build_decoder(source.config, weights(), CpuOps(num_threads=1), dtype=None)


def test_experts_are_read_one_after_the_other(
    tiny: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("gpt_oss")
    save_file({name: tensor.contiguous() for name, tensor in weights_of(model)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config_of(model)))
    source = resolve_model(str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    experts = stored["model.layers.0.mlp.experts.down_proj"].shape
    counts: list[int] = []
    read = UnreadRows.whole

    def counted(self: UnreadRows) -> StoredWeight:
        counts.append(self.shape[0])
        return read(self)

    monkeypatch.setattr(UnreadRows, "whole", counted)
    build_decoder(source.config, source.unread_weights(), CpuOps(num_threads=1), dtype=None)
    largest = max(tensor.shape[0] for tensor in stored.values() if tensor.dim() == 2)
    assert experts[1] in counts and max(counts) <= max(largest, experts[1]) < experts[0] * experts[1]
