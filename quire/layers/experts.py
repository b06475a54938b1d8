"""The feed-forward part of a layer as a mixture of experts: a router and the experts, which ranks share.

The bits of a token do not depend on its batch: its experts are added in ascending order within eight fixed ranges of
experts, the ranges in the tree of `quire.kernels.slices`. A rank that shares the layer has a run of whole ranges.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.expert_rows import ExpertRanges
from quire.kernels.quantized import WeightUse
from quire.kernels.routing import LayerLoad, RoutedRows
from quire.kernels.slices import Slices
from quire.kernels.torch_routing import choose_experts
from quire.kernels.types import StepContext
from quire.layers.linear import Linear, LinearGroup
from quire.layers.mlp import Mlp
from quire.layers.share import LayerShare
from quire.layers.spec import MoeSpec
from quire.layers.stream import ResidualStream, Rows, Unnormed
from quire.ops.interface import Ops
from quire.parallel.collectives import TensorGroup


@dataclass(frozen=True, slots=True)
class ExpertLoad:
    """How many rows have gone through each expert since the model was built."""

    layers: tuple[int, ...]
    """Which layers of the model have experts."""
    counts: Tensor
    """int64 [those layers, experts]"""

    def as_data(self, counts: Tensor | None = None) -> list[LayerLoad]:
        """`counts`: where they were copied to; None: where they are counted."""
        rows = (self.counts if counts is None else counts).tolist()
        return [LayerLoad(layer, tuple(row)) for layer, row in zip(self.layers, rows, strict=True)]


def _linears(ops: Ops, parts: tuple[str, ...], bias: bool, dtype: torch.dtype | None, count: int) -> list[Linear]:
    return [Linear(ops, parts, bias, dtype, use=WeightUse.EXPERT) for _ in range(count)]


class Experts:
    """The gated MLPs of a run of experts. None is ever cut: a rank has it whole or not at all."""

    def __init__(self, ops: Ops, spec: MoeSpec, ranges: ExpertRanges, dtype: torch.dtype | None) -> None:
        self._ops = ops
        self._spec = spec
        self._ranges = ranges
        count = ranges.last - ranges.first
        self._up = LinearGroup(ops, _linears(ops, ("gate", "up"), spec.bias, dtype, count))
        self._down = LinearGroup(ops, _linears(ops, ("down",), spec.bias, dtype, count))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self._up.linears, *self._down.linears

    def receive(self, expert: int, part: str, kind: str, tensor: Tensor) -> None:
        (self._down if part == "down" else self._up).receive(expert - self._ranges.first, part, kind, tensor)

    def fused(self, x: Tensor, routed: RoutedRows, residual: Tensor | None) -> Tensor | None:
        """The sums of each row's experts, routing included, where the device has kernels for all of it."""
        spec = self._spec
        return self._ops.routed_experts(
            x, routed, self._up.group, self._down.group, spec.activation, spec.clamp, residual
        )

    def fused_over_ranks(
        self, x: Tensor, routed: RoutedRows, residual: Tensor | None, ranks: TensorGroup,
        runs: Sequence[tuple[int, int]],
    ) -> Tensor | None:
        """The same where ranks share the experts."""
        spec = self._spec
        return self._ops.experts_over_ranks(
            x, routed, self._up.group, self._down.group, spec.activation, spec.clamp, residual, ranks, runs
        )

    def nodes(self, x: Tensor, chosen: Tensor, weights: Tensor, load: Tensor | None) -> Tensor:
        """What these experts add to each node of the tree over the ranges. Only chosen experts are read, each once for
        all rows that want it."""
        pairs = self._ranges.rows_of(chosen, weights)
        if load is not None:
            load.add_(pairs.all_counts)
        inner = self._up(x.index_select(0, pairs.rows), pairs.counts)
        clamp = self._spec.clamp
        if clamp is None:
            inner = self._ops.act_mul(inner, self._spec.activation)
        else:
            inner = self._ops.clamped_act_mul(inner, clamp.limit, clamp.alpha)
        return self._ops.sum_experts(self._down(inner, pairs.counts), pairs, self._ranges)


