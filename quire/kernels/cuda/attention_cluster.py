"""Decode attention of few sequences in CUDA C (`attention_cluster.cu`): its time is latency.

As `triton.attention_few`: norm, rotation and the KV write are part of it, and the first keys of a sequence are read
before the kernel before has ended. There the pieces of a sequence meet in memory, which takes three trips to it one
after another; here they are blocks of a cluster, and write into each other's shared memory.

`fits` is false without Hopper, without NVRTC, or where the driver refuses: `triton.attention_few` runs then. So it does
for keys in fp8, for steps with drafts, for eight query heads of a KV head, with many keys and in wide models.
"""

from __future__ import annotations

from ctypes import c_float, c_int, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from quire.kernels.cuda import loading, nvrtc
from quire.kernels.cuda.driver import Kernel, Launch
from quire.kernels.triton.attention_decode import LOG2_E
from quire.kernels.types import HeadShape, HeadTurn, LayerCache

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
_DIM, _TILE, _MOST_GROUP = 128, 16, 7
_REGISTERS = 192
"""Of a thread: with fewer of them some numbers would go to memory."""
_NO_WINDOW = 1 << 30
_FILES = ("rounding.cu", "common.cu", "few_instructions.cu", "attention_instructions.cu", "attention_cluster.cu")


@dataclass(frozen=True, slots=True)
class ClusterSizes:
    """Blocks that share a sequence and a KV head, and warps of each: so many tiles of 16 keys are read at once."""

    cluster: int
    warps: int


WIDEST_MODEL = 2560
"""Width of hidden states. Wider models, whose GEMMs around attention are longer, lose: a cluster needs room on eight
multiprocessors at once. H200, 2026-11-19, one sequence, ms a token with clusters and without: Qwen3-0.6B 0.537 and
0.559, 1.7B 1.062 and 1.129, 4B 2.314 and 2.393; 8B 3.885 and 3.833, in int4 1.706 and 1.664."""
MOST_KV_HEADS = 8
"""Whose clusters were timed, and all run at the same time."""
_SIZES = (ClusterSizes(8, 8), ClusterSizes(8, 4))
"""Of one sequence, and of two."""


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compiled."""

    sizes: ClusterSizes
    kv_heads: int
    group: int
    page: int
    norm: bool
    early: bool

    @property
    def shared(self) -> int:
        """Bytes: sums of every warp, and their levels. As the source has them."""
        sources, slice_ = self.sizes.cluster * self.sizes.warps, _DIM // self.sizes.cluster
        return 4 * sources * (self.group * slice_ + 8 + 4 * (-(-self.group // 2)))

    def source(self) -> str:
        defined = {
            "CLUSTER": self.sizes.cluster, "WARPS": self.sizes.warps, "KV": self.kv_heads, "GROUP": self.group,
            "PAGE": self.page, "REGISTERS": _REGISTERS, "NORM": self.norm, "EARLY": self.early, "WATCHED": False,
        }  # fmt: skip
        return "\n".join([*(f"#define {name} {int(value)}" for name, value in defined.items()), _text()])


@lru_cache(maxsize=1)
def _text() -> str:
    return loading.text_of(_FILES)


@lru_cache(maxsize=64)
def _loaded(variant: Variant, device: int) -> Kernel | None:
    """None where it cannot be compiled or loaded."""
    return loading.made("attention_cluster", device, lambda: Kernel(
        nvrtc.compiled(variant.source(), OPTIONS), "cluster_decode", variant.shared))


def sizes_for(count: int) -> ClusterSizes | None:
    """For so many sequences; None: another kernel is for them."""
    return _SIZES[count - 1] if 0 < count <= len(_SIZES) else None


def knows(dtype: torch.dtype, shape: HeadShape, block_size: int) -> bool:
    """Whether the kernel knows such heads and blocks of keys in the activations' type."""
    group, rest = divmod(shape.num_heads, shape.num_kv_heads)
    heads = shape.head_dim == _DIM and rest == 0 and group <= _MOST_GROUP
    return heads and dtype == torch.bfloat16 and block_size % _TILE == 0


def takes(dtype: torch.dtype, shape: HeadShape, turn: HeadTurn, cache: LayerCache) -> bool:
    """Whether the kernel knows such heads and such a cache."""
    norms = [gain for gain in (turn.q_norm, turn.k_norm) if gain is not None]
    tables = [each for each in (turn.rope, *norms) if each is not None and each.dtype == torch.float32]
    rotated = turn.rope is not None and turn.rope.shape[1] == _DIM and len(tables) == 1 + len(norms) != 2
    same = cache.k.dtype == cache.v.dtype == dtype and cache.scales is None
    return knows(dtype, shape, cache.block_size) and rotated and same and turn.sinks is None


def fits(device: torch.device, dtype: torch.dtype, shape: HeadShape, turn: HeadTurn, cache: LayerCache) -> bool:
    """Whether the kernel runs there and knows such heads and such a cache."""
    if not loading.is_for(device, dtype) or not takes(dtype, shape, turn, cache):
        return False
    variant = _variant(_SIZES[0], shape, turn, cache, early=True)
    return _loaded(variant, loading.index_of(device)) is not None


def _variant(sizes: ClusterSizes, shape: HeadShape, turn: HeadTurn, cache: LayerCache, early: bool) -> Variant:
    group = shape.num_heads // shape.num_kv_heads
    return Variant(sizes, shape.num_kv_heads, group, cache.block_size, turn.q_norm is not None, early)


def cluster_decode_attention(
    qkv: Tensor,
    cache: LayerCache,
    tables: Tensor,
    rows: Tensor | None,
    context_len: Tensor,
    shape: HeadShape,
    scale: float,
    turn: HeadTurn,
    *,
    window: int | None = None,
    out: Tensor | None = None,
    sizes: ClusterSizes | None = None,
    pdl: bool = False,
) -> Tensor | None:
    """As `triton.attention_few.few_decode_attention`, of as many sequences as `context_len` has. `sizes`: instead of
    those that `sizes_for` has. None: nothing was launched, another kernel must."""
    count, device = context_len.shape[0], loading.index_of(qkv.device)
    sizes = sizes or sizes_for(count)
    aligned = all(each.data_ptr() % 16 == 0 for each in (qkv, cache.k, cache.v)) and qkv.stride(0) % 8 == 0
    if sizes is None or not aligned:
        return None
    kernel = _loaded(_variant(sizes, shape, turn, cache, pdl), device)
    if kernel is None:
        return None
    if out is None:
        out = torch.empty(count, shape.num_heads * _DIM, dtype=qkv.dtype, device=qkv.device)
    given = (qkv, cache.k, cache.v, tables, rows, context_len, turn.rope, turn.q_norm, turn.k_norm, out)
    kernel(
        Launch(count * shape.num_kv_heads * sizes.cluster, sizes.cluster, 32 * sizes.warps, pdl),
        torch.cuda.current_stream(qkv.device).cuda_stream,
        (*(c_void_p(None if each is None else each.data_ptr()) for each in given), c_float(turn.eps),
         c_float(scale * LOG2_E), c_int(_NO_WINDOW if window is None else window), c_int(qkv.stride(0)),
         c_int(tables.stride(0))),
    )  # fmt: skip
    return out
