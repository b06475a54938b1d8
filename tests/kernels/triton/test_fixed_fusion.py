"""Deterministic mode with norms, gates and residuals inside GEMMs of few rows: which calls make a layer, and that bits
do not depend on whether they are. The kernel itself has tests in tests/kernels/cuda and tests/gpu."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.kernels.cuda import fixed_few
from quire.kernels.quantized import QuantizedWeight
from quire.kernels.triton import activation, linear_fixed, norm
from quire.models.build import build_decoder, dummy_weights
from quire.ops.interface import Fusion
from quire.ops.triton import TritonOps
from tests.paged_driver import PagedDriver

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 97, "hidden_size": 64, "intermediate_size": 256,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
MOE = CONFIG | {"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 4, "num_experts_per_tok": 2,
                "moe_intermediate_size": 32, "norm_topk_prob": True}  # fmt: skip


class OneByOne:
    """`linear_few_rows` by the kernels whose bits it has; notes what it was asked for."""

    def __init__(self, declines: bool) -> None:
        self.declines = declines
        self.asked: list[str] = []

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *,
        slices: Any = None, norm: fixed_few.RowNorm | None = None, gated: bool = False, pdl: bool = False,
    ) -> Tensor | None:
        self.asked.append("gate" if gated else "norm" if norm else "sum")
        if self.declines:
            return None
        rows = x if norm is None else _normed(x, norm)
        found = linear_fixed.linear_fixed(rows, weight, bias, None, slices)
        found = activation.act_mul(found, "silu") if gated else found
        return found if residual is None else residual + found


def _normed(x: Tensor, wanted: fixed_few.RowNorm) -> Tensor:
    return norm.rms_norm(x, wanted.gain, wanted.eps)


def driver_of(config: dict[str, Any], fuses: bool) -> PagedDriver:
    """In float16: the interpreter cuts off what it should round to bfloat16, and torch's sums do not."""
    ops = TritonOps("cpu", torch.float16, deterministic=True)
    ops._fuses_few = fuses
    return PagedDriver(build_decoder(config, dummy_weights(config), ops, dtype=torch.float16), block_size=8)


@pytest.mark.parametrize("declines", [False, True], ids=["one kernel", "kernels one by one"])
@pytest.mark.parametrize("config", [CONFIG, MOE], ids=["dense", "experts"])
def test_a_row_has_the_same_bits_alone_and_among_many(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], declines: bool
) -> None:
    """A step of one row is fused, one of ten rows is not, nor is the other engine's."""
    kernel = OneByOne(declines)
    monkeypatch.setattr(fixed_few, "linear_few_rows", kernel)
    fused, plain = driver_of(config, True), driver_of(config, False)
    with torch.inference_mode():
        for driver in (fused, plain):
            driver.step({0: [5] * 9 + [3]})
        assert kernel.asked == []
        alone = fused.step({0: [41]})[0]
        layer = ["norm", "sum"] + (["gate", "sum"] if config is CONFIG else [])
        assert kernel.asked == [*layer, "norm"]  # the last is the head's
        want = plain.step({0: [41]})[0]
        many = fused.step({1: [5] * 9 + [3, 41]})[1][-1:]
    assert torch.equal(alone, want) and torch.equal(many, want)


def test_which_streams_are_fused() -> None:
    ops = TritonOps("cpu", torch.bfloat16, deterministic=True)
    assert ops.fusion(1, 1024) is Fusion.SUM_WITH_NORM  # no Hopper here
    ops._fuses_few = True
    wanted = {(1, 1024): True, (8, 1024): True, (9, 1024): False, (1, 2048): False}
    assert {size: ops.fusion(*size) is Fusion.NORM_WITH_ROUNDED_GEMM for size in wanted} == wanted
    assert TritonOps("cpu", torch.bfloat16).fusion(1, 1024) is Fusion.NORM_WITH_GEMM


def test_a_model_with_codes_norms_as_it_does_for_many_rows() -> None:
    ops = TritonOps("cpu", torch.bfloat16, deterministic=True)
    ops._fuses_few = True
    codes = QuantizedWeight(torch.zeros(64, 128, dtype=torch.uint8), torch.ones(64, 1), None, 8, 4, 128)
    ops.pack_quantized([codes])
    assert ops.fusion(1, 1024) is Fusion.SUM_WITH_NORM
