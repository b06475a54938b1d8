"""GEMMs of 64 to some thousand rows on Hopper, whose thread blocks share what they load (`wide_gemm.cu`).

A cluster of two thread blocks needs each piece of the rows or of the weight from the L2 cache once, not twice; copies
of one piece to several multiprocessors are what neither Triton nor Gluon can say. Between small kernels it also starts
earlier than a library's GEMM: it fetches its first weights while the kernel before it ends.

For deterministic mode it also sums in slices (`wide_slices.cu`), and its gate may round as kernels one by one do
(`ROUNDED`): with the columns undivided, or parts that are nodes of the slices' tree, it has the bits of `linear_fixed`.

`available` is false without Hopper, without NVRTC, or where the driver refuses: the library runs then.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from ctypes import c_int, c_void_p
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from quire.kernels.cuda import loading, nvrtc
from quire.kernels.cuda.driver import Kernel, Launch, TensorMap
from quire.kernels.slices import Slices
from quire.kernels.triton.linear_prefetch import multiprocessors

OPTIONS = ("--gpu-architecture=sm_90a", "--std=c++17")
COLUMNS, BLOCK_ROWS = 64, 128
_SHARED = (227 << 10) - 512
"""Bytes of shared memory of a thread block, less what barriers take."""
_ALIGNMENT = 1024
_LARGE, _THREADS, _LARGE_THREADS = 96, 288, 384
"""Sums of a thread beyond which a whole warp group loads (`LARGE` in the source), and threads of a block."""
_INNER = ((64, 4), (96, 2), (192, 1))
"""Sums of a thread in a tile, and how many slices of so many add up in registers (`INNER`)."""
_SHORT = 4
"""Turns of a slice that warp groups take one after the other (`SHORT`); in a longer one the second group is a few turns
behind."""
_MOST_NODES = 16
_MOST_MAPS = 4096
_FILES = ("rounding.cu", "common.cu", "wide_ring.cu", "wide_slices.cu", "wide_multiply.cu", "wide_gemm.cu")


@dataclass(frozen=True, slots=True)
class WideShape:
    """How a GEMM runs: 128 or 256 rows (`row_blocks`) by `features` of a tile, stages of the ring, tiles of rows and of
    features in a cluster, thread blocks that divide a tile's columns. Of sums in slices (1 or 0): whether warp groups
    take them in turn, and whether the sums of nodes wait in shared memory first."""

    row_blocks: int = 1
    features: int = 128
    stages: int = 4
    cluster_rows: int = 1
    cluster_features: int = 1
    parts: int = 1
    ordered: int = 0
    kept: int = 0

    @classmethod
    def of(cls, sizes: Sequence[int]) -> WideShape:
        """As a table has them."""
        return cls(*sizes)

    @property
    def rows(self) -> int:
        return self.row_blocks * BLOCK_ROWS

    @property
    def cluster(self) -> int:
        return self.cluster_rows * self.cluster_features * self.parts

    @property
    def sums(self) -> int:
        """Of a thread."""
        return self.row_blocks * self.features // 2

    def weight_piece(self, gated: bool) -> int:
        """Rows of the weight that are loaded at once: gate and up lie apart, and two blocks share the work."""
        return self.features // (2 if gated or self.cluster_rows == 2 else 1)


@dataclass(frozen=True, slots=True)
class Variant:
    """What is compiled: a shape, and what becomes of its sums."""

    shape: WideShape
    gated: bool = False
    residual: bool = False
    early: bool = False
    watched: bool = False
    """Whether a wait of seconds ends in an error: for tests and benches, where a kernel may be wrong."""

    slices: int = 1
    slice_turns: int = 0
    """Turns of 64 columns of a slice, where there are several."""
    rounded: bool = False
    """Whether the gate takes rounded sums: the bits of two kernels."""

    @property
    def run(self) -> int:
        """Slices of a thread block."""
        return max(1, self.slices // self.shape.parts)

    @property
    def inner(self) -> int:
        """Slices that add up in registers."""
        return min(self.run, next((inner for most, inner in _INNER if self.shape.sums <= most), 1))

    @property
    def places(self) -> int:
        """Of sums of nodes that wait."""
        return (self.run // self.inner - 1).bit_length()

    @property
    def threads(self) -> int:
        blocks = 3 if self.inner == 4 else self.inner
        return _LARGE_THREADS if self.shape.sums * blocks > _LARGE else _THREADS

    @property
    def place_floats(self) -> int:
        """Of one place of all threads that multiply."""
        return self.shape.rows * self.shape.features

    @property
    def shared(self) -> int:
        shape = self.shape
        ring = shape.stages * (shape.rows + shape.features) * COLUMNS * 2
        return ring + (4 * self.place_floats if shape.kept else 0) + _ALIGNMENT

    @property
    def deep_floats(self) -> int:
        """Of a block's own memory."""
        return max(0, self.places - self.shape.kept) * self.place_floats

    def source(self) -> str:
        shape = self.shape
        defined = {
            "ROW_BLOCKS": shape.row_blocks, "FEATURES": shape.features, "STAGES": shape.stages,
            "CLUSTER_ROWS": shape.cluster_rows, "CLUSTER_FEATURES": shape.cluster_features, "PARTS": shape.parts,
            "GATED": self.gated, "ROUNDED": self.rounded, "RESIDUAL": self.residual, "EARLY": self.early,
            "WATCHED": self.watched, "SLICES": self.slices, "SLICE_TURNS": max(self.slice_turns, 1),
            "ORDERED": shape.ordered, "KEPT": shape.kept,
        }  # fmt: skip
        lines = [f"#define {name} {int(value)}" for name, value in defined.items()]
        return "\n".join([*lines, *map(partial(_multiply, shape.features), (False, True)), _text()])


