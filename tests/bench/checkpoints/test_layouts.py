"""A model's weights in every layout: read back they are near what was written, and in the layout's own bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire.bench.checkpoints import layouts
from quire.bench.checkpoints.gguf_blocks import ENCODERS
from quire.bench.checkpoints.layouts import FOLDERS, Checkpoints
from quire.bench.checkpoints.names import EXPERTS_NAME, FOLDER_NAMES, GGUF_NAMES, LAYOUT_NAMES
from quire.bench.cpu.accuracy import decoder_of
from quire.bench.whole_pass import logits_of
from quire.errors import QuireError
from quire.kernels.quantized import CodedWeight, Fp8Weight, Mxfp4Weight
from quire.models.loader.source import resolve_model
from tests.checkpoints import make_checkpoint
from tests.models.loader.tiny_gguf import tiny_model, write_gguf

TOKENS = [3, 14, 15, 92, 65, 35]
FAR = {"q8_0": 0.01, "gptq-8-bits": 0.01, "compressed-int8": 0.015, "q6_k": 0.03}
"""Of the length of all weights, by which those that come back differ: else of fp8, or of 4 and 5 bits."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Checkpoints]:
    """Rows of 64, and of 256, which K-quants have blocks for."""
    path = tmp_path_factory.mktemp("model") / "model.gguf"
    write_gguf(path, "llama", tiny_model("llama", intermediate_size=256))
    return str(path), Checkpoints(str(path))


def test_the_names_are_those_of_the_layouts() -> None:
    assert tuple(FOLDERS) == FOLDER_NAMES and {name.upper() for name in GGUF_NAMES} <= ENCODERS.keys()


@pytest.mark.parametrize("layout", [name for name in LAYOUT_NAMES if "mxfp4" not in name])
def test_a_layout_holds_the_models_weights(
    layout: str, written: tuple[str, Checkpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, checkpoints = written
    monkeypatch.setattr(layouts, "texts", lambda count: ["\u0103\u0104\u0105"])  # of that vocabulary
    source = resolve_model(checkpoints.write(layout, tmp_path))
    assert source.stores_codes
    wanted = dict(resolve_model(model).weights())
    found = dict(source.stored_weights())
    assert found.keys() == wanted.keys()
    lost = whole = 0.0
    for name, weight in found.items():
        if not name.endswith("_proj.weight"):
            assert torch.equal(weight.float(), wanted[name].bfloat16().float()) or wanted[name].dim() == 1
            continue
        assert isinstance(weight, CodedWeight), name
        if isinstance(weight, Fp8Weight):
            assert (weight.input_scale is not None) is FOLDERS[layout].static
        lost += float((weight.dequantized() - wanted[name]).pow(2).sum())
        whole += float(wanted[name].pow(2).sum())
    assert 0 < (lost / whole) ** 0.5 < FAR.get(layout, 0.04 if "fp8" in layout else 0.15)


@pytest.mark.parametrize("layout", ["mxfp4", EXPERTS_NAME])
def test_mxfp4_is_the_model_with_rounded_matrices(
    layout: str, written: tuple[str, Checkpoints], tmp_path: Path
) -> None:
    """Dense matrices are read as floats, an expert's in the file's bits."""
    model, checkpoints = written
    path = checkpoints.write(layout, tmp_path)
    expected = {name: weight.bfloat16().float() if weight.dim() == 2 else weight
                for name, weight in resolve_model(model).weights()}
    experts = 0
    for name, weight in resolve_model(path).stored_weights():
        own = name.replace(".experts.", ".")
        if isinstance(weight, Mxfp4Weight):
            experts += 1
        if own.endswith("_proj.weight") and (layout == "mxfp4" or ".mlp." in own):
            floats = weight.dequantized() if isinstance(weight, Mxfp4Weight) else weight
            far = float((floats - expected[own]).norm() / expected[own].norm())
            assert 0 < far < 0.15 and torch.equal(floats, floats.bfloat16().float())
            expected[own] = floats
    assert experts == (3 * 2 if layout == EXPERTS_NAME else 0)
    floats_of = tmp_path / "floats"
    floats_of.mkdir()
    save_file({name: weight.contiguous() for name, weight in expected.items()}, floats_of / "model.safetensors")
    (floats_of / "config.json").write_text(json.dumps(resolve_model(model).config))
    with torch.inference_mode():
        wanted = logits_of(decoder_of("float32", str(floats_of), 64, 1), TOKENS)
        found = logits_of(decoder_of(layout, path, 64, 1), TOKENS)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_only_a_llama_is_written_as_experts(tmp_path: Path) -> None:
    write_gguf(tmp_path / "model.gguf", "qwen3", tiny_model("qwen3"))
    with pytest.raises(QuireError, match=r"only a GGUF of llama's architecture .* this one is qwen3"):
        Checkpoints(str(tmp_path / "model.gguf")).write(EXPERTS_NAME, tmp_path)


def test_static_scales_are_those_of_what_is_read(
    written: tuple[str, Checkpoints], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "texts", lambda count: ["\u0103\u0104\u0105"])
    model, _ = written
    checkpoints = Checkpoints(model)
    scales = checkpoints._input_scales
    assert scales.keys() == checkpoints._matrices.keys() and min(scales.values()) > 0
    layer = "model.layers.1."
    assert len({scales[f"{layer}self_attn.{part}_proj.weight"] for part in "qkv"}) == 1
    assert scales[f"{layer}mlp.gate_proj.weight"] == scales[f"{layer}mlp.up_proj.weight"]
    assert scales[f"{layer}mlp.down_proj.weight"] != scales[f"{layer}mlp.up_proj.weight"]
    # The norm before queries, keys and values puts out 1.3 in a feature, more or less: what e4m3's 448 stands for.
    assert 0.5 < 448 * scales[f"{layer}self_attn.q_proj.weight"] < 10


def test_gguf_needs_a_gguf(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    with pytest.raises(QuireError, match=r"q4_0 is written from the header of a GGUF file"):
        Checkpoints(str(tmp_path)).write("q4_0", tmp_path)
