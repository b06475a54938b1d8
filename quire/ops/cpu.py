"""The operations of the layers on a CPU: checks what it is given, then calls the compiled kernels."""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.cpu.build import SOURCE_DIR
from quire.kernels.cpu.library import load
from quire.kernels.expert_rows import ExpertRanges, ExpertRows
from quire.kernels.kv_spec import KVSpec
from quire.kernels.quantized import CodedWeight, QuantizedWeight, Rounding, StoredWeight, WeightUse
from quire.kernels.slices import UNIT, RankTree, Slices
from quire.kernels.types import HeadShape, HeadTurn, LatentShape, LayerCache, StepContext
from quire.kernels.unread import UnreadWeight
from quire.ops import cpu_integer
from quire.ops.cpu_copies import copy_blocks, copy_slots
from quire.ops.cpu_drafts import DraftKernels
from quire.ops.cpu_panels import PanelGroup, PanelLinear, PanelMemory, described, packed_floats
from quire.ops.cpu_step import (
    F32,
    I32,
    I64,
    NO_TABLE,
    STEP_FAULTS,
    CpuLayerCache,
    Step,
    check_heads,
    check_latents,
    dense,
    describe,
    read_step,
    rows_of,
    vector,
)
from quire.ops.interface import Ops
from quire.ops.recording import StepRecorder
from quire.parallel.collectives import TensorGroup

# Formats of a packed weight, narrowest first (see weight.h).
_FORMATS = {"scaled4": 3, "scaled8": 2, "bfloat16": 1, "float32": 0}
_INTEGER = 4  # codes that are multiplied as integers (see integer.h)
_GROUPED = ("scaled4", "scaled8")  # formats that keep UNIT columns together
_KINDS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}