class Moe:
    """The experts of a layer, seen as `Mlp` is: rows in, rows out, or added to the stream."""

    def __init__(
        self, ops: Ops, spec: MoeSpec, dtype: torch.dtype | None, share: LayerShare | None = None,
        ranks: TensorGroup | None = None,
    ) -> None:
        self._ops = ops
        self._spec = spec
        self._ranks = ranks if share is not None else None
        self._tree = None if share is None else share.expert_tree
        self.router = Linear(ops, ("router",), spec.router.bias, dtype, use=WeightUse.EXACT)
        self._choice_bias: Tensor | None = None
        self.load: Tensor | None = None
        """int64 [experts]: so many rows have gone through each, of all ranks' experts; None: nobody counts."""
        run = Slices.of_experts(spec.router.num_experts) if share is None else share.expert_run
        self._runs = () if share is None else share.expert_runs
        self._experts = Experts(ops, spec, ExpertRanges(run), dtype)
        self._shared = None if spec.shared is None else Mlp(ops, spec.shared, dtype, share, ranks)
        self._shared_gate = (
            Linear(ops, ("shared_gate",), False, dtype, use=WeightUse.EXACT) if spec.shared_gate else None
        )

    @property
    def num_experts(self) -> int:
        """Of all ranks."""
        return self._spec.router.num_experts

    @property
    def reader(self) -> None:
        """Router and experts read the rows themselves."""
        return None

    @property
    def linears(self) -> tuple[Linear, ...]:
        """What every row goes through."""
        return (self.router, *(() if self._shared is None else self._shared.linears))

    @property
    def all_linears(self) -> tuple[Linear, ...]:
        """Those of the experts too, of which a row goes through some."""
        gate = () if self._shared_gate is None else (self._shared_gate,)
        return (*self.linears, *gate, *self._experts.linears)

    def receive(self, part: str, kind: str, tensor: Tensor) -> None:
        """`part` is the parameter's place in the layer's feed-forward part: router, experts.3.up, shared.down."""
        place = part.split(".")
        if place[0] == "experts":
            self._experts.receive(int(place[1]), place[2], kind, tensor)
        elif place[0] == "shared" and self._shared is not None:
            self._shared.receive(place[1], kind, tensor)
        elif place[0] == "shared_gate" and self._shared_gate is not None:
            self._shared_gate.receive(part, kind, tensor)
        elif place[0] == "choice":
            self._choice_bias = tensor.to(torch.float32)
        else:
            self.router.receive(part, kind, tensor)

    def __call__(self, x: Rows, ctx: StepContext) -> Tensor:
        rows = x.normed() if isinstance(x, Unnormed) else x
        found = self._chosen(rows, ctx, None)
        if self._shared is None:
            return found
        beside = self._shared(rows, ctx)
        if self._shared_gate is not None:
            beside = beside * self._shared_gate(rows, ctx).to(torch.float64).sigmoid().to(beside.dtype)
        return found + beside

    def add_to(self, stream: ResidualStream, x: Rows, ctx: StepContext) -> None:
        """stream += self(x)."""
        if stream.owes:
            stream.owe(self(x, ctx))
        elif self._shared is not None or stream.rounds:
            stream.add(self(x, ctx))
        else:
            stream.rows = self._chosen(x.normed() if isinstance(x, Unnormed) else x, ctx, stream.rows)

    def _chosen(self, rows: Tensor, ctx: StepContext, residual: Tensor | None) -> Tensor:
        """The sum of each row's experts, and the residual."""
        slots = ctx.slots[0] if self._ops.attention is not None else None
        routed = RoutedRows(self._spec.router, self.router(rows, ctx), self._choice_bias, slots, self.load)
        if self._ranks is None:
            found = self._experts.fused(rows, routed, residual)
        else:
            found = self._experts.fused_over_ranks(rows, routed, residual, self._ranks, self._runs)
        if found is not None:
            return found
        found = self._routed(rows, *choose_experts(routed.logits, routed.router, routed.choice_bias))
        return found if residual is None else self._ops.add(residual, found)

    def _routed(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """The sum of each row's experts, of all ranks."""
        if self._ranks is None or self._tree is None:
            return self._experts.nodes(x, chosen, weights, self.load)[0]
        most = self._ranks.rows_at_once(4 * x.shape[1] * self._tree.most_nodes)
        parts = [
            self._ranks.sum_nodes(
                self._experts.nodes(x[some], chosen[some], weights[some], self.load), self._tree, None, None
            )
            for some in (slice(start, start + most) for start in range(0, x.shape[0], most))
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
