"""The layers' operations on a GPU: which kernel runs what, by the number of rows and by what must be reproducible."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.attention.triton import TritonAttention
from quire.errors import EngineError, UnsupportedModelError
from quire.kernels import cublas
from quire.kernels.cuda import few_gemm, fixed_few, wide_gemm
from quire.kernels.kv_spec import KVSpec
from quire.kernels.quantized import CodedWeight, Rounding, StoredWeight, WeightUse
from quire.kernels.routing import Clamp, RoutedRows
from quire.kernels.slices import RankTree, Slices
from quire.kernels.triton import (
    activation,
    all_head_norm,
    copy,
    features,
    fixed_table,
    fixed_tiles,
    gemm_table,
    latent_rope,
    linear_few,
    linear_fixed,
    linear_prefetch,
    linear_stream,
    norm,
    rope_cache,
    spread,
)
from quire.kernels.triton.fixed_prefetch import FEW_ROWS, linear_fixed_prefetch, units_for
from quire.kernels.triton.gemm_table import GemmChoice
from quire.kernels.triton.linear_row import RowShape, linear_row
from quire.kernels.types import HeadShape, HeadTurn, LatentShape, LayerCache, StepContext
from quire.ops import device_experts
from quire.ops.device_formats import DeviceFormats
from quire.ops.device_weights import BytesLinear, CodesLinear, DeviceGroup, DeviceLinear, ExpertLinear, QuantizedLinear
from quire.ops.interface import Fusion, Ops, PackedLinear
from quire.parallel.collectives import TensorGroup

_EARLY_ROWS = 512
_FIXED_HEADS = 8
_ANY_ROW = (4, 512, 2)
"""Sizes of `linear_row` for a weight of any shape."""
_MOST_FUSED_WIDTH = 1536
"""Of a residual stream whose layers `fixed_few` runs in deterministic mode: their weights fit into shared memory."""
_FEW_ROWS_CHOICE = fixed_table.FixedChoice(fixed_table.PREFETCH)
KV_DTYPES = {"auto": None, "fp8": torch.float8_e4m3fn}


class TritonOps(Ops):
    """`quire.ops.interface.Ops` for one GPU in bf16, fp16 or fp32. Activations have the type of the weights.

    Norm vectors and rope tables are float32. With `deterministic`, every sum runs in an order fixed by its
    element.
    """

    attention: TritonAttention
    mixes_formats = True

    def __init__(
        self,
        device: torch.device | str = "cuda",
        dtype: torch.dtype = torch.bfloat16,
        *,
        deterministic: bool = False,
        kv_dtype: torch.dtype | None = None,
        dense_prefill: bool = True,
        prompt_rows: bool = True,
        pdl: bool = False,
        named_algorithms: bool = True,
        fixed_prefetch: bool = True,
        fixed_fusion: bool = True,
        few_rows: bool = True,
        rounding: Rounding | None = None,
    ) -> None:
        self.device = torch.device(device)
        self.dtype = dtype
        self.deterministic = deterministic
        self.kv_dtype = kv_dtype or dtype
        prefetch = linear_prefetch.available(self.device) and dtype != torch.float32
        prefetch = prefetch and (fixed_prefetch or not deterministic)
        self._fixed_prefetch = prefetch and deterministic
        # Deterministic mode runs one compiled kernel in every step. Early launch would be another kernel, which might
        # round differently, so there norms and gates have it in every step (beside GEMMs that prefetch) or in none;
        # rotations and attention are that kernel in every step, and launched early where all sequences decode: in a
        # graph of a step with prompts that was once an error (Gemma-3's shapes, an H200, 2026-11-17). So would another
        # number of heads at once, whose squares are summed otherwise.
        self._fixed_early = self._fixed_prefetch and pdl
        # Rows for codes are rounded where they are normed, so a model that has codes norms as it does for many rows.
        self._fuses_few = fixed_fusion and self._fixed_early and fixed_few.available(self.device, dtype)
        self.pdl = pdl = pdl and not deterministic
        self._heads_at_once = _FIXED_HEADS if deterministic else None
        self._library = cublas.named_library(self.device, dtype, gemm_table.library_version()) if (
            named_algorithms and not deterministic) else None
        self._parts = linear_prefetch.PrefetchScratch.allocate(self.device) if prefetch else None
        self._few_rows = few_rows and not deterministic and few_gemm.available(self.device, dtype)
        self._only_floats, self._few_width = True, 0
        timed = self._fixed_prefetch and fixed_table.table()
        deep = 256 if fixed_table.names_wide() else 128
        self._deep = fixed_tiles.TileScratch.for_device(self.device, deep) if timed else None
        self._formats = DeviceFormats(
            self.device, dtype, rounding, self.linear, deterministic=deterministic, pdl=pdl, scratch=self._parts
        )
        self._copy_engine = self.device.type == "cuda" and torch.cuda.get_device_capability(self.device)[0] >= 9
        self.attention = TritonAttention(
            self.device,
            dtype,
            deterministic=deterministic,
            pdl=pdl,
            dense_prefill=dense_prefill,
            prompt_rows=prompt_rows,
            fixed_early=self._fixed_early,
            same_type=self.kv_dtype == dtype,
        )

    def close(self) -> None:
        if self._library is not None:
            self._library.close()

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, slices: Slices | None = None
    ) -> DeviceLinear:
        if slices is not None:
            slices.check_width(weight.shape[1])
        if gemm_table.few_knows_gate(*weight.shape):
            self._few_width = weight.shape[1]
            self.attention.beside_few_gemm = self._few_rows
        return DeviceLinear(
            weight.to(self.device, self.dtype).contiguous(),
            None if bias is None else bias.to(self.device, self.dtype).contiguous(),
            slices,
        )

    def quantized(
        self, weight: StoredWeight, slices: Slices | None = None, use: WeightUse = WeightUse.LAYER
    ) -> CodedWeight | None:
        return self._formats.quantized(weight, slices, use)

    def pack_quantized(
        self, parts: Sequence[CodedWeight], bias: Tensor | None = None, slices: Slices | None = None,
        use: WeightUse = WeightUse.LAYER,
    ) -> PackedLinear:
        self._only_floats = False
        if use is WeightUse.EXPERT:
            packed = device_experts.pack(parts)
            if isinstance(packed, Tensor):
                return self.pack_linear(packed, bias)
            return ExpertLinear(packed, None if bias is None else bias.to(self.device, self.dtype).contiguous())
        return self._formats.pack(parts, bias, slices)

    def linear(self, x: Any, w: Any, residual: Tensor | None = None, out: Tensor | None = None) -> Tensor:
        """x W^T + bias + residual; `out`, if given, receives it (a graph's buffer of logits)."""
        if isinstance(w, QuantizedLinear):
            return self._formats.linear(x, w, residual, out)
        found = self._linear(x, w, residual, out)
        return found if out is None or found is out else out.copy_(found)

    def _linear(self, x: Tensor, w: DeviceLinear, residual: Tensor | None, out: Tensor | None) -> Tensor:
        if self.deterministic:
            return self._fixed_gemm(x, w, residual)
        found = self._few_gemm(gemm_table.PLAIN, x, w, residual, out)
        if found is not None:
            return found
        return self._gemm(gemm_table.lookup(x.shape[0], w.out_features, w.in_features, x.dtype), x, w, residual, out)

    def _fixed_gemm(self, x: Tensor, w: DeviceLinear, residual: Tensor | None) -> Tensor:
        """Kernels differ in speed only; which one is fastest says the table, where it has the weight."""
        rows, choice = x.shape[0], None
        if self._fixed_prefetch and rows:
            slices = 1 if w.slices is None else w.slices.total
            choice = fixed_table.lookup(rows, w.out_features, w.in_features, slices)
            if choice is None and rows <= FEW_ROWS:
                choice = _FEW_ROWS_CHOICE
        if choice is not None:
            found = self._chosen_gemm(choice, x, w, residual)
            if found is not None:
                return found
        return linear_fixed.linear_fixed(x, w.weight, w.bias, residual, w.slices)

    def _chosen_gemm(
        self, choice: fixed_table.FixedChoice, x: Tensor, w: DeviceLinear, residual: Tensor | None
    ) -> Tensor | None:
        """None where that kernel cannot run, or has nothing to say of its sizes."""
        scratch, deep, early = self._parts, self._deep, self._fixed_early
        if choice.kernel == fixed_table.PREFETCH and scratch is not None:
            units = units_for(x.shape[0], w.weight, w.slices)
            if units is not None and units.fits(x, w.weight, scratch):
                return linear_fixed_prefetch(x, w.weight, w.bias, residual, units=units, scratch=scratch, pdl=early)
        if choice.kernel == fixed_table.TILES and scratch is not None and deep is not None:
            tiles = fixed_tiles.FixedTiles.of(choice.sizes)
            if fixed_tiles.fits(x, w.weight, w.slices, tiles, scratch, deep):
                return fixed_tiles.linear_fixed_tiles(
                    x, w.weight, w.bias, residual, w.slices, tiles=tiles, scratch=scratch, deep=deep, pdl=early)
        if choice.kernel == fixed_table.WIDE and deep is not None:
            variant = wide_gemm.variant_of(wide_gemm.WideShape.of(choice.sizes), w.in_features, w.slices)
            return self._wide_gemm(variant, x, w, residual, None, deep.deep)
        if choice.kernel == fixed_table.FIXED and choice.sizes and residual is None:
            *sizes, parts = choice.sizes
            shape = linear_fixed.FixedShape(*sizes)
            return linear_fixed.linear_fixed(x, w.weight, w.bias, None, w.slices, sizes=shape, parts=parts)
        return None

    def linear_nodes(self, x: Any, w: Any, out: Tensor | None = None) -> Tensor:
        if isinstance(w, CodesLinear | BytesLinear):
            return self._formats.linear_nodes(x, w, out)
        if w.slices is None:
            raise EngineError("a weight without slices has no tree of sums: use linear")
        return linear_fixed.linear_fixed_nodes(x, w.weight, w.slices, out=out)

    def linear_over_ranks(
        self, x: Any, w: Any, ranks: TensorGroup, tree: RankTree, bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        """In deterministic mode the additions of one rank; else the fastest GEMM, and a sum over ranks."""
        if self.deterministic:
            x = self._formats.shared_rows(x, w, ranks) if isinstance(w, BytesLinear) else x
            return super().linear_over_ranks(x, w, ranks, tree, bias, residual).to(self.dtype)
        room = ranks.room(x.shape[0], w.out_features, self.dtype)
        return ranks.sum_parts(self.linear(x, w, None, room), bias, residual)

    def _gemm(
        self, choice: GemmChoice, x: Tensor, w: DeviceLinear, residual: Tensor | None, out: Tensor | None
    ) -> Tensor:
        if choice.algorithm and self._library is not None and w.bias is None:
            named = self._library.gemm(x, w.weight, choice.algorithm, out)
            if named is not None:
                return named if residual is None else named.add_(residual)
        choice = self._known(choice, x, w)
        if choice.kernel == "row":
            return linear_row(x, w.weight, w.bias, residual, out=out, sizes=RowShape(*choice.sizes), pdl=self.pdl)
        if choice.kernel == "vector":
            return linear_few.linear_vector(x, w.weight, w.bias, residual, out=out, pdl=self.pdl)
        if choice.kernel == "prefetch":
            found = self._prefetch_gemm(choice, x, w, residual, out)
            if found is not None:
                return found
        if choice.kernel == gemm_table.WIDE:
            shape = wide_gemm.WideShape.of(choice.sizes)
            found = self._wide_gemm(wide_gemm.variant_of(shape, w.in_features), x, w, residual, out)
            if found is not None:
                return found
        if choice.kernel == "stream":
            return linear_stream.linear_stream(x, w.weight, w.bias, residual, out=out,
                                               sizes=linear_stream.StreamShape(*choice.sizes), pdl=self.pdl)
        if out is not None and w.bias is None and residual is None:
            return torch.mm(x, w.weight.t(), out=out)
        found = F.linear(x, w.weight, w.bias)
        return found if residual is None else found.add_(residual)

    def _prefetch_gemm(
        self, choice: GemmChoice, x: Tensor, w: DeviceLinear, residual: Tensor | None, out: Tensor | None
    ) -> Tensor | None:
        """None if that kernel should not run: it needs Hopper and a Triton version that we know, and a number of rows
        that graphs have too, since any other number would compile another kernel in the middle of a step."""
        sizes = linear_prefetch.PrefetchShape(*choice.sizes).in_turns_of(
            w.in_features // linear_prefetch.columns(x.dtype))
        if self._parts is None or not linear_prefetch.is_common(x.shape[0]):
            return None
        if not linear_prefetch.fits(x, w.weight, sizes, self._parts):
            return None
        return linear_prefetch.linear_prefetch(
            x, w.weight, w.bias, residual, sizes=sizes, scratch=self._parts, out=out, pdl=self._early(x.shape[0])
        )

    def _few_gemm(
        self, form: str, x: Tensor, w: DeviceLinear, residual: Tensor | None = None, out: Tensor | None = None,
        gain: Tensor | None = None, eps: float = 0.0,
    ) -> Tensor | None:
        """2 to 8 rows with norm, gate and residual in one kernel; None where that is not for this weight."""
        if not self._few_rows or x.shape[0] > few_gemm.MOST_ROWS or w.bias is not None:
            return None
        choice = gemm_table.lookup_few(x.shape[0], w.out_features, w.in_features, form)
        if choice is None or (out is not None and (out.dtype != x.dtype or not out.is_contiguous())):
            return None
        shape, gated = few_gemm.FewShape.of(choice.sizes), form == gemm_table.GATED
        if not few_gemm.fits(x, w.weight, shape, gain):
            return None
        return few_gemm.linear_few_rows(
            x, w.weight, residual, shape=shape, norm=gain, eps=eps, gated=gated, out=out, pdl=self.pdl)

    def _wide_gemm(
        self, variant: wide_gemm.Variant | None, x: Tensor, w: DeviceLinear, residual: Tensor | None,
        out: Tensor | None, deep: Tensor | None = None,
    ) -> Tensor | None:
        """None if that kernel cannot run."""
        if variant is None or w.bias is not None or (out is not None and not out.is_contiguous()):
            return None
        if not wide_gemm.available(x.device, x.dtype) or not wide_gemm.fits(x, w.weight, variant, deep):
            return None
        return wide_gemm.linear_wide(
            x, w.weight, residual, variant=variant, deep=deep, out=out, pdl=self._early(x.shape[0]))

    def _gated_choice(self, x: Tensor, w: DeviceLinear) -> wide_gemm.Variant | None:
        """The kernel that has the gate in it, where that is fastest. Deterministic mode rounds in between, as it does
        with two kernels."""
        rows, features, width = x.shape[0], w.out_features, w.in_features
        choice: GemmChoice | fixed_table.FixedChoice | None = None
        if not self.deterministic:
            choice = gemm_table.lookup(rows, features, width, x.dtype, gemm_table.GATE)
        elif self._fixed_prefetch:
            choice = fixed_table.lookup_gate(rows, features, width)
        if choice is None or choice.kernel != gemm_table.WIDE or w.slices is not None:
            return None
        shape = wide_gemm.WideShape.of(choice.sizes)
        return wide_gemm.variant_of(shape, width, gated=True, rounded=self.deterministic)

    def _known(self, choice: GemmChoice, x: Tensor, w: DeviceLinear, gated: bool = False) -> GemmChoice:
        """The same, or another kernel where the one that streams weights does not run or cannot multiply such a one."""
        if choice.kernel != "stream":
            return choice
        sizes = linear_stream.StreamShape(*choice.sizes)
        fits = linear_stream.fits(x.shape[0], w.out_features, w.in_features, sizes, gated)
        if fits and linear_stream.available(x.device, x.dtype):
            return choice
        return GemmChoice("row", _ANY_ROW) if x.shape[0] == 1 else GemmChoice()

    def _early(self, rows: int) -> bool:
        """Whether a small kernel should start while the one before it ends: only where its launch shows, but in
        deterministic mode for every number of rows or none, since it is another compiled kernel."""
        return self._fixed_early or (self.pdl and rows <= _EARLY_ROWS)

    def group_linears(self, ws: Sequence[DeviceLinear | ExpertLinear]) -> DeviceGroup:
        """One tensor of all, which they then are views of."""
        return device_experts.group(ws, self.dtype)

    def head_linear(self, x: Tensor, group: Any) -> Tensor:
        if self.deterministic:
            return torch.stack([self.linear(part, w) for part, w in zip(x, group.members, strict=True)])
        return torch.bmm(x, group.weight.transpose(1, 2))

    @property
    def _experts(self) -> device_experts.ExpertKernels:
        return device_experts.ExpertKernels(
            self.dtype, self.deterministic, self.pdl, self.attention.shared_memory, self._copy_engine
        )

    def routed_experts(
        self, x: Tensor, routed: RoutedRows, up: DeviceGroup, down: DeviceGroup, kind: str, clamp: Clamp | None,
        residual: Tensor | None = None,
    ) -> Tensor:
        return self._experts.routed(x, routed, up, down, kind, clamp, residual)

    def experts_over_ranks(
        self, x: Tensor, routed: RoutedRows, up: DeviceGroup, down: DeviceGroup, kind: str, clamp: Clamp | None,
        residual: Tensor | None, ranks: TensorGroup, runs: Sequence[tuple[int, int]],
    ) -> Tensor:
        return self._experts.over_ranks(x, routed, up, down, kind, clamp, residual, ranks, runs)

    def latent_attend(
        self,
        q: Tensor,
        kv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: LatentShape,
        rope: Tensor,
        scale: float,
    ) -> Tensor:
        latent_rope.rope_latents(q, kv, layer, ctx.slots[group], ctx.positions, shape, rope)
        return self.attention.latents(q, layer, ctx, group, shape, scale)

    def embed(self, ids: Tensor, w: DeviceLinear) -> Tensor:
        return F.embedding(ids, w.weight)

    def spread(self, found: Tensor, guessed: Tensor, places: Tensor, out: Tensor, least: float) -> None:
        spread.spread(found, places, out, least)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return norm.rms_norm(x, weight, eps)

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        return norm.layer_norm(x, weight, bias, eps)

    def norm_all_heads(self, qkv: Tensor, shape: HeadShape, q_norm: Tensor, k_norm: Tensor, eps: float) -> None:
        all_head_norm.norm_all_heads(qkv, shape, q_norm, k_norm, eps)

    def gate(self, gate_up: Tensor, kind: str, reader: Any = None) -> Any:
        rows = self._formats.gate_for(gate_up, kind, reader)
        return rows if rows is not None else self.act_mul(gate_up, kind)

    def gated_linear(self, x: Any, w: Any, kind: str, reader: Any = None) -> Any:
        if kind == "silu" and isinstance(w, DeviceLinear) and not isinstance(reader, QuantizedLinear):
            found = self._wide_gemm(self._gated_choice(x, w), x, w, None, None)
            if found is not None:
                return found
        return super().gated_linear(x, w, kind, reader)

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        return activation.act_mul(gate_up, kind, pdl=self._early(gate_up.shape[0]))

    def head_squares(self, qkv: Tensor, shape: HeadShape) -> Tensor:
        return all_head_norm.head_squares(qkv, shape)

    def norm_some_heads(
        self, qkv: Tensor, shape: HeadShape, squares: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], eps: float
    ) -> None:
        all_head_norm.norm_some_heads(qkv, shape, squares, norms, eps)

    def act(self, x: Tensor, kind: str) -> Tensor:
        return activation.act(x, kind)

    def rope_and_cache(
        self,
        qkv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: HeadShape,
        rope: Tensor | None,
        q_norm: Tensor | None,
        k_norm: Tensor | None,
        norm_eps: float,
    ) -> None:
        rope_cache.rope_and_cache(
            qkv,
            layer,
            ctx.slots[group],
            ctx.positions,
            shape,
            rope,
            q_norm,
            k_norm,
            norm_eps,
            pdl=self._fixed_early or (self.pdl and ctx.num_decodes == qkv.shape[0]),
            late=ctx.num_decodes != qkv.shape[0],
            heads_at_once=self._heads_at_once,
        )

    def attend(
        self,
        qkv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: HeadShape,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        return self.attention(qkv, layer, ctx, group, shape, scale, window, softcap, sinks=sinks)

    def allocate_cache(self, kv: KVSpec, num_blocks: int, block_size: int) -> LayerCache:
        """k, v [num_blocks, num_kv_heads, block_size, head_dim]: a head's keys of one block lie together."""
        if kv.kind == "latent":
            return self._latents(kv, num_blocks, block_size)
        if kv.kind == "feature":
            size = (num_blocks, 1, block_size, kv.parts[0].width)
            return LayerCache(kv, block_size, {"feature": torch.zeros(size, dtype=self.dtype, device=self.device)})
        heads, dim = kv.heads_of_pair()
        size = (num_blocks, heads, block_size, dim)
        tensors = {part.name: torch.zeros(size, dtype=self.kv_dtype, device=self.device) for part in kv.parts}
        return LayerCache(kv, block_size, tensors)

    def _latents(self, kv: KVSpec, num_blocks: int, block_size: int) -> LayerCache:
        if self.kv_dtype != self.dtype:
            raise UnsupportedModelError("latents (MLA) are kept in the activations' type: use kv_cache_dtype='auto'")
        size = (num_blocks, 1, block_size, kv.parts[0].width)
        return LayerCache(kv, block_size, {"latent": torch.zeros(size, dtype=self.dtype, device=self.device)})

    def copy_blocks(self, layer: LayerCache, src: Sequence[int], dst: Sequence[int]) -> None:
        for sources, targets in copy.independent_runs(src, dst):
            pairs = torch.tensor([sources, targets], dtype=torch.int32).to(self.device, non_blocking=True)
            copy.copy_blocks(layer, pairs[0], pairs[1])

    # ---- fused forms

    def rope_attend(
        self,
        qkv: Tensor,
        layer: LayerCache,
        ctx: StepContext,
        group: int,
        shape: HeadShape,
        turn: HeadTurn,
        scale: float,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """`rope_and_cache` and `attend`, in one launch where the step and the heads allow it."""
        if not shape.is_even:
            return self._attend_some_heads(qkv, layer, ctx, group, shape, turn, scale, window, softcap)
        if self.attention.turns(ctx, layer, shape, turn, window, softcap):
            return self.attention(qkv, layer, ctx, group, shape, scale, window, softcap, turn)
        self.rope_and_cache(qkv, layer, ctx, group, shape, turn.rope, turn.q_norm, turn.k_norm, turn.eps)
        return self.attend(qkv, layer, ctx, group, shape, scale, window, softcap, turn.sinks)

    def _attend_some_heads(
        self, qkv: Tensor, layer: LayerCache, ctx: StepContext, group: int, shape: HeadShape, turn: HeadTurn,
        scale: float, window: int | None, softcap: float | None,
    ) -> Tensor:
        """For a rank that has only some query heads of a kv head: kernels need the same number for each, so the missing
        ones are zeros."""
        even, dim = shape.evened, shape.head_dim
        mine = slice(shape.skipped * dim, (shape.skipped + shape.num_heads) * dim)
        rows = qkv.new_zeros(qkv.shape[0], even.width)
        rows[:, mine] = qkv[:, : shape.num_heads * dim]
        rows[:, even.num_heads * dim :] = qkv[:, shape.num_heads * dim :]
        if turn.sinks is not None:
            behind = even.num_heads - shape.skipped - shape.num_heads
            turn = replace(turn, sinks=F.pad(turn.sinks, (shape.skipped, behind)))
        found = self.rope_attend(rows, layer, ctx, group, even, turn, scale, window, softcap)
        return found[:, mine].contiguous()

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, reader: Any = None) -> Any:
        """residual += x in place; the norm of the sum, in fp8 for a reader that multiplies fp8."""
        rows = self._formats.norm_for(x, residual, weight, eps, reader)
        return rows if rows is not None else norm.add_rms_norm(x, residual, weight, eps, pdl=self._early(x.shape[0]))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        whole = (x.dtype, x.shape) == (y.dtype, y.shape) and x.is_contiguous() and y.is_contiguous()
        return features.add_rows(x, y, pdl=True) if whole and self.pdl and x.shape[0] <= _EARLY_ROWS else x + y

    def fusion(self, rows: int, width: int) -> Fusion:
        if self.deterministic:
            few = self._fuses_few and self._only_floats and rows <= fixed_few.MOST_ROWS and width <= _MOST_FUSED_WIDTH
            return Fusion.NORM_WITH_ROUNDED_GEMM if few else Fusion.SUM_WITH_NORM
        fused = linear_few.fusion_wins(rows, width) or (
            self._few_rows and self._only_floats and width == self._few_width and rows <= few_gemm.MOST_ROWS)
        return Fusion.NORM_WITH_GEMM if fused else Fusion.SUM_WITH_NORM

    def norm_gain(self, weight: Tensor) -> Tensor:
        """Every program of a fused GEMM reads the whole gain: in the activations' narrower type if that loses nothing,
        else unchanged."""
        narrow = weight.to(self.dtype)
        return narrow if torch.equal(narrow.float(), weight) else weight

    def norm_linear(
        self,
        x: Tensor,
        gain: Tensor,
        eps: float,
        w: Any,
        gated: str | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """In one launch where that is fastest."""
        if self.deterministic:
            return self._fixed_norm_linear(x, gain, eps, w, gated, out)
        if isinstance(w, QuantizedLinear):
            return self._formats.norm_linear(x, gain, eps, w, gated, out)
        form = gemm_table.GATED if gated else gemm_table.NORM
        if x.shape[0] > 1:
            return self._norm_linear_rows(form, x, gain, eps, w, gated, out)
        choice = gemm_table.lookup(1, w.out_features, w.in_features, x.dtype, form)
        choice = self._known(choice, x, w, gated is not None)
        sizes = RowShape(*choice.sizes) if choice.kernel in ("row", "norm_then_row") else RowShape()
        if choice.kernel == "row":
            return linear_row(
                x, w.weight, w.bias, None, norm=gain, eps=eps, gated=gated, out=out, sizes=sizes, pdl=self.pdl
            )
        if choice.kernel == "stream":
            return linear_stream.linear_stream(x, w.weight, w.bias, None, norm=gain, eps=eps, gated=gated, out=out,
                                               sizes=linear_stream.StreamShape(*choice.sizes), pdl=self.pdl)
        normed = norm.rms_norm(x, gain, eps, pdl=self.pdl)
        if choice.kernel == "norm_then_row":
            return linear_row(normed, w.weight, w.bias, None, gated=gated, out=out, sizes=sizes, pdl=self.pdl)
        found = self._gemm(choice, normed, w, None, None if gated else out)
        return self.act_mul(found, gated) if gated else found

    def _fixed_norm_linear(
        self, x: Tensor, gain: Tensor, eps: float, w: DeviceLinear, gated: str | None, out: Tensor | None
    ) -> Tensor:
        """The bits of kernels one by one, which run where one for all of it does not."""
        if out is None and gated in (None, "silu") and w.slices is None:
            found = fixed_few.linear_few_rows(
                x, w.weight, w.bias, norm=fixed_few.RowNorm(gain, eps), gated=gated is not None, pdl=self._fixed_early)
            if found is not None:
                return found
        normed = norm.rms_norm(x, gain, eps, pdl=self._fixed_early)
        return self.linear(normed, w, None, out) if gated is None else self.gated_linear(normed, w, gated)

    def add_linear(self, x: Tensor, w: DeviceLinear, rows: Tensor) -> Tensor:
        found = fixed_few.linear_few_rows(x, w.weight, w.bias, rows, slices=w.slices, pdl=self._fixed_early)
        return super().add_linear(x, w, rows) if found is None else found

    def _norm_linear_rows(
        self, form: str, x: Tensor, gain: Tensor, eps: float, w: DeviceLinear, gated: str | None, out: Tensor | None
    ) -> Tensor:
        """Of several rows."""
        if gated in (None, "silu"):
            found = self._few_gemm(form, x, w, None, out, gain, eps)
            if found is not None:
                return found
        if linear_few.fusion_wins(*x.shape):
            return linear_few.linear_vector(
                x, w.weight, w.bias, None, norm=gain, eps=eps, gated=gated, out=out, pdl=self.pdl)
        normed = norm.rms_norm(x, gain, eps, pdl=self._early(x.shape[0]))
        return self.linear(normed, w, None, out) if gated is None else self.act_mul(self.linear(normed, w), gated)
