"""Drafts of a head over pipeline stages: the last stage proposes, and tells the others before they launch the step.

The first stage needs the drafts as its input, so nobody can launch a step with drafts before the head has made them.
They travel over the host, as drawn tokens do: the last stage waits for its drafts, the others wait for what it says.
The scheduler measures what such steps take, and asks for no drafts where they do not pay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Protocol

from quire.errors import InvariantError, StepError
from quire.parallel.collectives import Collectives, Link
from quire.parallel.place import Place
from quire.scheduler.plan import PlanEntry, StepPlan
from quire.worker.drafter import with_drafts
from quire.worker.gpu.drafted import Drafted, DraftSource
from quire.worker.gpu.table import DeviceTable
from quire.worker.passes import Lists, receive_lists, send_lists


class StageTalk(Protocol):
    """What the last stage says to the others; None: it has failed, and the step is lost on all of them."""

    def say(self, lists: Lists | None) -> None: ...

    def hear(self) -> Lists | None: ...


class LinkTalk:
    """Round the ring of stages, from the last one to the one before it. Every tensor rank tells its own."""

    def __init__(self, place: Place, before: Link, after: Link) -> None:
        self._place, self._before, self._after = place, before, after

    @classmethod
    def of(cls, place: Place, collectives: Collectives | None) -> LinkTalk | None:
        """None where there is one stage."""
        if collectives is None or collectives.before is None or collectives.after is None:
            return None
        return cls(place, collectives.before, collectives.after)

    def say(self, lists: Lists | None) -> None:
        """The first list says whether there are others."""
        send_lists(self._after, [[0], *lists] if lists is not None else [[1]])

    def hear(self) -> Lists | None:
        found = receive_lists(self._before)
        if self._place.stage < self._place.num_stages - 2:
            send_lists(self._after, found)
        return None if found[0][0] else found[1:]


class TellingDrafts:
    """On the last stage: what the head proposes is said to the others."""

    def __init__(self, drafter: DraftSource, talk: StageTalk, watched: Callable[[], AbstractContextManager[None]]
                 ) -> None:
        """`watched`: around a wait for the device."""
        self._drafter, self._talk, self._watched = drafter, talk, watched

    def follow(self, plan: StepPlan) -> None:
        self._drafter.follow(plan)

    def draft_on(self, drafted: Drafted) -> bool:
        return self._drafter.draft_on(drafted)

    def propose(self, entries: Sequence[PlanEntry], table: DeviceTable) -> tuple[list[PlanEntry], Drafted]:
        return self._drafter.propose(entries, table)

    def tell(self, asked: Sequence[PlanEntry], filled: Sequence[PlanEntry], drafted: Drafted | None) -> None:
        lists: Lists | None = None
        try:
            if drafted is not None:
                with self._watched():
                    found = drafted.trees_by_entry()
                asking = [i for i, entry in enumerate(asked) if entry.device_drafts]
                lists = [[filled[i].num_tokens for i in asking], *(found[i][0] for i in asking),
                         *(found[i][1] for i in asking)]
        finally:
            self._talk.say(lists)


class ToldDrafts:
    """On the stages before it: drafts are what the last stage says."""

    def __init__(self, talk: StageTalk) -> None:
        self._talk = talk

    def follow(self, plan: StepPlan) -> None:
        pass

    def draft_on(self, drafted: Drafted) -> bool:
        return False

    def propose(self, entries: Sequence[PlanEntry], table: DeviceTable) -> tuple[list[PlanEntry], Drafted]:
        asking = [i for i, entry in enumerate(entries) if entry.device_drafts]
        found = self._talk.hear()
        if found is None:
            raise StepError("the last pipeline stage could not make drafts for this step")
        sizes, count = found[0], len(asking)
        if len(sizes) != count:
            raise InvariantError(f"drafts of {len(sizes)} sequences were told, not of {count}")
        filled = with_drafts(entries, dict(zip(asking, found[1 : 1 + count], strict=True)),
                             dict(zip(asking, found[1 + count :], strict=True)))
        for i, size in zip(asking, sizes, strict=True):
            # A tree may have fewer nodes than rows, which all stages have.
            filled[i] = replace(filled[i], num_tokens=size)
        return filled, Drafted.known(filled)

    def tell(self, asked: Sequence[PlanEntry], filled: Sequence[PlanEntry], drafted: Drafted | None) -> None:
        """Nobody waits for it."""
