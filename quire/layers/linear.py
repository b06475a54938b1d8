"""Linear layers: each owns its weight's format, and is put together from the parts a checkpoint stores.

Where ranks share a layer, some projections are cut by their output (`Linear` with fewer rows: nobody has to talk), some
by their input (`SharedLinear`: ranks exchange sums), the vocabulary by its rows (`SharedEmbedding`, `VocabularyHead`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.quantized import CodedWeight, FloatWeight, StoredWeight, WeightUse
from quire.kernels.slices import RankTree, Slices
from quire.kernels.types import StepContext
from quire.layers.stream import ResidualStream, Rows, Unnormed
from quire.ops.interface import Ops, PackedLinear
from quire.parallel.collectives import TensorGroup


class Linear:
    """One projection, or several that share their input and are run as one (q, k and v; gate and up).

    Parts wait as they came until the last one is there, then are packed and let go of: peak memory is the packed
    weights plus one layer's sources, of which large ones may still be in their file (`quire.kernels.unread`). Nothing
    is allocated from what a config says before the tensors came. `slices` fix the order of its sums where ranks may
    share them (see `quire.kernels.slices`).
    """

    def __init__(
        self, ops: Ops, parts: Sequence[str], bias: bool, dtype: torch.dtype | None, slices: Slices | None = None,
        use: WeightUse = WeightUse.LAYER, uses: Mapping[str, WeightUse] | None = None,
    ) -> None:
        """`dtype` None: weights are handed to be packed in the type they are stored in. `uses`: of parts that have
        another than `use`."""
        self._ops = ops
        self._parts = tuple(parts)
        self._bias = bias
        self._dtype = dtype
        self._slices = slices
        self._use = use
        self._uses = uses or {}
        self._waiting: dict[tuple[str, str], StoredWeight] = {}
        self._coded: set[str] = set()
        """Parts of which the device multiplies with codes."""
        self._packed: PackedLinear | None = None

    @property
    def is_loaded(self) -> bool:
        """Not so where its weights belong to another stage."""
        return self._packed is not None

    @property
    def packed(self) -> PackedLinear:
        if self._packed is None:
            raise InvariantError(f"a linear layer of {self._parts} was used before its weights came")
        return self._packed

    def receive(self, part: str, kind: str, tensor: StoredWeight) -> None:
        """Take one stored tensor, of the shape the spec declared."""
        if kind == "weight":
            kept: StoredWeight | None = self._ops.quantized(tensor, self._slices, self._uses.get(part, self._use))
            if kept is not None:
                self._coded.add(part)
            elif isinstance(tensor, CodedWeight) and not self._packs_parts:  # a slice's border would cut a group
                kept = tensor.dequantized()
            tensor = tensor if kept is None else kept
        self._waiting[part, kind] = tensor
        if len(self._waiting) == len(self._parts) * (2 if self._bias else 1):
            self._pack(self._joined("bias") if self._bias else None)

    def _pack(self, bias: Tensor | None) -> None:
        """The weight is of codes where the device multiplies with those of every part, or parts each in their own
        form."""
        mixed = self._ops.mixes_formats and self._use is not WeightUse.EXPERT
        if not self._coded or (len(self._coded) < len(self._parts) and not mixed):
            if self._packs_parts:
                came = [self._waiting.pop((part, "weight")) for part in self._parts]
                self._packed = self._ops.pack_parts(came, bias, self._slices)
            else:
                self._packed = self._ops.pack_linear(self._joined("weight"), bias, self._slices)
            return
        held = [self._waiting[part, "weight"] for part in self._parts]
        parts = [part if isinstance(part, CodedWeight) else FloatWeight(part) for part in held]
        self._packed = self._ops.pack_quantized(parts, bias, self._slices, self._use)
        for part in self._parts:
            del self._waiting[part, "weight"]

    @property
    def _packs_parts(self) -> bool:
        """Whether parts are packed as they came, to float32."""
        return self._ops.packs_parts and self._dtype in (None, torch.float32)

    def adopt(self, packed: PackedLinear) -> None:
        """The same weight where it lies now, as one of a group."""
        self._packed = packed

    def _joined(self, kind: str) -> Tensor:
        held = [self._waiting.pop((part, kind)) for part in self._parts]
        parts = [part.dequantized() if isinstance(part, CodedWeight) else part for part in held]
        stored = {part.dtype for part in parts}
        dtype = self._dtype or (stored.pop() if len(stored) == 1 else torch.float32)
        if len(parts) == 1:
            return parts[0].to(dtype).contiguous()
        joined = torch.empty(sum(part.shape[0] for part in parts), *parts[0].shape[1:], dtype=dtype)
        start = 0
        for part in parts:
            joined[start : start + part.shape[0]].copy_(part)
            start += part.shape[0]
        return joined

    def __call__(self, x: Rows, ctx: StepContext | None, out: Tensor | None = None) -> Tensor:
        """x W^T (+ bias), into `out` if given. The step's context is for layers that add adapters to some rows."""
        if isinstance(x, Unnormed):
            return self._ops.norm_linear(x.rows, x.norm.gain, x.norm.eps, self.packed, None, out)
        return self._ops.linear(x, self.packed, None, out)

    def gated(self, x: Rows, ctx: StepContext | None, activation: str, reader: PackedLinear | None = None) -> Tensor:
        """act(first half of x W^T) * second half; `reader`: the one weight that will be multiplied by it."""
        if isinstance(x, Unnormed):
            return self._ops.norm_linear(x.rows, x.norm.gain, x.norm.eps, self.packed, activation)
        return self._ops.gated_linear(x, self.packed, activation, reader)

    def add_to(self, stream: ResidualStream, x: Tensor, ctx: StepContext | None) -> None:
        """stream += x W^T (+ bias)."""
        if stream.owes:
            stream.owe(self._ops.linear(x, self.packed))
        elif stream.rounds:
            stream.rows = self._ops.add_linear(x, self.packed, stream.rows)
        else:
            stream.rows = self._ops.linear(x, self.packed, stream.rows)


