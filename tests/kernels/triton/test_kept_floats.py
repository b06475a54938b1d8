"""Weights that a checkpoint's config keeps out of quantization, in the GPU's operations: floats beside the codes of
others, in one layer too. Run by the interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.quantized import Rounding
from quire.models.build import build_decoder, dummy_weights
from quire.models.loader.source import resolve_model
from quire.ops.cpu import CpuOps
from quire.ops.device_weights import DeviceLinear, SplitLinear
from quire.ops.triton import TritonOps
from tests.integer_checkpoints import compressed, compressed_config, write_checkpoint
from tests.models.test_excluded import CONFIG
from tests.paged_driver import PagedDriver

HALF = torch.float16


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("rounding", [Rounding(None, fp8=True), Rounding(8, 0), Rounding(4, 64, True)])
@torch.inference_mode()
def test_a_gpu_multiplies_them_as_floats_beside_the_codes_of_others(rounding: Rounding, deterministic: bool) -> None:
    ops = TritonOps("cpu", HALF, rounding=rounding, deterministic=deterministic)
    weights = {name: weight.half() for name, weight in dummy_weights(CONFIG)}
    decoder = build_decoder(CONFIG, weights.items(), ops, max_model_len=64, dtype=HALF)
    first, second = decoder.layers
    qkv = first.attn.qkv.packed
    assert isinstance(qkv, SplitLinear) and [part.out_features for part in qkv.parts] == [64, 32, 32]
    assert [isinstance(part, DeviceLinear) for part in qkv.parts] == [False, True, False]
    assert torch.equal(qkv.parts[1].weight, weights["model.layers.0.self_attn.k_proj.weight"])  # type: ignore[union-attr]
    down = second.mlp.down.packed
    assert isinstance(down, DeviceLinear) and torch.equal(down.weight, weights["model.layers.1.mlp.down_proj.weight"])
    assert not isinstance(first.mlp.down.packed, DeviceLinear)
    assert not isinstance(second.attn.qkv.packed, DeviceLinear | SplitLinear)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).half()
    found, keys = ops.linear(x, qkv), weights["model.layers.0.self_attn.k_proj.weight"]
    want = torch.cat([ops.linear(x, part) for part in qkv.parts], 1)
    assert torch.equal(found, want)
    exact = x.double() @ keys.double().t()
    assert (found[:, 64:96].double() - exact).norm() < 1e-3 * exact.norm()


@torch.inference_mode()
def test_a_checkpoint_with_keys_in_floats_gives_the_logits_of_its_numbers(tmp_path: Path) -> None:
    """W8A8 but for the keys of a layer, which the config names."""
    said = compressed_config(8, -1, plain=True) | {"ignore": ["lm_head", "model.layers.0.self_attn.k_proj"]}
    expected = write_checkpoint(tmp_path, compressed(8, -1, plain=True), said, num_key_value_heads=2)
    keys = "model.layers.0.self_attn.k_proj"
    stored = load_file(tmp_path / "model.safetensors")
    stored = {name: tensor for name, tensor in stored.items() if not name.startswith(keys)}
    save_file(stored | {f"{keys}.weight": expected[f"{keys}.weight"].contiguous()}, tmp_path / "model.safetensors")
    source = resolve_model(str(tmp_path))
    logits: list[Tensor] = []
    for ops, weights in ((TritonOps("cpu", HALF, rounding=Rounding(None, fp8=True)), source.stored_weights()),
                         (CpuOps(num_threads=1), iter(expected.items()))):
        dtype = HALF if logits == [] else torch.float32
        decoder = build_decoder(source.config, weights, ops, max_model_len=64, dtype=dtype)
        logits.append(PagedDriver(decoder).run(0, [5, 3, 96], [3]).double())
    assert (logits[0] - logits[1]).norm() < 0.05 * logits[1].norm()