class CpuOps(DraftKernels, Ops):
    """Compiled implementation of `quire.ops.interface.Ops` in fp32; any number of threads gives the same bits.

    One object serves one engine; several may live in a process and share the library's threads.
    """

    grows_tables = True
    packs_parts = True

    def __init__(
        self,
        num_threads: int | None = None,
        variant: str | None = None,
        library_dir: Path = SOURCE_DIR,
        narrow_weights: bool = True,
        rounding: Rounding | None = None,
    ) -> None:
        """With `rounding` weights are multiplied as integers: those that come as integers, and floats it rounds."""
        self.library = load(variant, library_dir)
        self._rounding = rounding
        self.narrow_weights = narrow_weights
        self._memory = PanelMemory(self.library)
        self._call_through(self.library)
        self.set_num_threads(num_threads or len(os.sched_getaffinity(0)))

    def _call_through(self, library: Any) -> None:
        """Kernels are called through `library` from now on; those of every layer are looked up once."""
        self._library = library
        self._linear = library.quire_linear
        self._group_linear = library.quire_group_linear
        self._rms_norm = library.quire_rms_norm
        self._act_mul = library.quire_act_mul
        self._rope_and_cache = library.quire_rope_and_cache
        self._attend = library.quire_attend
        self._rope_and_code = library.quire_rope_and_code
        self._attend_codes = library.quire_attend_codes
        self._step: Step | None = None

    @contextmanager
    def calling(self, library: Any) -> Iterator[None]:
        """Inside, kernels are called through `library`, which stands in front of the compiled one."""
        self._call_through(library)
        try:
            yield
        finally:
            self._call_through(self.library)

    def recorder(self, ranks: TensorGroup | None = None) -> StepRecorder | None:
        if ranks is None:
            return StepRecorder(self)
        return None if ranks.in_kernels is None else StepRecorder(self, ranks.in_kernels)

    def set_num_threads(self, count: int) -> None:
        """Threads that one operation may use, the caller's included; a property of the process's library."""
        self._library.quire_set_num_threads(count)

    def pack_linear(
        self, weight: Tensor, bias: Tensor | None = None, slices: Slices | None = None
    ) -> PanelLinear:
        return self.pack_parts((weight,), bias, slices)

    def pack_parts(
        self, parts: Sequence[StoredWeight], bias: Tensor | None = None, slices: Slices | None = None
    ) -> PanelLinear:
        """Copy a weight [N, K] into panels, in the narrowest format that holds every float bit for bit and that can be
        cut at the borders of the slices."""
        shapes = [tuple(part.shape) for part in parts]
        n, k = sum(shape[0] for shape in shapes), shapes[0][-1]
        if any(len(shape) != 2 or shape[1] != k for shape in shapes) or (bias is not None and bias.shape != (n,)):
            raise EngineError(f"a linear weight is [N, K] with a bias [N], not of parts {shapes}")
        for name in _FORMATS if self.narrow_weights else ("float32",):
            code = _FORMATS[name]
            if name in _GROUPED and slices is not None and not slices.divisible_by(UNIT):
                continue
            panels = self._memory.room(self._library.quire_packed_bytes(code, n, k))
            if panels.nbytes == 0 and n * k > 0:
                continue
            if packed_floats(self._library, parts, (n, k), panels, code):
                break
        return described(self._memory.keep(panels), name, code, (n, k), bias, slices)

    def quantized(
        self, weight: StoredWeight, slices: Slices | None = None, use: WeightUse = WeightUse.LAYER
    ) -> QuantizedWeight | UnreadWeight | None:
        if self._rounding is None or weight.dim() != 2:
            return None
        if isinstance(weight, UnreadWeight) or (isinstance(weight, QuantizedWeight) and weight.order is None):
            return weight if cpu_integer.fits(weight.shape[1], slices) else None
        if self._rounding.bits is None or (isinstance(weight, CodedWeight) and weight.kept):
            return None
        # Floats, or fp8, MXFP4 or act-order, which no CPU multiplies
        return cpu_integer.round_to_codes(self._library, weight, slices, self._rounding, use)

    def pack_quantized(
        self, parts: Sequence[CodedWeight], bias: Tensor | None = None, slices: Slices | None = None,
        use: WeightUse = WeightUse.LAYER,
    ) -> PanelLinear:
        # All of them: `quantized` gave them.
        codes = [part for part in parts if isinstance(part, QuantizedWeight | UnreadWeight)]
        n, k = sum(part.shape[0] for part in codes), codes[0].shape[1]
        if (bias is not None and bias.shape != (n,)) or not cpu_integer.fits(k, slices):
            raise EngineError(f"integer weights of [{n}, {k}] do not suit their bias or slices")
        name = " + ".join(dict.fromkeys(f"int{part.bits}" for part in codes))
        panels = self._memory.keep(cpu_integer.pack(self._library, codes, self._memory))
        return described(panels, name, _INTEGER, (n, k), bias, slices)

    def use_integer_kernel(self, name: str | None = None) -> str | None:
        """Take this kernel for integer GEMMs, in the whole process; None: the best that this processor runs. Returns
        its name, or None where the processor has no such instructions."""
        found = self._library.quire_int_kernel(-1 if name is None else cpu_integer.KERNELS.index(name))
        return None if found is None else str(found.decode())

    def linear(
        self, x: Tensor, w: PanelLinear, residual: Tensor | None = None, out: Tensor | None = None
    ) -> Tensor:
        if w.slices is not None and not w.slices.whole:
            raise EngineError("a weight that holds only a run of a sum's slices has no full GEMM: use linear_nodes")
        rows = rows_of(x, w.in_features)
        if residual is not None and rows_of(residual, w.out_features) != rows:
            raise EngineError(f"the residual has {residual.shape[0]} rows, the input {rows}")
        if out is None:
            out = torch.empty(rows, w.out_features)
        elif rows_of(out, w.out_features) != rows:
            raise EngineError(f"the result's buffer has {out.shape[0]} rows, the input {rows}")
        self._linear(
            x.data_ptr(), w.panels_ptr, w.format_code, w.bias_ptr,
            None if residual is None else residual.data_ptr(), out.data_ptr(),
            rows, w.out_features, w.in_features, w.slices_ptr, w.num_slices,
        )  # fmt: skip
        return out

    def linear_nodes(self, x: Tensor, w: PanelLinear, out: Tensor | None = None) -> Tensor:
        if w.slices is None:
            raise EngineError("a weight without slices has no tree of sums: use linear")
        rows = rows_of(x, w.in_features)
        if out is None:
            out = torch.empty(w.num_nodes, rows, w.out_features)
        elif out.shape != (w.num_nodes, rows, w.out_features) or out.dtype is not F32 or not dense(out):
            raise EngineError(f"the nodes' buffer is {tuple(out.shape)} for {w.num_nodes} nodes of {rows} rows")
        self._linear(
            x.data_ptr(), w.panels_ptr, w.format_code, None, None, out.data_ptr(),
            rows, w.out_features, w.in_features, w.slices_ptr, w.num_slices,
        )  # fmt: skip
        return out

    def linear_over_ranks(
        self,
        x: Tensor,
        w: PanelLinear,
        ranks: TensorGroup,
        tree: RankTree,
        bias: Tensor | None,
        residual: Tensor | None,
    ) -> Tensor:
        """In one call where ranks share memory: the sums are written where the others read them."""
        shared = ranks.in_kernels
        if shared is None:
            return super().linear_over_ranks(x, w, ranks, tree, bias, residual)
        rows = rows_of(x, w.in_features)
        if residual is not None and rows_of(residual, w.out_features) != rows:
            raise EngineError(f"the residual has {residual.shape[0]} rows, the input {rows}")
        if bias is not None and vector(bias) != w.out_features:
            raise EngineError(f"a bias of {bias.shape[0]} elements for {w.out_features} features")
        out = torch.empty(rows, w.out_features)
        shared.check(self._group_linear(
            shared.address, x.data_ptr(), w.panels_ptr, w.format_code, rows, w.out_features, w.in_features,
            w.slices_ptr, w.num_slices, w.num_nodes, *shared.steps(tree),
            None if bias is None else bias.data_ptr(), None if residual is None else residual.data_ptr(),
            out.data_ptr(),
        ))  # fmt: skip
        return out

    def embed_over_ranks(
        self, ids: Tensor, w: PanelLinear, ranks: TensorGroup, runs: Sequence[tuple[int, int]], ends: Tensor
    ) -> Tensor:
        """In one call where ranks share memory."""
        shared = ranks.in_kernels
        if shared is None:
            return super().embed_over_ranks(ids, w, ranks, runs, ends)
        ids = ids if ids.dtype is I64 and ids.is_contiguous() else ids.to(I64).contiguous()
        count = ids.numel()
        if self._library.quire_check_ids(ids.data_ptr(), count, runs[-1][1]):
            raise EngineError(f"a token id lies outside 0..{runs[-1][1] - 1}")
        ranks.rows_at_once(4 * w.in_features)  # a row must fit
        out = torch.empty(count, w.in_features)
        shared.check(self._library.quire_group_embed(
            shared.address, ids.data_ptr(), count, ends.data_ptr(), w.panels_ptr, w.format_code, w.in_features,
            out.data_ptr(),
        ))  # fmt: skip
        return out

    def group_linears(self, ws: Sequence[PanelLinear]) -> PanelGroup:
        n, k = ws[0].out_features, ws[0].in_features
        if any(w.slices is not None or w.out_features != n or w.in_features != k for w in ws):
            raise EngineError(f"weights that are used as a group are all [{n}, {k}], without slices")
        table = np.array([(w.panels_ptr, w.bias_ptr or 0, w.format_code, 0) for w in ws], np.int64)
        return PanelGroup(tuple(ws), table, n, k)

    def grouped_linear(self, x: Tensor, counts: Tensor, group: PanelGroup) -> Tensor:
        """In one call: threads share the rows of all groups."""
        rows, table = rows_of(x, group.in_features), group.table.copy()
        table[:, 3] = counts
        if table[:, 3].sum() != rows or table[:, 3].min() < 0:
            raise EngineError(f"groups of {counts.tolist()} rows, the input has {rows}")
        out = torch.empty(rows, group.out_features)
        if self._library.quire_grouped_linear(
            x.data_ptr(), table.ctypes.data, len(table), out.data_ptr(), group.out_features, group.in_features
        ):
            raise MemoryError("no memory for the list of grouped GEMMs")
        return out

    def sum_experts(self, found: Tensor, pairs: ExpertRows, ranges: ExpertRanges) -> Tensor:
        tokens, chosen = pairs.places.shape
        width = found.shape[1]
        if rows_of(found, width) != len(pairs.rows) or not dense(pairs.places, pairs.ranges, pairs.weights):
            raise EngineError(f"{len(pairs.rows)} pairs of token and expert, {found.shape[0]} rows")
        out = torch.empty(ranges.num_nodes, tokens, width)
        self._library.quire_sum_experts(
            found.data_ptr(), pairs.places.data_ptr(), pairs.ranges.data_ptr(), pairs.weights.data_ptr(),
            ranges.merges.data_ptr(), out.data_ptr(), tokens, chosen, width, ranges.first_range, ranges.num_ranges,
        )  # fmt: skip
        return out

    def embed(self, ids: Tensor, w: PanelLinear) -> Tensor:
        ids = ids if ids.dtype is I64 and ids.is_contiguous() else ids.to(I64).contiguous()
        count = ids.numel()
        if self._library.quire_check_ids(ids.data_ptr(), count, w.out_features):
            raise EngineError(f"a token id lies outside 0..{w.out_features - 1}")
        out = torch.empty(count, w.in_features)
        self._library.quire_embed(
            ids.data_ptr(), w.panels_ptr, w.format_code, out.data_ptr(), count, w.in_features
        )
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        width = vector(weight)
        rows = rows_of(x, width)
        out = torch.empty(rows, width)
        self._rms_norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, width, eps)
        return out

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        width = vector(weight)
        rows = rows_of(x, width)
        if bias is not None and vector(bias) != width:
            raise EngineError(f"the norm's bias has {bias.shape[0]} elements, its weight {width}")
        out = torch.empty(rows, width)
        shift = None if bias is None else bias.data_ptr()
        norm = self._library.quire_layer_norm
        norm(x.data_ptr(), weight.data_ptr(), shift, out.data_ptr(), rows, width, eps)
        return out

    def norm_all_heads(self, qkv: Tensor, shape: HeadShape, q_norm: Tensor, k_norm: Tensor, eps: float) -> None:
        rows = rows_of(qkv, shape.width)
        for norm, heads in ((q_norm, shape.num_heads), (k_norm, shape.num_kv_heads)):
            if vector(norm) != heads * shape.head_dim:
                raise EngineError(f"a norm over {heads} heads of {shape.head_dim} has not {norm.shape[0]} weights")
        self._library.quire_norm_all_heads(
            qkv.data_ptr(), q_norm.data_ptr(), k_norm.data_ptr(), rows, shape.num_heads, shape.num_kv_heads,
            shape.head_dim, eps,
        )  # fmt: skip

    def head_squares(self, qkv: Tensor, shape: HeadShape) -> Tensor:
        rows, heads = rows_of(qkv, shape.width), shape.num_heads + shape.num_kv_heads
        out = torch.empty(rows, heads)
        self._library.quire_head_squares(
            qkv.data_ptr(), out.data_ptr(), rows, shape.width, heads, shape.head_dim
        )
        return out

    def norm_some_heads(
        self, qkv: Tensor, shape: HeadShape, squares: tuple[Tensor, Tensor], norms: tuple[Tensor, Tensor], eps: float
    ) -> None:
        rows, start = rows_of(qkv, shape.width), 0
        for all_heads, norm, heads in zip(squares, norms, (shape.num_heads, shape.num_kv_heads), strict=True):
            total = all_heads.shape[1]
            if vector(norm) != heads * shape.head_dim or rows_of(all_heads, total) != rows:
                raise EngineError(f"a norm of {heads} heads of {shape.head_dim} has not {norm.shape[0]} weights")
            self._library.quire_norm_some_heads(
                qkv.data_ptr() + 4 * start, norm.data_ptr(), all_heads.data_ptr(), rows, shape.width, heads, total,
                shape.head_dim, eps,
            )  # fmt: skip
            start += heads * shape.head_dim

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        width = x.shape[-1]
        rows = rows_of(x, width)
        if rows_of(y, width) != rows:
            raise EngineError(f"rows [{rows}, {width}] are not added to {tuple(y.shape)}")
        out = torch.empty(rows, width)
        self._library.quire_add(x.data_ptr(), y.data_ptr(), out.data_ptr(), rows * width)
        return out

    def scale(self, x: Tensor, factor: float) -> Tensor:
        width = x.shape[-1]
        out = torch.empty(rows_of(x, width), width)
        self._library.quire_scale(x.data_ptr(), out.data_ptr(), out.numel(), factor)
        return out

    def act(self, x: Tensor, kind: str) -> Tensor:
        width = x.shape[-1]
        out = torch.empty(rows_of(x, width), width)
        self._library.quire_act(x.data_ptr(), out.data_ptr(), out.shape[0], width, _KINDS[kind])
        return out

    def act_mul(self, gate_up: Tensor, kind: str) -> Tensor:
        double = gate_up.shape[-1]
        rows = rows_of(gate_up, double)
        if double % 2:
            raise EngineError(f"gate and up make an even number of columns, not {double}")
        out = torch.empty(rows, double // 2)
        self._act_mul(gate_up.data_ptr(), out.data_ptr(), rows, double // 2, _KINDS[kind])
        return out

    def clamped_act_mul(self, gate_up: Tensor, limit: float, alpha: float) -> Tensor:
        double = gate_up.shape[-1]
        rows = rows_of(gate_up, double)
        out = torch.empty(rows, double // 2)
        self._library.quire_clamped_act_mul(gate_up.data_ptr(), out.data_ptr(), rows, double // 2, limit, alpha)
        return out

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
        if type(layer) is not CpuLayerCache:
            layer = describe(layer)
        step = self._enter(qkv, layer, ctx, group, shape, NO_TABLE)
        self._write(qkv, layer, step, group, shape, HeadTurn(rope, q_norm, k_norm, norm_eps))

    def _write(
        self, qkv: Tensor, layer: CpuLayerCache, step: Step, group: int, shape: HeadShape, turn: HeadTurn
    ) -> None:
        rope, q_norm, k_norm = turn.rope, turn.q_norm, turn.k_norm
        if rope is not step.rope:
            self._take_rope(step, rope)
        if step.rot > shape.head_dim:
            raise EngineError(f"a rotary table of {step.rot} columns does not fit heads of {shape.head_dim}")
        for norm in (q_norm, k_norm):
            if norm is not None and vector(norm) != shape.head_dim:
                raise EngineError(f"a head norm has {shape.head_dim} weights, not {norm.shape[0]}")
        write = self._rope_and_cache if layer.spec.coded_dim is None else self._rope_and_code
        write(
            qkv.data_ptr(), layer.k_ptr, layer.v_ptr,
            step.rope_ptr,
            None if q_norm is None else q_norm.data_ptr(),
            None if k_norm is None else k_norm.data_ptr(),
            step.positions, step.slots[group], step.tokens,
            shape.num_heads, shape.num_kv_heads, shape.head_dim, layer.block_size, step.rot, turn.eps,
        )  # fmt: skip

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
        if window is not None and window < 1:
            raise EngineError(f"an attention window holds at least the token itself, not {window}")
        if type(layer) is not CpuLayerCache:
            layer = describe(layer)
        step = self._enter(qkv, layer, ctx, group, shape, window or 0)
        return self._read(qkv, layer, step, group, shape, scale, window, softcap, sinks)

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
        """Both kernels, after one check of the step."""
        if window is not None and window < 1:
            raise EngineError(f"an attention window holds at least the token itself, not {window}")
        if type(layer) is not CpuLayerCache:
            layer = describe(layer)
        step = self._enter(qkv, layer, ctx, group, shape, window or 0)
        self._write(qkv, layer, step, group, shape, turn)
        return self._read(qkv, layer, step, group, shape, scale, window, softcap, turn.sinks)

    def _read(
        self,
        qkv: Tensor,
        layer: CpuLayerCache,
        step: Step,
        group: int,
        shape: HeadShape,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        if sinks is not None and vector(sinks) != shape.num_heads:
            raise EngineError(f"{shape.num_heads} heads have not {sinks.shape[0]} sinks")
        out = torch.empty(step.tokens, shape.num_heads * shape.head_dim)
        attend = self._attend if layer.spec.coded_dim is None else self._attend_codes
        failed = attend(
            qkv.data_ptr(), layer.k_ptr, layer.v_ptr, out.data_ptr(),
            step.query_start, step.context_len, step.tables[group],
            None if sinks is None else sinks.data_ptr(), step.detours, step.detour_stride,
            step.strides[group], step.seqs,
            shape.num_heads, shape.num_kv_heads, shape.group, shape.skipped, shape.head_dim, layer.block_size,
            window or 0, scale, softcap or 0.0,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the attention's task list")
        return out

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
        layer = layer if type(layer) is CpuLayerCache else describe(layer)
        step = self._step_of(ctx, group, 0, layer)
        if rows_of(q, shape.num_heads * shape.width) != step.tokens or rows_of(kv, shape.width) != step.tokens:
            raise EngineError(f"queries of {q.shape[0]} rows, latents of {kv.shape[0]}, the step has {step.tokens}")
        if layer.shape is not shape:
            check_latents(layer, shape)
        if rope is not step.rope:
            self._take_rope(step, rope)
        if step.rot != shape.rope_dim:
            raise EngineError(f"a rotary table of {step.rot} columns does not fit {shape}")
        self._library.quire_rope_latents(
            q.data_ptr(), kv.data_ptr(), layer.v_ptr, step.rope_ptr, step.positions, step.slots[group], step.tokens,
            shape.num_heads, shape.rank, shape.rope_dim,
        )  # fmt: skip
        out = torch.empty(step.tokens, shape.num_heads * shape.rank)
        failed = self._library.quire_latent_attend(
            q.data_ptr(), layer.v_ptr, out.data_ptr(), step.query_start, step.context_len, step.tables[group],
            step.detours, step.detour_stride, step.strides[group], step.seqs, shape.num_heads, shape.rank,
            shape.rope_dim, layer.block_size, scale,
        )  # fmt: skip
        if failed:
            raise MemoryError("no memory for the attention's task list")
        return out

    def allocate_cache(self, kv: KVSpec, num_blocks: int, block_size: int) -> CpuLayerCache:
        if kv.kind == "feature":
            states = self._zeros(num_blocks, 1, block_size, kv.parts[0].width)
            return CpuLayerCache(kv, block_size, {"feature": states}, num_blocks, 0, states.data_ptr())
        if kv.kind == "latent":
            kept = self._zeros(num_blocks, 1, block_size, kv.parts[0].width)
            return describe(LayerCache(kv, block_size, {"latent": kept}))
        heads, _ = kv.heads_of_pair()
        width, dtype = kv.parts[0].width, F32 if kv.coded_dim is None else I32
        k = self._zeros(num_blocks, heads, width, block_size, dtype=dtype)
        v = self._zeros(num_blocks, heads, block_size, width, dtype=dtype)
        return describe(LayerCache(kv, block_size, {"k": k, "v": v}, tokens_last=("k",)))

    def _zeros(self, *shape: int, dtype: torch.dtype = F32) -> Tensor:
        """Zeros that take memory, and time, only where they are written: a large pool costs nothing at start."""
        nbytes = math.prod(shape) * 4
        if nbytes == 0:
            return torch.zeros(shape, dtype=dtype)
        try:
            pages = mmap.mmap(-1, nbytes)
        except OSError as error:
            raise MemoryError(f"the system refuses {nbytes:,} bytes for the KV cache ({error})") from error
        zeros = torch.frombuffer(pages, dtype=dtype).view(shape)
        self._library.quire_advise_huge_pages(zeros.data_ptr(), nbytes)
        return zeros

    def copy_blocks(self, layer: LayerCache, src: Sequence[int], dst: Sequence[int]) -> None:
        copy_blocks(self._library, layer, src, dst)

    def copy_slots(self, layer: LayerCache, src: Tensor, dst: Tensor) -> None:
        copy_slots(self._library, layer, src, dst)

    def _enter(
        self, qkv: Tensor, layer: CpuLayerCache, ctx: StepContext, group: int, shape: HeadShape, window: int
    ) -> Step:
        """The step's addresses, once everything the kernel will follow is known to lie inside its array."""
        step = self._step_of(ctx, group, window, layer)
        if rows_of(qkv, shape.width) != step.tokens:
            raise EngineError(f"qkv has {qkv.shape[0]} rows, the step {step.tokens} tokens")
        if layer.shape is not shape:
            check_heads(layer, shape)
        return step

    def _step_of(self, ctx: StepContext, group: int, window: int, layer: CpuLayerCache) -> Step:
        step = self._step
        if step is None or step.ctx is not ctx or step.tensors[0] is not ctx.positions:
            step = self._step = read_step(ctx)
        key = (group, window, layer.blocks, layer.block_size)
        if key not in step.checked:
            self._check_step(step, group, window, layer.blocks, layer.block_size)
            step.checked.add(key)
        return step

    def _check_step(self, step: Step, group: int, window: int, blocks: int, size: int) -> None:
        fault = self._library.quire_check_step(
            step.query_start, step.context_len, step.tables[group], step.slots[group], step.detours,
            step.detour_stride, step.strides[group], step.widths[group], step.seqs, step.tokens, size, blocks, window,
        )  # fmt: skip
        if fault:
            raise EngineError(f"the step's context is broken: {STEP_FAULTS[fault]}")

    def _take_rope(self, step: Step, rope: Tensor | None) -> None:
        """Remember the rotary table of this step's layers, once it is known to hold the step's positions."""
        step.rope, step.rope_ptr, step.rot = None, None, 0
        if rope is None:
            return
        rows, rot = rope.shape
        if rot % 2 or rope.dtype is not F32 or not dense(rope):
            raise EngineError("the rotary table must be contiguous float32 with an even number of columns")
        if self._library.quire_check_ids(step.positions, step.tokens, rows):
            raise EngineError(f"a position lies outside the rotary table's 0..{rows - 1}")
        step.rope, step.rope_ptr, step.rot = rope, rope.data_ptr(), rot
