"""A run of decode steps for which nothing about drafts is asked, measured or learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.scheduler.draft import Planned
    from quire.scheduler.request import Sequence

LONGEST = 32
"""Steps after which times are looked at again."""


@dataclass(slots=True, eq=False)
class Pause:
    """The same sequences decode, nothing else runs, and drafts do not pay. Where a GPU's step takes half a millisecond,
    the host's work for drafts that no sequence gets would show, so it is done once for all steps of a pause."""

    sequences: list[Sequence]
    left: int
    """Steps that may still be planned."""
    head_rests: bool
    """What `Speculator.submitted` answers for each of its steps."""
    done: int = 0
    """Steps whose results have come in, and the seconds they took."""
    seconds: float = 0.0

    def holds(self, planned: list[Planned]) -> bool:
        """Whether a step of plain decodes is one of this pause, if its sequences were those to decode. A sequence
        admitted in place of a preempted one is the first or the last of the step."""
        mine = self.sequences
        return (self.left > 0 and len(planned) == len(mine) and planned[0][0] is mine[0]
                and planned[-1][0] is mine[-1])
