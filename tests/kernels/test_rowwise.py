"""Norms and activations: right, and a row's or an element's bits its own."""

from __future__ import annotations

import pytest
import torch

from quire.kernels.cpu.library import supported_variants
from quire.ops.cpu import CpuOps
from quire.ops.reference import TorchOps

WIDTHS = [1, 3, 15, 16, 17, 64, 100, 576, 1537]
KINDS = ["silu", "gelu", "gelu_tanh", "relu"]
REFERENCE = TorchOps()


@pytest.mark.parametrize("width", WIDTHS)
def test_norms_agree_with_float64(variant_ops, randn, width):
    x, weight, bias = randn(9, width) * 3 + 1, randn(width, seed=1), randn(width, seed=2)
    wide, wide_weight, wide_bias = x.double(), weight.double(), bias.double()
    torch.testing.assert_close(
        variant_ops.rms_norm(x, weight, 1e-5),
        REFERENCE.rms_norm(wide, wide_weight, 1e-5).float(), rtol=2e-6, atol=2e-6,
    )  # fmt: skip
    for b, wide_b in ((None, None), (bias, wide_bias)):
        torch.testing.assert_close(
            variant_ops.layer_norm(x, weight, b, 1e-5),
            REFERENCE.layer_norm(wide, wide_weight, wide_b, 1e-5).float(), rtol=2e-5, atol=2e-5,
        )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_activations_are_accurate_over_the_whole_range(variant_ops, kind):
    edges = torch.tensor([-1e30, -100.0, -0.0, 0.0, 1e-30, 100.0, 1e30])
    x = torch.cat([torch.linspace(-12, 12, 40001), edges])
    got = variant_ops.act(x[None], kind)[0].double()
    exact = REFERENCE.act(x.double(), kind)
    # gelu(x) for x << 0 is x times a difference of numbers near 1: exact in absolute terms only.
    assert ((got - exact).abs() <= 3e-7 * exact.abs() + 2e-7 * x.abs().double().clamp(max=6)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_nan_goes_through_activations(ops, kind):
    assert ops.act(torch.full((1, 5), float("nan")), kind).isnan().all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 15, 33, 1536])
def test_act_mul_is_act_times_the_second_half(variant_ops, randn, kind, width):
    x = randn(5, 2 * width)
    gate, up = (part.contiguous() for part in x.chunk(2, dim=1))
    assert torch.equal(variant_ops.act_mul(x, kind), variant_ops.act(gate, kind) * up)


@pytest.mark.parametrize("kind", KINDS)
def test_an_elements_bits_do_not_depend_on_its_place(variant_ops, randn, kind):
    x = randn(1, 67) * 4
    row = variant_ops.act(x, kind)
    for start in range(0, 67, 5):
        assert torch.equal(variant_ops.act(x[:, start:].contiguous(), kind), row[:, start:])


def test_rows_are_their_own_and_threads_do_not_matter(randn):
    ops = CpuOps(num_threads=1)
    x, weight = randn(301, 576), randn(576, seed=1)
    runs = {
        "rms": lambda part: ops.rms_norm(part, weight, 1e-5),
        "layer": lambda part: ops.layer_norm(part, weight, weight, 1e-5),
        "silu": lambda part: ops.act_mul(part, "silu"),
    }
    for run in runs.values():
        ops.set_num_threads(1)
        full = run(x)
        ops.set_num_threads(2)
        assert torch.equal(run(x), full)
        for start, end in ((0, 1), (5, 6), (7, 50), (300, 301)):
            assert torch.equal(run(x[start:end]), full[start:end])


def test_variants_with_an_fma_give_the_same_bits(randn):
    names = [name for name in supported_variants() if name != "x86-64-v2"]
    x, weight = randn(3, 577), randn(577, seed=1)
    results = []
    for name in names:
        ops = CpuOps(variant=name)
        results.append(torch.cat([ops.rms_norm(x, weight, 1e-6), *(ops.act(x, kind) for kind in KINDS)]))
    assert all(torch.equal(result, results[0]) for result in results)
