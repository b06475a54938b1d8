"""Heads and experts that ranks share: what each computes of its own is, bit for bit, what one rank computes of all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from quire.kernels.quantized import Rounding, WeightUse
from quire.kernels.routing import RoutedRows, RouterSpec
from quire.kernels.types import HeadShape, HeadTurn, StepContext
from quire.layers.share import HeadShare
from quire.layers.spec import AttentionSpec
from quire.ops.triton import TritonOps
from quire.parallel.collectives import TensorGroup
from tests.kernels.triton.bits import deterministic_ops

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = ("float32", "bfloat16") if DEVICE == "cuda" else ("float32",)
DIM, BLOCK, TOKENS = 16, 8, 5


def _spec(heads: int, kv_heads: int) -> AttentionSpec:
    return AttentionSpec(num_heads=heads, num_kv_heads=kv_heads, head_dim=DIM, scale=0.25, rope=None)


def _parts(qkv: torch.Tensor, heads: int, kv_heads: int, share: HeadShare) -> torch.Tensor:
    """A rank's columns of a row of q, k and v of all heads."""
    q, k, v = qkv.view(qkv.shape[0], -1, DIM).split([heads, kv_heads, kv_heads], 1)
    mine = (q[:, share.first : share.last], *(part[:, share.first_kv : share.last_kv] for part in (k, v)))
    return torch.cat(mine, 1).reshape(qkv.shape[0], -1).contiguous()


def _attended(ops, qkv: torch.Tensor, shape: HeadShape) -> torch.Tensor:  # type: ignore[no-untyped-def]
    """One prompt over an empty cache."""
    cache = ops.allocate_cache(shape.kv, 4, BLOCK)
    places = torch.arange(TOKENS, device=DEVICE)
    ctx = StepContext(
        places, torch.tensor([0, TOKENS], dtype=torch.int32, device=DEVICE),
        torch.tensor([TOKENS], dtype=torch.int32, device=DEVICE),
        (torch.tensor([[0, 1]], dtype=torch.int32, device=DEVICE),), (places,))
    return ops.rope_attend(qkv.clone(), cache, ctx, 0, shape, HeadTurn(None), 0.25, None, None)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 2), (4, 1, 3)])
@torch.inference_mode()
def test_attention_of_some_heads(dtype: str, heads: int, kv_heads: int, size: int) -> None:
    torch.manual_seed(heads + size)
    spec, ops = _spec(heads, kv_heads), deterministic_ops(DEVICE, getattr(torch, dtype))
    whole = HeadShape(heads, kv_heads, DIM)
    qkv = torch.randn(TOKENS, whole.width, device=DEVICE).to(ops.dtype)
    shares = [HeadShare.of(spec, rank, size) for rank in range(size)]
    found = [_attended(ops, _parts(qkv, heads, kv_heads, share), share.shape(spec)) for share in shares]
    assert torch.equal(torch.cat(found, 1), _attended(ops, qkv, whole))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "size"), [(9, 3, 2)])
@torch.inference_mode()
def test_a_norm_over_all_heads(dtype: str, heads: int, kv_heads: int, size: int) -> None:
    torch.manual_seed(heads)
    spec, ops = _spec(heads, kv_heads), deterministic_ops(DEVICE, getattr(torch, dtype))
    whole = HeadShape(heads, kv_heads, DIM)
    qkv = torch.randn(TOKENS, whole.width, device=DEVICE).to(ops.dtype)
    q_norm, k_norm = (torch.rand(count * DIM, device=DEVICE) + 0.5 for count in (heads, kv_heads))
    squares = ops.head_squares(qkv, whole)
    want = qkv.clone()
    ops.norm_all_heads(want, whole, q_norm, k_norm, 1e-6)
    for rank in range(size):
        share = HeadShare.of(spec, rank, size)
        mine, shape = _parts(qkv, heads, kv_heads, share), share.shape(spec)
        own = ops.head_squares(mine, shape)
        assert torch.equal(own[:, : shape.num_heads], squares[:, share.first : share.last])
        norms = (q_norm[share.first * DIM : share.last * DIM], k_norm[share.first_kv * DIM : share.last_kv * DIM])
        ops.norm_some_heads(mine, shape, (squares[:, :heads], squares[:, heads:]), norms, 1e-6)
        assert torch.equal(mine, _parts(want, heads, kv_heads, share))


class _InTurn(TensorGroup):
    """Ranks that run one after another: the first time each only gives, the second time all that was given is there."""

    def __init__(self, rank: int, given: list[torch.Tensor]) -> None:
        super().__init__(rank, 2)
        self._given = given

    def exchange(self, mine: torch.Tensor, counts: object = None) -> list[torch.Tensor]:
        if len(self._given) < self.size:
            self._given.append(mine.reshape(-1).clone())
            return [mine.reshape(-1)] * self.size
        return self._given


class _NoNumbers(TorchDispatchMode):
    """Fails where a number becomes a tensor of the host: it would be copied to the device, which graphs refuse."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = all(isinstance(each, torch.Tensor) and each.dim() for each in args)
        assert tensors or func.overloadpacket is not torch.ops.aten.where, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("rounding", [None, Rounding(None, fp8=True), Rounding(4, 32, True)], ids=["", "fp8", "int4"])
@pytest.mark.parametrize("deterministic", [False, True])
@torch.inference_mode()
def test_experts_of_two_ranks(deterministic: bool, rounding: Rounding | None) -> None:
    """In floats, or in codes: an expert is rounded alike whoever has it."""
    torch.manual_seed(5)
    tokens, width, inner, experts = 5, 32, 32, 5
    dtype = torch.float32 if rounding is None else torch.bfloat16
    ops = TritonOps(DEVICE, dtype, deterministic=deterministic, rounding=rounding)
    up, down = torch.randn(experts, 2 * inner, width, device=DEVICE), torch.randn(experts, width, inner, device=DEVICE)
    up, down = up / 8, down / 8
    x, residual = (torch.randn(tokens, width, device=DEVICE).to(dtype) for _ in range(2))
    slots = torch.tensor([0, 1, -1, 2, 3], device=DEVICE)
    logits = torch.randn(tokens, experts, device=DEVICE)
    routed = RoutedRows(RouterSpec(experts, 2), logits, None, slots, None)

    def group(weight: torch.Tensor):  # type: ignore[no-untyped-def]
        coded = [ops.quantized(each, None, WeightUse.EXPERT) for each in weight]
        assert all((each is None) == (rounding is None) for each in coded)
        return ops.group_linears([
            ops.pack_linear(each) if codes is None else ops.pack_quantized([codes], None, None, WeightUse.EXPERT)
            for each, codes in zip(weight, coded, strict=True)
        ])  # fmt: skip

    want = ops.routed_experts(x, routed, group(up), group(down), "silu", None, residual)
    runs, given = ((0, 2), (2, 5)), []
    shares = [(group(up[first:last]), group(down[first:last])) for first, last in runs]
    for turn in range(2):
        for rank, (mine_up, mine_down) in enumerate(shares):
            with _NoNumbers():
                found = ops.experts_over_ranks(x, routed, mine_up, mine_down, "silu", None, residual,
                                               _InTurn(rank, given), runs)
            if turn:
                some = slots >= 0
                if deterministic:
                    assert torch.equal(found[some], want[some])
                else:
                    assert torch.allclose(found[some], want[some], atol=1e-4 if rounding is None else 0.05)
