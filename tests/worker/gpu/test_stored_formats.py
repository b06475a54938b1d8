"""Which weights reach a GPU in the bits that the file stores: the target's, a rank's and a draft model's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.assembly.device import _device_weights, resolve
from quire.engine.assembly.ranks import _rank_options
from quire.kernels.quantized import CodedWeight
from quire.models.loader.source import resolve_model
from quire.worker.gpu.speculation import speculation_of
from tests.checkpoints import make_checkpoint, make_model
from tests.fp8_checkpoints import KINDS
from tests.integer_checkpoints import AWQ, GPTQ, awq, compressed, compressed_config, gptq, write_checkpoint
from tests.models.loader.tiny_gguf import tiny_model, write_gguf
from tests.mxfp4_checkpoints import write_mxfp4


def _gguf(kind: str) -> Callable[[Path], Any]:
    return lambda folder: write_gguf(folder / "model.gguf", "llama", tiny_model("llama"), kind)


_STORED: dict[str, tuple[Callable[[Path], Any], bool]] = {
    "floats": (make_checkpoint, False), "GGUF F16": (_gguf("F16"), False),
    "GGUF Q4_0": (_gguf("Q4_0"), True), "GGUF Q8_0": (_gguf("Q8_0"), True),
    "mxfp4": (lambda folder: write_mxfp4(folder, make_model("gpt_oss", hidden_size=64, intermediate_size=96)), True),
    "awq": (lambda folder: write_checkpoint(folder, awq(), AWQ), True),
    "gptq": (lambda folder: write_checkpoint(folder, gptq(), GPTQ), True),
    "int4": (lambda folder: write_checkpoint(folder, compressed(), compressed_config()), True),
    "int8": (lambda folder: write_checkpoint(folder, compressed(8, -1, plain=True),
                                             compressed_config(8, -1, plain=True)), True),
    **{f"fp8, {name}": (lambda folder, kind=kind: write_checkpoint(folder, *kind), True)  # type: ignore[misc]
       for name, kind in KINDS.items()},
}


@pytest.mark.parametrize("name", _STORED)
def test_a_gpu_keeps_what_a_file_stores_quantized_unless_a_type_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.assembly.device.missing_for_gpu", lambda: None)
    write, quantized = _STORED[name]
    write(tmp_path)
    source, options = resolve_model(str(tmp_path)), {"model": str(tmp_path), "device": "cuda"}

    def found(**asked: Any) -> tuple[str | None, bool]:
        config = resolve(EngineConfig.create(**options, **asked), source)
        coded = any(isinstance(weight, CodedWeight) for _, weight in _device_weights(source, config))
        return config.model.quantization, coded

    assert found() == ("file" if quantized else None, quantized)
    assert found(dtype="bfloat16") == (None, False)
    assert found(dtype="bfloat16", quantization="file") == ("file", quantized)
    assert found(quantization="int4") == ("int4", quantized)
    for sizes in ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}):
        shared = _rank_options(resolve(EngineConfig.create(**options, **sizes), source))  # what each rank is told
        assert shared.get("quantization") == ("file" if quantized else None)
    dummy = resolve(EngineConfig.create(**options), resolve_model(str(tmp_path), load_format="dummy"))
    assert dummy.model.quantization is None


@pytest.mark.parametrize(("name", "asked", "said"), [
    ("awq", {"dtype": "bfloat16"}, True), ("fp8, blocks", {"dtype": "bfloat16"}, True),
    ("awq", {"dtype": "float32", "device": "cpu"}, True), ("floats", {"dtype": "bfloat16"}, False),
    ("awq", {}, False), ("awq", {"dtype": "bfloat16", "quantization": "file"}, False),
])  # fmt: skip
def test_making_floats_of_quantized_weights_is_logged(
    name: str, asked: dict[str, Any], said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("quire.engine.assembly.device.missing_for_gpu", lambda: None)
    _STORED[name][0](tmp_path)
    caplog.set_level("INFO", "quire.engine")
    resolve(EngineConfig.create(**{"model": str(tmp_path), "device": "cuda", **asked}), resolve_model(str(tmp_path)))
    assert ("makes floats of the quantized weights" in caplog.text) == said


@pytest.mark.parametrize("target", ["floats", "awq"])
def test_a_draft_model_keeps_its_own_bits_whatever_the_target_has(
    target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("quire.engine.assembly.device.missing_for_gpu", lambda: None)
    for name in (target, "gptq"):
        (tmp_path / name).mkdir()
        _STORED[name][0](tmp_path / name)
    source = resolve_model(str(tmp_path / target))

    def coded(**asked: Any) -> bool:
        drafting = {"method": "draft_model", "model": str(tmp_path / "gptq")}
        config = resolve(EngineConfig.create(model=str(tmp_path / target), device="cuda",
                                             speculative_config=drafting, **asked), source)
        speculation = speculation_of(config, source)
        assert speculation is not None and speculation.weights is not None
        return any(isinstance(weight, CodedWeight) for _, weight in speculation.weights)

    assert coded() and coded(quantization="fp8")
    assert not coded(dtype="bfloat16")
