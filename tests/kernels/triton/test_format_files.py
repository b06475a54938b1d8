"""From a file in each quantized format through the loader and a GPU's operations, interpreted, to logits: beside those
of the floats that the file stands for, which the format's own tools or formulas say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from quire.kernels.quantized import Rounding
from quire.models.build import build_decoder
from quire.models.decoder import Decoder
from quire.models.loader.source import resolve_model
from quire.ops.device_weights import BytesLinear, CodesLinear
from quire.ops.reference import TorchOps
from quire.ops.triton import TritonOps
from tests import fp8_checkpoints as fp8
from tests.integer_checkpoints import AWQ, Packer, awq, compressed, compressed_config, gptq, write_checkpoint
from tests.models.loader.tiny_gguf import tiny_model, write_gguf
from tests.paged_driver import PagedDriver

BF16 = torch.bfloat16
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True}
TOKENS, CHUNKS = [5, 3, 41], [2, 1]
"""A chunk of two rows, then one row, which has kernels of its own."""
ROWS_STAY, ROWS_ROUNDED = 0.02, 0.06
"""Relative error of logits with rows in bf16, and with rows in 8 bits."""


def packed_of(folder: Path) -> Decoder:
    """The decoder that `quantization="file"` makes on a GPU."""
    source = resolve_model(str(folder))
    ops = TritonOps("cpu", BF16, rounding=Rounding(None))
    return build_decoder(source.config, source.stored_weights(), ops, dtype=BF16)


def check(decoder: Decoder, want: Tensor, kind: type, most: float) -> None:
    """All projections are of this kind, none in 16 bits; logits are those of the floats."""
    layer = decoder.layers[0]
    linears = [*layer.attn.linears, *layer.mlp.all_linears]
    assert [type(each.packed) for each in linears] == [kind] * len(linears)
    got = PagedDriver(decoder).run(0, TOKENS, CHUNKS)
    assert (got.double() - want.double()).norm() <= most * want.double().norm()


SAFETENSORS: dict[str, tuple[Packer, dict[str, Any], type, dict[str, Any]]] = {
    "AWQ": (awq(), AWQ, CodesLinear, {}),
    "GPTQ": (gptq(), GPTQ, CodesLinear, {}),
    "GPTQ with zero points": (gptq(symmetric=False), GPTQ | {"sym": False}, CodesLinear, {}),
    "GPTQ with act-order": (gptq(act_order=True), GPTQ | {"desc_act": True}, CodesLinear, {}),
    "GPTQ of 8 bits": (gptq(8), GPTQ | {"bits": 8}, CodesLinear, {}),
    "compressed-tensors int4": (compressed(), compressed_config(), CodesLinear, {}),
    "compressed-tensors int4 with act-order": (compressed(act_order=True), compressed_config(), CodesLinear, {}),
    "compressed-tensors int8": (compressed(8, -1, plain=True), compressed_config(8, -1, plain=True), BytesLinear, {}),
    "compressed-tensors fp8, dynamic": (fp8.fp8(), fp8.compressed_fp8(), BytesLinear, {}),
    "compressed-tensors fp8, static": (*fp8.KINDS["compressed, static"], BytesLinear, {}),
    "fp8 in blocks": (*fp8.KINDS["blocks"], BytesLinear, {"hidden_size": 256, "intermediate_size": 320}),
    "ModelOpt fp8": (*fp8.KINDS["modelopt"], BytesLinear, {}),
}


@pytest.mark.parametrize("kind", SAFETENSORS)
def test_a_quantized_checkpoint_gives_the_logits_of_its_floats(kind: str, tmp_path: Path) -> None:
    pack, config, linear, sizes = SAFETENSORS[kind]
    floats = write_checkpoint(tmp_path, pack, config, num_hidden_layers=1, **sizes)
    plain = {key: value for key, value in resolve_model(str(tmp_path)).config.items() if key != "quantization_config"}
    want = PagedDriver(build_decoder(plain, floats.items(), TorchOps())).run(0, TOKENS, CHUNKS)
    check(packed_of(tmp_path), want, linear, ROWS_ROUNDED if linear is BytesLinear else ROWS_STAY)


def encoded(name: str) -> Callable[[np.ndarray], np.ndarray]:
    """Matrices to blocks, by the gguf package; for those it cannot make, any blocks whose numbers are as large: what
    they stand for is the package's word."""
    generator = np.random.default_rng(3)

    def drawn(values: np.ndarray) -> np.ndarray:
        size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]][1]
        blocks = generator.integers(0, 256, (*values.shape[:-1], values.shape[-1] // 256, size), dtype=np.uint8)
        if name == "Q4_K":  # d and dmin such that numbers lie around zero
            blocks[..., :4] = np.array([3e-4, 7.5 * 3e-4], np.float16).view(np.uint8)
        else:  # Q6_K: scales of 16 numbers each, then d
            blocks[..., 192:208] = generator.integers(-40, 41, (*blocks.shape[:-1], 16), dtype=np.int8).view(np.uint8)
            blocks[..., 208:] = np.array([2e-4], np.float16).view(np.uint8)
        return blocks.reshape(*values.shape[:-1], -1)

    def quantized(values: np.ndarray) -> np.ndarray:
        return gguf.quants.quantize(values, gguf.GGMLQuantizationType[name])

    return drawn if name.endswith("_K") else quantized


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "Q8_0"])
def test_a_gguf_gives_the_logits_of_its_floats(name: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1,
                             "num_attention_heads": 8}
    model = tiny_model("qwen3", **sizes)
    encode, kind = encoded(name), gguf.GGMLQuantizationType[name]
    blocks = {}
    with torch.no_grad():
        for key, tensor in model.state_dict().items():
            if tensor.dim() == 2:
                blocks[key] = encode(tensor.numpy())
                tensor.copy_(torch.from_numpy(gguf.quants.dequantize(blocks[key], kind)))
        want = model(torch.tensor([TOKENS])).logits[0]
    path = write_gguf(tmp_path / "model.gguf", "qwen3", model, name, blocks=blocks)
    check(packed_of(path), want, CodesLinear, ROWS_STAY)
