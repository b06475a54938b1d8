"""`quire inspect` counts the bytes that an engine's decoder has on a GPU, in every format that it shows."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

pytest.importorskip("triton")

from quire.bench.checkpoints.fp8_layouts import compressed_fp8, fp8
from quire.kernels.quantized import Rounding
from quire.models.build import build_decoder, dummy_weights
from quire.models.loader.source import resolve_model
from quire.ops.triton import TritonOps
from tests.checkpoints import config_of, make_checkpoint, make_model, weights_of
from tests.cli.conftest import Done
from tests.integer_checkpoints import (
    GPTQ,
    Packer,
    compressed,
    compressed_config,
    gptq,
    write_checkpoint,
)
from tests.models.loader.tiny_gguf import tiny_model, write_gguf
from tests.mxfp4_checkpoints import write_mxfp4

BF16 = torch.bfloat16
ROUNDINGS = {"none": None, "file": Rounding(None), "fp8": Rounding(None, fp8=True), "int8": Rounding(8, 0),
             "int4": Rounding(4, 128, True)}
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4,
                         "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 64}


def inspected(path: Path, inside: Callable[..., Done], *words: str) -> dict[str, Any]:
    done = inside("inspect", str(path), "--json", *words)
    assert done.code == 0, done.err
    facts: dict[str, Any] = json.loads(done.out)["on_gpu"]
    return facts


def held(path: Path, form: str, load_format: str = "auto") -> int:
    """Bytes of a decoder on a GPU: of its linear layers and tables as they are packed, and of numbers beside them."""
    source, ops = resolve_model(str(path), load_format=load_format), TritonOps("cpu", BF16, rounding=ROUNDINGS[form])
    if source.is_dummy:
        weights: Any = dummy_weights(source.config)
    else:
        weights = source.weights(None) if form == "none" else source.stored_weights()
    decoder = build_decoder(source.config, weights, ops, max_model_len=64, dtype=BF16)
    beside = [shape for name, shape in decoder.spec.parameters().items() if "norm" in name or "sinks" in name]
    return decoder.weight_bytes + 2 * sum(math.prod(shape) for shape in beside)


def agree(path: Path, inside: Callable[..., Done]) -> dict[str, int]:
    """What is said of each format, which is what is held. Formats of which nothing is said round nothing."""
    said: dict[str, int] = inspected(path, inside)["weight_bytes"]
    assert {form: held(path, form) for form in said} == said
    assert {held(path, form) for form in ROUNDINGS.keys() - said.keys()} <= {said.get("file", said["none"])}
    return said


def write_attention(folder: Path, excluded: dict[str, Any]) -> None:
    """A checkpoint that stores the projections of attention in fp8, and all others as floats."""
    model, pack, stored = make_model("qwen3", **SIZES), fp8(), {}
    for name, weight in weights_of(model):
        packs = name.endswith("_proj.weight") and "self_attn" in name
        members = pack(weight.detach())[0] if packs else {"weight": weight.detach()}
        stored.update({f"{name.removesuffix('weight')}{member}": each for member, each in members.items()})
    store(folder, config_of(model) | {"quantization_config": compressed_fp8() | excluded}, stored)


def store(folder: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    save_file({name: weight.contiguous() for name, weight in weights.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(("entries", "formats"), [
    ({"ignore": ["re:.*mlp.*", "lm_head"]}, ["none", "file"]),
    ({"modules_to_not_convert": ["model.layers.*.mlp"]}, ["none", "file"]),
    ({"ignore": ["lm_head"], "exclude_modules": ["model.layers.1.mlp", "gate_proj"]},
     ["none", "file", "fp8", "int8", "int4"]),
    ({"ignore": ["lm_head"]}, ["none", "file", "fp8", "int8", "int4"]),
])  # fmt: skip
def test_excluded_floats_are_counted_as_floats(
    entries: dict[str, Any], formats: list[str], tmp_path: Path, inside: Callable[..., Done]
) -> None:
    write_attention(tmp_path, entries)
    assert list(agree(tmp_path, inside)) == formats


def test_excluded_attention_beside_experts_in_mxfp4_is_counted_as_floats(
    tmp_path: Path, inside: Callable[..., Done]
) -> None:
    """As gpt-oss is published: nothing is left to round."""
    write_mxfp4(tmp_path, make_model("gpt_oss", hidden_size=128, intermediate_size=128, head_dim=64,
                                     num_attention_heads=4, num_key_value_heads=2))
    assert list(agree(tmp_path, inside)) == list(ROUNDINGS)
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["modules_to_not_convert"] = [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert list(agree(tmp_path, inside)) == ["none", "file"]
    ranks = inspected(tmp_path, inside, "--tensor-parallel-size", "2")["ranks"]
    assert all(list(rank["weight_bytes"]) == ["none", "file"] for rank in ranks)


@pytest.mark.parametrize(("family", "entry"), [
    ("qwen3_moe", "model.layers.1.mlp.experts"),
    ("qwen3_moe", r"re:.*experts\.\d+\.(up|gate|down)_proj"),
    ("qwen3_moe", r"re:.*experts\.down_proj"),
    ("qwen3_moe", r"re:.*experts\.1\.gate_proj"),
    ("gpt_oss", "model.layers.1.mlp.experts"),
    ("gpt_oss", r"re:.*experts\.\d+\.(up|gate|down)_proj"),
])  # fmt: skip
def test_excluded_experts_are_counted_as_floats(
    family: str, entry: str, tmp_path: Path, inside: Callable[..., Done]
) -> None:
    """An entry is held against the names that the checkpoint has: one for each expert, or (gpt-oss) one for all."""
    widths = {"intermediate_size": 128} | ({} if family == "gpt_oss" else {"moe_intermediate_size": 128})
    model = make_model(family, hidden_size=128, head_dim=64, num_attention_heads=4, num_key_value_heads=2, **widths)
    method = "mxfp4" if family == "gpt_oss" else "fp8"
    config = config_of(model) | {"quantization_config": {"quant_method": method, "modules_to_not_convert": [entry]}}
    store(tmp_path, config, dict(weights_of(model)))
    for load_format in ("auto", "dummy"):
        said = inspected(tmp_path, inside, "--load-format", load_format)["weight_bytes"]
        assert {form: held(tmp_path, form, load_format) for form in said} == said


@pytest.mark.parametrize("said", ["lm_head", [3], ["re:("]])
def test_exclusions_that_an_engine_refuses_are_refused(said: Any, tmp_path: Path, inside: Callable[..., Done]) -> None:
    write_checkpoint(tmp_path, gptq(), GPTQ | {"modules_to_not_convert": said})
    done = inside("inspect", str(tmp_path))
    assert done.code == 1 and "quantization_config.modules_to_not_convert=" in done.err


@pytest.mark.parametrize(("pack", "config"), [
    (gptq(group=128), GPTQ | {"group_size": 128}),
    (gptq(8, group=128), GPTQ | {"group_size": 128, "bits": 8}),
    (compressed(4, 128), compressed_config(4, 128)),
    (compressed(4, 128), compressed_config(4, 128) | {"ignore": ["re:.*layers.1.mlp.down_proj", "lm_head"]}),
    (compressed(4, 8), compressed_config(4, 8)),
], ids=["GPTQ", "GPTQ of 8 bits", "compressed-tensors", "one excluded", "groups of 8"])  # fmt: skip
def test_groups_that_do_not_fill_a_row_are_counted_as_floats(
    pack: Packer, config: dict[str, Any], tmp_path: Path, inside: Callable[..., Done]
) -> None:
    """Those of down, whose rows have 320 columns: `fp8` and `int8` round them."""
    write_checkpoint(tmp_path, pack, config, **SIZES | {"intermediate_size": 320})
    said = agree(tmp_path, inside)
    assert said["none"] >= said.get("file", said["none"]) > said["fp8"] == said["int8"]


def test_a_dense_matrix_in_mxfp4_is_counted_as_floats(tmp_path: Path, inside: Callable[..., Done]) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(path, "llama", tiny_model("llama", **SIZES), "MXFP4")
    said = agree(path, inside)
    assert "file" not in said and said["none"] > said["fp8"] > said["int4"]


def test_tokens_beside_weights_are_those_of_the_cache_that_is_asked_for(
    tmp_path: Path, inside: Callable[..., Done]
) -> None:
    write_checkpoint(tmp_path, gptq(), GPTQ)
    wide, narrow = (inspected(tmp_path, inside, "--kv-cache-dtype", dtype) for dtype in ("auto", "fp8"))
    assert wide["weight_bytes"] == narrow["weight_bytes"] and wide["tokens"].keys() == narrow["tokens"].keys()
    for size, tokens in wide["tokens"].items():
        assert all(0 <= narrow["tokens"][size][form] - 2 * count <= 1 for form, count in tokens.items())
    assert inspected(tmp_path, inside, "--kv-cache-dtype", "int8")["tokens"] == wide["tokens"], "a CPU's"
    assert "less what a step needs, KV in fp8: " in inside("inspect", str(tmp_path), "--kv-cache-dtype", "fp8").out
    assert "KV in" not in inside("inspect", str(tmp_path)).out


def test_groups_of_16_in_4_bits_are_counted_as_floats_that_nothing_rounds(
    tmp_path: Path, inside: Callable[..., Done]
) -> None:
    write_checkpoint(tmp_path, gptq(group=16), GPTQ | {"group_size": 16}, **SIZES)
    said = agree(tmp_path, inside)
    assert list(said) == ["none", "file"] and said["none"] == said["file"]


def test_latents_have_no_cache_in_fp8(tmp_path: Path, inside: Callable[..., Done]) -> None:
    make_checkpoint(tmp_path, "deepseek_v3")
    assert inspected(tmp_path, inside)["kv_bytes_per_token"] == {"auto": 2 * 3 * 32}
    assert "in fp8" not in inside("inspect", str(tmp_path)).out
    done = inside("inspect", str(tmp_path), "--kv-cache-dtype", "fp8")
    assert done.code == 1 and "latents (MLA): use kv_cache_dtype='auto'" in done.err


@pytest.mark.parametrize("dtype", ["fp8", "int8"])
def test_a_narrow_cache_beside_a_head_is_refused_as_an_engine_would(
    dtype: str, smollm2: str, inside: Callable[..., Done]
) -> None:
    done = inside("inspect", smollm2, "--speculative", "eagle", "--kv-cache-dtype", dtype)
    assert done.code == 1 and "kv_cache_dtype does not go with speculative_config method 'eagle'" in done.err