class LinearGroup:
    """Linear layers of one shape, each for some rows: experts, or heads."""

    def __init__(self, ops: Ops, linears: Sequence[Linear]) -> None:
        self._ops = ops
        self.linears = tuple(linears)
        self.group: Any = None
        """In the device's form, once all weights came."""
        self._left = len(linears)

    def receive(self, index: int, part: str, kind: str, tensor: Tensor) -> None:
        linear = self.linears[index]
        linear.receive(part, kind, tensor)
        self._left -= linear.is_loaded
        if self._left == 0:
            self.group = self._ops.group_linears([linear.packed for linear in self.linears])
            for linear, packed in zip(self.linears, self.group.members, strict=True):
                linear.adopt(packed)

    def __call__(self, x: Tensor, counts: Tensor) -> Tensor:
        """The first counts[0] rows of x through the first one, the next counts[1] through the second, and so on."""
        return self._ops.grouped_linear(x, counts, self.group)

    def of_heads(self, x: Tensor) -> Tensor:
        """[members, T, out] of x [members, T, in], contiguous."""
        return self._ops.head_linear(x, self.group)


class SharedLinear(Linear):
    """A projection whose input ranks share: each has the columns of its run of the sum's slices, and the whole bias.

    Ranks exchange the nodes of the sum's tree that lie within their runs, in float32. Each finishes the tree, then adds
    the bias, then the residual: the additions of one rank that has it all, in the same order.
    """

    def __init__(
        self,
        ops: Ops,
        part: str,
        bias: bool,
        dtype: torch.dtype | None,
        slices: Slices,
        tree: RankTree,
        ranks: TensorGroup,
    ) -> None:
        super().__init__(ops, (part,), bias, dtype, slices)
        self._tree = tree
        self._most_nodes = tree.most_nodes
        self._ranks = ranks
        self._added: Tensor | None = None
        """The bias: it is added once, after the tree."""

    def _pack(self, bias: Tensor | None) -> None:
        super()._pack(None)
        self._added = None if bias is None else bias.to(torch.float32)

    def __call__(self, x: Rows, ctx: StepContext | None, out: Tensor | None = None) -> Tensor:
        found = self._summed(x.normed() if isinstance(x, Unnormed) else x, None)
        return found if out is None else out.copy_(found)

    def gated(self, x: Rows, ctx: StepContext | None, activation: str, reader: PackedLinear | None = None) -> Tensor:
        return self._ops.act_mul(self(x, ctx), activation)

    def add_to(self, stream: ResidualStream, x: Tensor, ctx: StepContext | None) -> None:
        if stream.owes:
            stream.owe(self._summed(x, None))
        elif stream.rounds:
            stream.add(self._summed(x, None))
        else:
            stream.rows = self._summed(x, stream.rows)

    def _summed(self, x: Tensor, residual: Tensor | None) -> Tensor:
        rows, width = x.shape[0], self.packed.out_features
        most = self._ranks.rows_at_once(4 * width * self._most_nodes)
        if rows <= most:
            return self._sum_some(x, residual)
        pieces = [slice(start, start + most) for start in range(0, rows, most)]
        return torch.cat([self._sum_some(x[piece], None if residual is None else residual[piece]) for piece in pieces])

    def _sum_some(self, x: Tensor, residual: Tensor | None) -> Tensor:
        return self._ops.linear_over_ranks(x, self.packed, self._ranks, self._tree, self._added, residual)