def _multiply(features: int, first: bool) -> str:
    """One tensor core instruction: 64 rows by so many features, 16 columns deep. It names each of its registers.
    `first`: it begins the sums, whatever the registers held."""
    count = features // 2
    sums = ", ".join(f"%{index}" for index in range(count))
    operands = ", ".join(f'"{"=" if first else "+"}f"(sums[{index}])' for index in range(count))
    return f"""
__device__ __forceinline__ void {"multiply_first" if first else "multiply"}(float (&sums)[{count}],
                                        unsigned long long rows, unsigned long long features) {{
    asm volatile("{{\\n.reg .pred p;\\nsetp.ne.b32 p, {int(not first)}, 0;\\n"
        "wgmma.mma_async.sync.aligned.m64n{features}k16.f32.bf16.bf16 "
        "{{{sums}}}, %{count}, %{count + 1}, p, 1, 1, 0, 0;\\n}}"
        : {operands} : "l"(rows), "l"(features));
}}
"""


@lru_cache(maxsize=1)
def _text() -> str:
    return loading.text_of(_FILES)


@dataclass(frozen=True, slots=True)
class _Loaded:
    kernel: Kernel
    most_clusters: int


@lru_cache(maxsize=256)
def _loaded(variant: Variant, device: int) -> _Loaded | None:
    """None where it cannot be compiled or loaded."""

    def make() -> _Loaded:
        kernel = Kernel(nvrtc.compiled(variant.source(), OPTIONS), "wide_gemm", variant.shared)
        return _Loaded(kernel, kernel.most_clusters(variant.shape.cluster, variant.threads))

    return loading.made("wide_gemm", device, make)


