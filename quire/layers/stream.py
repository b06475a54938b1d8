"""The residual stream of a step: rows that layers read through a norm and add to, and what a device fuses on the way.

A layer asks for `normed` rows and hands them to its first GEMM; its last one adds to the stream (`Linear.add_to`).
Between the two the stream may owe a sum, or hand out rows whose norm is still to come: that is how kernels reach across
the border of a layer, and the only way. A device that fuses nothing declines in `Ops.fusion`.
"""

from __future__ import annotations

from torch import Tensor

from quire.layers.norm import Norm
from quire.ops.interface import Fusion, Ops, PackedLinear


class Unnormed:
    """Rows still to be normed: the GEMM they are for takes the RMS norm along."""

    __slots__ = ("norm", "rows")

    def __init__(self, rows: Tensor, norm: Norm) -> None:
        self.rows = rows
        self.norm = norm

    def normed(self) -> Tensor:
        """The rows after their norm, for layers that cannot fuse it into their GEMM."""
        return self.norm(self.rows)


Rows = Tensor | Unnormed
"""What a layer's part reads. Where a reader was named it may be a form of rows that only its GEMM takes."""


class ResidualStream:
    """`rows` [T, hidden], and maybe a sum that they are still owed. Used up by whoever norms it next."""

    __slots__ = ("_fusable", "_fuses", "_ops", "_owed", "owes", "rounds", "rows")

    def __init__(self, ops: Ops, rows: Tensor, fusable: bool, owed: Tensor | None = None) -> None:
        """`fusable`: every norm that reads it is an RMS norm before a layer's part, so a device may fuse. Rows that
        are owed sums are added to in place."""
        fusion = ops.fusion(*rows.shape) if fusable else Fusion.NONE
        self._ops = ops
        self._fusable = fusable
        self._fuses = fusion in (Fusion.NORM_WITH_GEMM, Fusion.NORM_WITH_ROUNDED_GEMM)
        self.owes = fusion is Fusion.SUM_WITH_NORM
        """A GEMM's result is handed to `owe`; else the GEMM adds `rows` to it, and the sum is the new `rows`."""
        self.rounds = fusion is Fusion.NORM_WITH_ROUNDED_GEMM
        """The result is rounded before `rows` are added to it (`Ops.add_linear`, `add`)."""
        self._owed = owed
        self.rows = rows

    def __len__(self) -> int:
        return self.rows.shape[0]

    def __getitem__(self, index: Tensor | slice) -> ResidualStream:
        """Some of the rows, as a stream of their own; a slice of them is used up with it."""
        owed = None if self._owed is None else self._owed[index].contiguous()
        return ResidualStream(self._ops, self.rows[index].contiguous(), self._fusable, owed)

    def normed(self, norm: Norm, reader: PackedLinear | None = None) -> Rows:
        """The rows through a norm, with the sum that was owed; for one GEMM alone if a reader is named."""
        owed = self._owed
        if owed is not None:
            self._owed = None
            return self._ops.add_rms_norm(owed, self.rows, norm.weight, norm.eps, reader)
        if self._fuses:
            return Unnormed(self.rows, norm)
        return norm(self.rows)

    def owe(self, result: Tensor) -> None:
        """A GEMM's result, without the residual: whoever norms the stream next adds it."""
        if self._owed is not None:
            self.rows.add_(self._owed)
        self._owed = result

    def add(self, x: Tensor) -> None:
        self.rows = self._ops.add(self.settled(), x)
        self._owed = None

    def settled(self) -> Tensor:
        """The rows with the sum that is owed: what the next stage of a pipeline gets."""
        return self.rows if self._owed is None else self.rows + self._owed

    def kept(self) -> Tensor:
        """As `settled`; what is added to the stream later does not change it. On a CPU, and where a device's GEMMs take
        norm and sum along, every sum goes into new memory, so these are the rows themselves; rows that are owed sums
        are added to in place."""
        return self.settled() if self._fuses or (self._ops.attention is None and not self.owes) else self.copied()

    def copied(self) -> Tensor:
        """As `settled`, in memory of its own."""
        return self.rows.clone() if self._owed is None else self._ops.add(self.rows, self._owed)
