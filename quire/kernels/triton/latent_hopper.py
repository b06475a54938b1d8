"""Decode attention over latents on Hopper, by TMA and wgmma, which Triton itself does not pipeline well enough here.

It computes what `latent_attention.latent_decode` computes, with the same split, scratch and tables, one program per
multiprocessor. Two warps keep a ring of shared memory filled with tiles of 64 keys while the others multiply.

H200, 2026-11-16, 64 sequences of 2,000, bf16, in graphs of 12 calls (`latent_decode` in brackets): 16 heads 45.4 us,
76% of the bandwidth (53.9 us); 128 heads 88.3 us, 404 TFLOP/s (160 us). Slower with 128 heads: four stages of 32 keys
(121 us, since both warp groups read all queries for half as many keys), and to multiply the latents of a tile while the
next one's scores are under way (106 us). Blocks of 64 keys instead of 16, so a quarter of the copies: no faster.

`fits` says which models it serves; `available` is false without Hopper or without the Triton version whose Gluon we
know. `latent_attention.latent_decode` serves the rest.
"""

from __future__ import annotations

from functools import lru_cache
from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor

from quire.kernels.triton.attention_decode import LOG2_E, DecodeScratch
from quire.kernels.triton.attention_split import DecodeSplit
from quire.kernels.types import LatentShape, LayerCache

try:
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from quire.kernels.triton.latent_hopper_kernel import latent_kernel
except ImportError:  # another version of Triton
    latent_kernel = None

_KNOWN_TRITON = "3.6."
"""Gluon is an experimental part of Triton: its names and signatures change from version to version."""
KEYS, STAGES = 64, 2
"""Of a tile, and tiles in the ring: two and the queries of 64 heads fill the shared memory of a multiprocessor."""
_WIDTH = 64
"""128 bytes, the widest row that TMA swizzles; also the rotated features of every model that the kernel serves."""
_LEAST_BOX = 8
_FEW = 32
"""Up to so many heads in a block, scores and sums are transposed."""


@lru_cache(maxsize=8)
def available(device: torch.device) -> bool:
    """Whether this Triton and this chip have what the kernel needs."""
    known = latent_kernel is not None and triton.__version__.startswith(_KNOWN_TRITON)
    return known and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


def fits(shape: LatentShape, dtype: torch.dtype, block_size: int) -> bool:
    """Whether the kernel serves such a model: 64 rotated features, as DeepSeek has them, and blocks in whole boxes."""
    return (
        dtype in (torch.bfloat16, torch.float16)
        and shape.rank in (128, 256, 512)
        and shape.rope_dim == _WIDTH
        and gcd(block_size, KEYS) >= _LEAST_BOX
    )


def hopper_decode(
    q: Tensor, cache: LayerCache, tables: Tensor, rows: Tensor | None, context_len: Tensor, split: DecodeSplit,
    scratch: DecodeScratch, shape: LatentShape, scale: float, *, out: Tensor | None = None, pdl: bool = False,
) -> Tensor:  # fmt: skip
    """[S, heads * rank], as `latent_attention.latent_decode`."""
    blocks = shape.blocks
    heads = max(16, triton.next_power_of_2(blocks.group))
    few = heads <= _FEW
    if out is None:
        out = torch.empty(context_len.shape[0], shape.num_heads * shape.rank, dtype=q.dtype, device=q.device)
    box, shared, layouts = [gcd(cache.block_size, KEYS), _WIDTH], _shared_layout(), _layouts(heads, shape.rank)
    latents = TensorDescriptor.from_tensor(cache.latents.view(-1, shape.width), box, shared)
    latent_kernel[(blocks.num_kv_heads * split.tasks,)](
        latents, q, out, tables, tables if rows is None else rows, context_len, split.sequence, split.piece,
        split.count, split.length, scratch.partial, scratch.summary, scratch.arrived, scale * LOG2_E,
        scratch.partial.shape[0], q.stride(0), tables.stride(0), shape.num_heads, blocks.num_kv_heads, blocks.group,
        heads, shape.rank, cache.block_size, KEYS, STAGES, rows is not None, few, pdl, shared, *layouts,
        num_warps=4 if few else 8, maxnreg=128 if few else 168, **({"launch_pdl": True} if pdl else {}),
    )  # fmt: skip
    return out


@lru_cache(maxsize=1)
def _shared_layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16)


@lru_cache(maxsize=8)
def _layouts(heads: int, rank: int) -> tuple[Any, Any, Any, Any]:
    """How scores and sums lie in registers, and queries on their way to shared memory: latents, rotated features."""
    if heads <= _FEW:
        warps = 4
        scores = sums = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, heads, 16])
    else:
        warps = 8  # two warp groups: each has the scores of half of the keys, and half of the columns of the sums
        scores = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, KEYS // 2, 16])
        sums = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, min(256, rank // 2), 16])
    wide = gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])
    return scores, sums, wide, gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
