"""The part of a GGUF file's matrix that a rank wants, of which rows are read when they are asked for."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.quantized import UNIT, QuantizedWeight, joined
from quire.kernels.unread import UnreadRows, UnreadWeight
from quire.models.loader.gguf import GgufFile, GgufTensor
from quire.models.shard import Run


@dataclass(frozen=True, slots=True)
class GgufRows:
    """Runs of rows, or of columns, one below or beside the other."""

    file: GgufFile
    tensor: GgufTensor
    rows: tuple[Run, ...]
    columns: tuple[Run, ...]
    order: Tensor | None
    """int64: row i is row order[i] of the runs, where a converter changed their order."""

    @property
    def shape(self) -> tuple[int, int]:
        return sum(stop - start for start, stop in self.rows), sum(stop - start for start, stop in self.columns)

    @property
    def cuts_groups(self) -> bool:
        """Whether a border lies between columns that share a scale."""
        coding = self.tensor.format.coding
        return coding is not None and any(edge % coding.group for run in self.columns for edge in run)

    @property
    def cuts_blocks(self) -> bool:
        return any(edge % self.tensor.format.block_elements for run in self.columns for edge in run)

    def unread(self) -> UnreadWeight | UnreadRows:
        """All of it, left in the file. Floats are what has no codes, or codes that no CPU multiplies."""
        coding = self.tensor.format.coding
        if coding is None or self.cuts_groups:
            return UnreadRows(0, self.shape, self.floats, coded=True)
        scale_bytes = 2 if self.tensor.format.block_elements == UNIT else 1  # blocks of one group store half precision
        return UnreadWeight(0, self.shape, coding.bits, coding.zero, coding.group, coding.offsets, scale_bytes,
                            self.codes)

    def floats(self, start: int, stop: int) -> Tensor:
        """float32 rows [start, stop)."""
        spans, picked = self._spans(start, stop)
        found = torch.cat([torch.cat([
            torch.from_numpy(self.file.read_range(self.tensor, 0, *span, columns)) for columns in self.columns], 1)
            for span in spans])
        return found if picked is None else found[picked]

    def codes(self, start: int, stop: int) -> QuantizedWeight:
        """The same in the file's own bits."""
        spans, picked = self._spans(start, stop)
        found = joined([joined([self._codes(span, columns) for columns in self.columns], 1) for span in spans], 0)
        return found if picked is None else found.rows(picked)

    def _spans(self, start: int, stop: int) -> tuple[list[Run], Tensor | None]:
        """Rows of the file that hold these, and which of them these are; None: all, in their order."""
        picked = None
        if self.order is not None:
            wanted = self.order[start:stop]
            start, stop = (int(wanted.min()), int(wanted.max()) + 1) if len(wanted) else (0, 0)
            picked = wanted - start
        found, before = [], 0
        for first, last in self.rows:
            low, high = max(start - before, 0), min(stop - before, last - first)
            if low < high:
                found.append((first + low, first + high))
            before += last - first
        return found, picked

    def _codes(self, rows: Run, columns: Run) -> QuantizedWeight:
        coding = self.tensor.format.coding
        if coding is None:
            raise InvariantError(f"the GGUF tensor {self.tensor.name!r} has no codes")
        found = self.file.read_codes(self.tensor, 0, *rows, columns)
        offsets, steps = (None if each is None else torch.from_numpy(each) for each in (found.offsets, found.steps))
        return QuantizedWeight(torch.from_numpy(found.codes), torch.from_numpy(found.scales), offsets, coding.zero,
                               coding.bits, coding.group, steps=steps)
