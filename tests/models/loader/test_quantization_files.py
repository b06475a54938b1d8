"""Wherever a folder says how its weights are quantized, it is read as if config.json said it at its top."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.errors import ModelLoadError, UnsupportedModelError
from quire.kernels.quantized import CodedWeight
from quire.models.build import build_decoder
from quire.models.loader.source import resolve_model
from quire.ops.reference import TorchOps
from tests.fp8_checkpoints import KINDS
from tests.integer_checkpoints import AWQ, GPTQ, Packer, awq, compressed, compressed_config, gptq, write_checkpoint

Config = dict[str, Any]
COMPRESSED = compressed_config()


def _file(name: str, said: Config) -> Callable[[Config, Path], Config]:
    def moved(config: Config, folder: Path) -> Config:
        (folder / name).write_text(json.dumps(said))
        return config

    return moved


def _without_method(stored: Config) -> Config:
    return {name: value for name, value in stored.items() if name != "quant_method"}


MODELOPT = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
PLACES: dict[str, tuple[Packer, Config, Callable[[Config, Path], Config]]] = {
    "text_config": (gptq(), GPTQ, lambda config, _: config | {"text_config": {"quantization_config": GPTQ}}),
    "compression_config": (compressed(), COMPRESSED,
                           lambda config, _: config | {"compression_config": _without_method(COMPRESSED)}),
    "quantize_config.json": (gptq(), GPTQ, _file("quantize_config.json", _without_method(GPTQ))),
    "quantize_config.json of AWQ": (awq(), AWQ, _file("quantize_config.json", AWQ)),
    "quant_config.json": (awq(), AWQ, _file("quant_config.json", {
        "zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM", "modules_to_not_convert": None})),
    "hf_quant_config.json": (*KINDS["modelopt"], _file("hf_quant_config.json", MODELOPT)),
    "hf_quant_config.json, null": (
        *KINDS["modelopt"],
        lambda config, folder: _file("hf_quant_config.json", MODELOPT)(config, folder) | {"quantization_config": None}),
}  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
def test_a_folder_may_say_its_quantization_in_other_places(place: str, tmp_path: Path) -> None:
    pack, config, move = PLACES[place]
    expected = write_checkpoint(tmp_path, pack, config)
    said = json.loads((tmp_path / "config.json").read_text())
    del said["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(move(said, tmp_path)))
    source = resolve_model(str(tmp_path))
    assert source.stores_codes and len(source.stored_forms()) == 14
    build_decoder(source.config, source.stored_weights(), TorchOps(), max_model_len=64)
    coded = {name for name, weight in source.stored_weights() if isinstance(weight, CodedWeight)}
    assert coded == {name for name in expected if name.endswith("_proj.weight")}
    assert all(torch.equal(tensor, expected[name].float()) for name, tensor in source.weights())


def test_what_config_json_says_at_its_top_counts_first(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, gptq(), GPTQ)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 3}))
    assert resolve_model(str(tmp_path)).config["quantization_config"] == GPTQ


@pytest.mark.parametrize(("file", "said", "field"), [
    ("quantize_config.json", {"bits": 3, "group_size": 32}, "bits=3"),
    ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMV"}, "version='GEMV'"),
])  # fmt: skip
def test_a_field_of_another_place_is_refused_by_name(file: str, said: Config, field: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, gptq(), GPTQ)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / file).write_text(json.dumps(said))
    with pytest.raises(UnsupportedModelError, match=field):
        source = resolve_model(str(tmp_path))
        build_decoder(source.config, source.stored_weights(), TorchOps())
    (tmp_path / file).write_text("[]")
    with pytest.raises(ModelLoadError, match=file):
        resolve_model(str(tmp_path))


def test_another_tools_file_of_the_same_name_says_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, gptq(), GPTQ)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    for file in ("quantize_config.json", "quant_config.json"):
        (tmp_path / file).write_text(json.dumps({"export": "onnx"}))
    assert "quantization_config" not in resolve_model(str(tmp_path)).config