class Embedding(Linear):
    """A table of rows: token or position embeddings. A tied head projects on the same packed table."""

    def __init__(self, ops: Ops, dtype: torch.dtype | None, use: WeightUse = WeightUse.VOCABULARY) -> None:
        super().__init__(ops, ("",), False, dtype, use=use)

    def rows(self, ids: Tensor) -> Tensor:
        return self._ops.embed(ids, self.packed)


class SharedEmbedding(Embedding):
    """A table of which each rank has a run of rows; `runs` are those of all ranks."""

    def __init__(
        self, ops: Ops, dtype: torch.dtype | None, runs: Sequence[tuple[int, int]], ranks: TensorGroup
    ) -> None:
        super().__init__(ops, dtype)
        self._runs = runs
        self._ends = torch.tensor([last for _, last in runs])
        self._ranks = ranks

    def rows(self, ids: Tensor) -> Tensor:
        return self._ops.embed_over_ranks(ids, self.packed, self._ranks, self._runs, self._ends)


class SharedHead(Protocol):
    """A head that several ranks compute."""

    def logits(self, x: Tensor, ctx: StepContext | None, out: Tensor | None = None) -> Tensor | None:
        """[rows, vocabulary], in `out` if given, on ranks that draw; None on the others."""


class VocabularyHead:
    """The head whose vocabulary rows ranks share: logits of all of them, on those that draw."""

    def __init__(self, table: Linear, runs: Sequence[tuple[int, int]], ranks: TensorGroup) -> None:
        self._table = table
        self._widths = [last - first for first, last in runs]
        self._ranks = ranks

    def logits(self, x: Tensor, ctx: StepContext | None, out: Tensor | None = None) -> Tensor | None:
        """[rows, vocabulary], in `out` if given, on ranks that draw; None on the others."""
        rows, ranks = x.shape[0], self._ranks
        if out is None and (ranks.rank == 0 or ranks.on_device):
            out = x.new_empty(rows, sum(self._widths))
        most = ranks.rows_at_once(4 * max(self._widths))
        for start in range(0, rows, most):
            some = x[start : start + most]
            part = self._table(some, ctx, ranks.room(some.shape[0], self._widths[ranks.rank], x.dtype))
            ranks.gather(part, self._widths, None if out is None else out[start : start + most])
        return out
