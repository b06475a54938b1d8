"""Who proposes drafts with a model, on the device, before the target judges them in the same step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from quire.scheduler.plan import PlanEntry


class Drafter(ABC):
    """Fills in the drafts of the entries that ask for some."""

    @abstractmethod
    def propose(self, entries: Sequence[PlanEntry]) -> tuple[list[PlanEntry], dict[int, Tensor]]:
        """The entries with the values of their drafts (perhaps fewer than asked for, and then fewer tokens), and by
        place of the entry the integer weights [drafts, vocabulary] that its drafts were drawn with."""
