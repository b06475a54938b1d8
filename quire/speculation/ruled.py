"""Lookups for sequences under a grammar, beside the drafts of a model: masks need the drafts, and the host does not
know those of a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from quire.speculation.choice import Drafts
from quire.speculation.costs import StepCosts
from quire.speculation.ngram import NgramSource
from quire.speculation.speculator import LookupSpeculator

if TYPE_CHECKING:
    from quire.scheduler.draft import Planned
    from quire.scheduler.plan import EntryResult, PlanEntry
    from quire.scheduler.request import Sequence as Text


class RuledLookups:
    """A sequence under a grammar never has a token in flight when a step is planned: its mask needs that token."""

    def __init__(self, most: int, adaptive: bool, clock: Callable[[], float], times: StepCosts) -> None:
        self._lookups = LookupSpeculator(NgramSource(1), most, adaptive, clock)
        self._lookups.times = times

    def choose(self, sequences: Sequence[Text], num_decoding: int, room: int) -> dict[int, Drafts]:
        return {} if not sequences or room <= 0 else self._lookups._choose(list(sequences), num_decoding, room)

    def read(self, planned: list[Planned], single: bool) -> None:
        """A step begins; `single`: of plain decodes alone, which begin no prompt."""
        if not single or self._lookups._followed:
            self._lookups.read([one for one in planned if one[0].request.start_grammar is not None])

    def follows(self, seq: Text) -> bool:
        return seq in self._lookups._followed

    def learn(self, seq: Text, entry: PlanEntry, accepted: int, result: EntryResult) -> None:
        """Of the sequences that it follows."""
        self._lookups._learn(seq, entry, accepted, result)

    def forget(self, seq: Text) -> None:
        self._lookups.forget(seq)