@lru_cache(maxsize=8)
def available(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether chip, compiler and driver are there; the smallest kernel is tried."""
    return loading.is_for(device, dtype) and _loaded(Variant(WideShape()), loading.index_of(device)) is not None


def variant_of(
    shape: WideShape, width: int, slices: Slices | None = None, *, gated: bool = False, rounded: bool = False
) -> Variant | None:
    """None where the kernel cannot sum such slices: unequal ones, or not of whole turns."""
    if slices is None or slices.total == 1:
        return None if shape.ordered or shape.kept else Variant(shape, gated=gated, rounded=rounded)
    length, rest = divmod(width, slices.total * COLUMNS)
    if rest or not slices.whole or slices.sum_width % (slices.total * slices.unit) or slices.total % shape.parts:
        return None
    found = Variant(shape, gated=gated, slices=slices.total, slice_turns=length, rounded=rounded)
    nodes, left = divmod(found.run, found.inner)
    if left or found.inner == 3 or nodes > _MOST_NODES or (shape.kept and not found.places):
        return None
    if shape.parts > 1 and found.run & (found.run - 1):
        return None
    in_order = length <= shape.stages if length <= _SHORT else length >= shape.stages
    return found if in_order or not shape.ordered else None


def can_compute(rows: int, features: int, width: int, variant: Variant) -> bool:
    """Whether there is such a kernel for x [rows, width] times a weight [features, width]."""
    shape, gated, sums = variant.shape, variant.gated, variant.shape.sums
    tile = shape.row_blocks in (1, 2) and shape.features % 16 == 0 and 16 <= shape.features <= 256 and sums <= 192
    cluster = shape.cluster_rows in (1, 2) and shape.cluster_features in (1, 2, 4) and shape.parts in (1, 2, 4)
    if not tile or not cluster or shape.cluster > 8 or variant.shared > _SHARED or shape.weight_piece(gated) % 8:
        return False
    # Parts exchange sums beside those that they hold: more than 144 would overflow the registers.
    divided = shape.parts == 1 or (not gated and sums <= 144 and sums % (4 * shape.parts) == 0 and shape.stages > 1)
    halves = not gated or (features % 2 == 0 and features // 2 % (shape.features // 2) == 0)
    return divided and halves and rows > 0 and features % 8 == 0 and width % 8 == 0


def fits(x: Tensor, weight: Tensor, variant: Variant | None, deep: Tensor | None = None) -> bool:
    """Whether the kernel can multiply these. `deep` is memory for sums that wait (`wide_slices.cu`)."""
    if variant is None:
        return False
    known = x.dtype == weight.dtype == torch.bfloat16 and x.is_contiguous() and weight.is_contiguous()
    aligned = x.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0
    if not known or not aligned or not can_compute(x.shape[0], weight.shape[0], weight.shape[1], variant):
        return False
    needed = variant.deep_floats
    return not needed or (deep is not None and needed * multiprocessors(x.device) <= deep.numel())


def linear_wide(
    x: Tensor,
    weight: Tensor,
    residual: Tensor | None = None,
    *,
    variant: Variant,
    deep: Tensor | None = None,
    out: Tensor | None = None,
    pdl: bool = False,
    watched: bool = False,
) -> Tensor | None:
    """x W^T + residual, or silu(first half) * second half of x W^T; None if the kernel could not be made or has no
    room for all parts of a tile at once (nothing was launched then). Its reference is `linear_few.linear_reference`.
    No two launches that may run at the same time have the same `deep`."""
    shape, gated = variant.shape, variant.gated
    rows, features = x.shape[0], weight.shape[0] // (2 if gated else 1)
    tiles_m = -(-rows // (shape.rows * shape.cluster_rows))
    tiles_n = -(-features // (shape.features // (2 if gated else 1) * shape.cluster_features))
    variant = replace(variant, residual=residual is not None, early=pdl, watched=watched)
    loaded = _loaded(variant, loading.index_of(x.device))
    if loaded is None or loaded.most_clusters == 0:
        return None
    tiles = tiles_m * tiles_n
    clusters = tiles if shape.parts > 1 else min(tiles, loaded.most_clusters)
    if variant.deep_floats:
        room = 0 if deep is None else deep.numel() // (variant.deep_floats * shape.cluster)
        if shape.parts > 1 and clusters > min(room, loaded.most_clusters):
            return None  # more blocks than have memory of their own
        clusters = min(clusters, room)
    if out is None:
        out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
    turns = -(-weight.shape[1] // (COLUMNS * shape.parts))
    maps = _map(weight, shape.weight_piece(gated)), _map(x, shape.rows // shape.cluster_features)
    pointers = (c_void_p(None if each is None else each.data_ptr()) for each in (residual, out, deep))
    loaded.kernel(
        Launch(clusters * shape.cluster, shape.cluster, variant.threads, pdl),
        torch.cuda.current_stream(x.device).cuda_stream,
        (*maps, *pointers, *map(c_int, (rows, features, turns, tiles_m, tiles_n, tiles_m == 1))),
    )
    return out


_maps: OrderedDict[tuple[int, int, int, int], TensorMap] = OrderedDict()


def _map(matrix: Tensor, height: int) -> TensorMap:
    """The same for the same memory: a step's buffers come back at the same places."""
    key = matrix.data_ptr(), *matrix.shape, height
    found = _maps.get(key)
    if found is None:
        found = _maps[key] = TensorMap(matrix, height)
        if len(_maps) > _MOST_MAPS:
            _maps.popitem(last=False)
    return found


def clusters_at_once(variant: Variant, device: int) -> int:
    """How many clusters of a kernel this chip runs at the same time; 0 without the kernel."""
    loaded = _loaded(variant, device)
    return 0 if loaded is None else loaded.most_clusters


def stack_bytes(variant: Variant, device: int) -> int:
    """Of a thread: what the compiler on this machine found no registers for."""
    loaded = _loaded(variant, device)
    return 0 if loaded is None else loaded.kernel.stack
