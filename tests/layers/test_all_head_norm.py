"""Norms of all query heads as one vector, and of all key heads (OLMo-2): the same as transformers' on every backend."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.slices import add_in_tree
from quire.kernels.types import HeadShape
from quire.layers.spec import AttentionSpec, MlpSpec, NormSpec, RopeSpec
from quire.models.decoder import Decoder
from quire.models.families import llama
from quire.models.spec import DecoderSpec, LayerSpec
from quire.models.weight_names import WeightNames
from quire.ops.cpu import CpuOps
from quire.ops.interface import Ops
from quire.ops.reference import TorchOps
from tests.paged_driver import PagedDriver

TOKENS = [5, 3, 96, 0, 41, 7, 11]
NAMES = replace(
    llama.NAMES,
    layer={
        **{name: part for name, part in llama.NAMES.layer.items() if name != "input_layernorm"},
        "post_attention_layernorm": "attn_norm",
        "post_feedforward_layernorm": "mlp_norm",
    },
)


def backend(name: str) -> Ops:
    if name == "cpu":
        return CpuOps(num_threads=2)
    if name == "reference":
        return TorchOps()
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("the interpreter is for machines without a GPU")
    from quire.ops.triton import TritonOps

    return TritonOps("cpu", torch.float32)


def _tree(values: list[float]) -> float:
    """By its definition: neighbours first, an odd one is carried up."""
    while len(values) > 1:
        pairs = [np.float32(a) + np.float32(b) for a, b in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]


@pytest.mark.parametrize("heads", [1, 2, 3, 5, 6, 7, 8, 11, 16, 24, 33])
def test_squares_are_summed_by_heads_in_one_tree(heads: int) -> None:
    """Heads of one feature, so that every head's sum is one product and the tree alone decides the bits."""
    generator = torch.Generator().manual_seed(heads)
    x, weight = torch.randn(4, 3 * heads, generator=generator), torch.randn(heads, generator=generator)
    want = np.array([_tree([np.float32(v) for v in row]) for row in (x[:, :heads] ** 2).tolist()], np.float32)
    assert np.array_equal(add_in_tree((x[:, :heads] ** 2).unbind(-1)).numpy(), want)
    scale = np.float32(1) / np.sqrt(want / np.float32(heads) + np.float32(1e-5))
    normed = x[:, :heads].numpy() * scale[:, None] * weight.numpy()
    got = x.clone()
    CpuOps(num_threads=2).norm_all_heads(got, HeadShape(heads, heads, 1), weight, weight, 1e-5)
    assert np.array_equal(got[:, :heads].numpy(), normed)
    assert torch.equal(got[:, 2 * heads :], x[:, 2 * heads :])


@pytest.mark.parametrize("name", ["cpu", "triton"])
@pytest.mark.parametrize("shape", [HeadShape(6, 2, 16), HeadShape(5, 5, 20), HeadShape(8, 1, 32)])
def test_every_backend_norms_as_the_reference_does(name: str, shape: HeadShape) -> None:
    qkv = torch.randn(3, shape.width)
    weights = [torch.randn(heads * shape.head_dim) for heads in (shape.num_heads, shape.num_kv_heads)]
    got, want = qkv.clone(), qkv.clone()
    backend(name).norm_all_heads(got, shape, *weights, 1e-6)
    TorchOps().norm_all_heads(want, shape, *weights, 1e-6)
    torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)


def test_a_row_is_normed_alike_in_any_batch_by_any_number_of_threads() -> None:
    shape = HeadShape(9, 3, 64)
    qkv = torch.randn(70, shape.width)
    weights = [torch.randn(heads * 64) for heads in (9, 3)]
    together, alone = qkv.clone(), qkv[41:42].clone()
    CpuOps(num_threads=2).norm_all_heads(together, shape, *weights, 1e-6)
    CpuOps(num_threads=1).norm_all_heads(alone, shape, *weights, 1e-6)
    assert torch.equal(together[41:42], alone)


def test_a_weight_of_another_width_is_refused() -> None:
    shape = HeadShape(4, 2, 8)
    with pytest.raises(EngineError, match="4 heads of 8"):
        CpuOps().norm_all_heads(torch.zeros(1, shape.width), shape, torch.ones(8), torch.ones(16), 1e-6)


def olmo2() -> tuple[Any, DecoderSpec]:
    """A tiny model that transformers builds, and the spec of it. (Reading its config is the family's part.)"""
    transformers = pytest.importorskip("transformers")
    config = transformers.Olmo2Config(
        vocab_size=97, hidden_size=48, intermediate_size=64, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-6, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Olmo2ForCausalLM(config).eval()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    norm = NormSpec("rms", 1e-6)
    attention = AttentionSpec(6, 2, 8, scale=8**-0.5, qk_norm=norm, qk_norm_over="all")
    layer = LayerSpec(attention, MlpSpec(64, "silu"), norm, placement="output")
    return model, DecoderSpec("Olmo2ForCausalLM", 97, 48, 64, (layer, layer), (RopeSpec(10_000.0, 8),), norm)


def loaded(model: Any, spec: DecoderSpec, names: WeightNames, ops: Ops) -> Decoder:
    decoder, shapes = Decoder(spec, ops), spec.parameters()
    for source, tensor in model.state_dict().items():
        for name, part in names.split(source, tensor, shapes):
            decoder.load(name, part, source)
    assert not decoder.missing()
    return decoder


@pytest.mark.parametrize("name", ["reference", "cpu", "triton"])
def test_layers_with_such_norms_give_transformers_logits(name: str) -> None:
    model, spec = olmo2()
    want: Tensor = model(torch.tensor([TOKENS])).logits[0].detach()
    with torch.inference_mode():
        driver = PagedDriver(loaded(model, spec, NAMES, backend(name)))
        torch.testing.assert_close(driver.run(0, TOKENS, [4, 1, 2]), want, rtol=1e-4, atol=1e-5)


def test_the_spec_asks_for_weights_as_wide_as_all_heads() -> None:
    model, spec = olmo2()
    stored = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    assert NAMES.stored(spec) == stored
    assert spec.parameters()["layers.0.attn.k_norm.weight"] == (16,)
