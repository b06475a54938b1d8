"""Which part of a layer one tensor rank has, as plain data: a run of whole query heads and of the MLP's slices."""

from __future__ import annotations

from dataclasses import dataclass

from quire.kernels.slices import RankTree, Slices, rank_run
from quire.kernels.types import HeadShape
from quire.layers.spec import AttentionSpec, MlpSpec, MoeSpec


@dataclass(frozen=True, slots=True)
class HeadShare:
    """Query heads [first, last) of a layer's, and the kv heads [first_kv, last_kv) that they read.

    A kv head is held by every rank whose query heads read it.
    """

    first: int
    last: int
    first_kv: int
    last_kv: int

    @classmethod
    def of(cls, spec: AttentionSpec, rank: int, size: int) -> HeadShare:
        whole = Slices.of_heads(spec.num_heads, 1)
        first, last = (whole.border(index) for index in rank_run(whole.total, rank, size))
        group = spec.num_heads // spec.num_kv_heads
        return cls(first, last, first // group, (last - 1) // group + 1)

    def shape(self, spec: AttentionSpec) -> HeadShape:
        """The rank's part of a row of q, k and v."""
        group = spec.num_heads // spec.num_kv_heads
        heads, kv_heads = self.last - self.first, self.last_kv - self.first_kv
        if heads == spec.num_heads:
            return HeadShape(heads, kv_heads, spec.head_dim)
        return HeadShape(heads, kv_heads, spec.head_dim, group, self.first - self.first_kv * group)

    def slices(self, spec: AttentionSpec) -> Slices:
        """Of the output projection's sum."""
        width = spec.value_width
        return Slices.of_heads(spec.num_heads, width).over(self.first * width, self.last * width)


@dataclass(frozen=True, slots=True)
class LayerShare:
    """What tensor rank `rank` of `size` has of a layer. It follows from the spec, so ranks need not tell each other."""

    attention: AttentionSpec
    mlp: MlpSpec | MoeSpec
    rank: int
    size: int

    @property
    def heads(self) -> HeadShare:
        return HeadShare.of(self.attention, self.rank, self.size)

    @property
    def head_tree(self) -> RankTree:
        """The sum of the output projection."""
        return RankTree.even(Slices.of_heads(self.attention.num_heads, 1).total, self.size)

    @property
    def mlp_slices(self) -> Slices:
        """Of the width of a dense MLP, or of the one that runs beside experts."""
        whole = Slices.of_width(dense_width(self.mlp))
        return whole.part(*rank_run(whole.total, self.rank, self.size))

    @property
    def mlp_columns(self) -> tuple[int, int]:
        """Columns of the MLP's width: rows of gate and up, columns of down."""
        slices = self.mlp_slices
        return slices.border(slices.first), slices.border(slices.last)

    @property
    def mlp_tree(self) -> RankTree:
        return RankTree.even(self.mlp_slices.total, self.size)

    @property
    def expert_run(self) -> Slices:
        """The ranges of experts that this rank has."""
        whole = Slices.of_experts(num_experts(self.mlp))
        return whole.part(*rank_run(whole.total, self.rank, self.size))

    @property
    def expert_runs(self) -> tuple[tuple[int, int], ...]:
        """The experts [first, last) of every rank."""
        whole = Slices.of_experts(num_experts(self.mlp))
        runs = [rank_run(whole.total, rank, self.size) for rank in range(self.size)]
        return tuple((whole.border(first), whole.border(last)) for first, last in runs)

    @property
    def expert_tree(self) -> RankTree:
        return RankTree.even(self.expert_run.total, self.size)

    def has_expert(self, index: int) -> bool:
        run = self.expert_run
        return run.border(run.first) <= index < run.border(run.last)


def dense_width(mlp: MlpSpec | MoeSpec) -> int:
    """Columns that every token goes through; 0 where there are experts only."""
    dense = mlp if isinstance(mlp, MlpSpec) else mlp.shared
    return 0 if dense is None else dense.intermediate


def num_experts(mlp: MlpSpec | MoeSpec) -> int:
    return mlp.router.num_experts if isinstance(mlp, MoeSpec) else 0


def num_slices(mlp: MlpSpec | MoeSpec) -> int:
    """Most ranks that can share it: each has at least one slice of what there is."""
    width, experts = dense_width(mlp), num_experts(mlp)
    found = [Slices.of_width(width).total] if width else []
    return min(found + ([Slices.of_experts(experts).total] if experts else []))
