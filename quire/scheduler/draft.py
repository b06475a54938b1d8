"""The step under construction."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from quire.scheduler.leaders import PrefixLeaders
from quire.scheduler.plan import PlanEntry, TableDiff
from quire.scheduler.request import Request, Sequence
from quire.scheduler.step_cost import StepLoad
from quire.speculation.choice import DraftChoice, Drafts

Planned = tuple[Sequence, PlanEntry, int]
"""A plan entry with the sequence it speaks of, and the sequence's epoch."""


class AdmissionResult(enum.Enum):
    """What became of the request at the head of the queue."""

    DONE = "done"
    LATER = "later"
    """The step has no tokens left for it, or blocks that it needs are still being copied out."""
    WAITS = "waits"
    """For a prefix that another request computes, a mask, or its own KV under way: others may go before it."""
    NO_ROOM = "no room"
    AGAIN = "again"
    """A tier has lost what it had found: look at the request once more, without that."""


@dataclass(slots=True)
class Draft:
    budget: int
    load: StepLoad | None = None
    """What is planned so far, where a pacer wants to know."""
    decoding: list[Sequence] = field(default_factory=list)
    """Running sequences that lack one token; some may lose their row while the draft is made."""
    prefilling: list[Sequence] = field(default_factory=list)
    """Running sequences that lack more."""
    planned: dict[int, Planned] = field(default_factory=dict)
    """By row, in the order of planning."""
    proposals: dict[int, Drafts] = field(default_factory=dict)
    """By row: proposed tokens, for which there may be room."""
    made_way: list[Request] = field(default_factory=list)
    """Preempted for a request of higher priority; they wait for the next step at least."""
    leaders: PrefixLeaders | None = None
    """Made when a waiting request is looked at."""
    decodes_only: bool = True
    """Every entry planned so far computes one token and draws; of masks nothing is said."""
    preempted: bool = False
    short: bool = False
    """A running sequence found no block, though some will come free when plans in flight are done."""

    def add(self, seq: Sequence, entry: PlanEntry) -> None:
        self.planned[seq.row] = (seq, entry, seq.epoch)
        self.budget -= entry.num_tokens
        if self.load is not None:
            _add_load(self.load, seq, entry)

    def take_choice(self, choice: DraftChoice) -> None:
        """Drafts that were chosen for decoding sequences; some of those wait to have drafts in the next step."""
        self.proposals = choice.drafts
        if choice.waiting:
            self.decoding = [seq for seq in self.decoding if seq.row not in choice.waiting]

    def partial_prefills(self, running: Iterable[Request]) -> int:
        """Running sequences that will still lack more than one token after what is planned for them."""
        count = 0
        for request in running:
            for seq in request.sequences:
                if seq.row >= 0:
                    planned = self.planned.get(seq.row)
                    count += seq.num_to_compute - (planned[1].num_tokens if planned else 0) > 1
        return count

    def drop(self, request: Request) -> None:
        """Plan nothing for a request after all."""
        for seq in request.live:
            planned = self.planned.pop(seq.row, None)
            if planned is not None:
                self.budget += planned[1].num_tokens
        if self.load is not None:
            self.load = StepLoad()
            for seq, entry, _ in self.planned.values():
                _add_load(self.load, seq, entry)


def _add_load(load: StepLoad, seq: Sequence, entry: PlanEntry) -> None:
    """Count a planned entry among what the step costs."""
    rows = int(entry.sample or entry.candidates > 0) + entry.num_drafts
    if entry.prompt_logprobs_from is not None:
        rows += min(entry.start + entry.num_tokens, seq.num_prompt_tokens - 1) - entry.prompt_logprobs_from
    streams = entry.num_tokens == 1 + entry.num_drafts and entry.start >= seq.num_prompt_tokens
    load.add(entry.start, entry.num_tokens, rows, streams)


def table_diffs(seq: Sequence) -> Iterator[TableDiff]:
    """What the worker does not know yet of a sequence's block tables."""
    for group, table in enumerate(seq.kv.tables):
        if table.dirty_from < len(table.blocks):
            start, blocks = table.take_dirty()
            yield TableDiff(seq.row, group, start, blocks)
