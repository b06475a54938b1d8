"""Partitions of a specialised Gluon program, as `gluon_interpreter` runs them: threads of which one has the baton.

Whoever must wait for a barrier hands the baton on; with a seed also others do, at random at any operation, so that each
seed is an interleaving of its own, the same every time. What a partition knows of the others does not depend on that:
it is what barriers have told it, not what happens to be done.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.kernels.triton.gluon_memory import Knowledge, Mma, ProtocolError, demand

_RESTLESS = 0.3
"""How likely an operation hands the baton on."""


class _EndedElsewhere(BaseException):
    """Another partition has failed: this one just ends."""


@dataclass(eq=False)
class Partition:
    """Warps that run one function: what they have under way and what they may do."""

    name: str
    warps: int
    may_read: bool
    """What the kernel before this one has written: gdc_wait is behind them."""
    unpublished: bool = False
    """Stores that no barrier of the threads has followed."""
    mmas: list[Mma] = field(default_factory=list)
    knows: Knowledge = field(default_factory=Knowledge)
    ready: Callable[[], bool] = lambda: True
    waits_for: Callable[[], str] = lambda: "nothing"
    awake: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))

    def fork(self, name: str, warps: int) -> Partition:
        """A worker, which begins after all that this one has done."""
        return Partition(name, warps, self.may_read, knows=self.knows.told(self))

    def end(self) -> None:
        demand(not self.mmas, f"{self.name} ended with MMAs under way")


def _stuck(*all_left: Partition) -> ProtocolError:
    waiting = sorted(f"{each.name} waits for {each.waits_for()}" for each in all_left)
    return ProtocolError(f"never ends: {', '.join(waiting)}")


class Baton:
    """Which of a program's partitions runs."""

    def __init__(self, first: Partition, seed: int | None) -> None:
        self.holder = first
        self.others: list[Partition] = []
        self.failure: BaseException | None = None
        self.chance = None if seed is None else random.Random(seed)

    def step(self) -> Partition:
        """Called at every operation: who has the baton then, that is, whoever called."""
        if self.others and self.chance is not None and self.chance.random() < _RESTLESS:
            self._pass()
        return self.holder

    def until(self, ready: Callable[[], bool], what: Callable[[], str]) -> None:
        """Others run until this holds."""
        if not ready():
            me = self.holder
            me.ready, me.waits_for = ready, what
            self._pass()
            me.ready = lambda: True

    def _pass(self) -> None:
        """The baton goes to anyone who can go on, perhaps to whoever has it."""
        me = self.holder
        able = [each for each in (*self.others, me) if each.ready()]
        if not able:
            raise _stuck(me, *self.others)
        chosen = able[0] if self.chance is None else self.chance.choice(able)
        if chosen is not me:
            self._hand(me, chosen)
            me.awake.acquire()
            if self.failure is not None:
                raise _EndedElsewhere

    def _hand(self, me: Partition | None, chosen: Partition) -> None:
        self.others.remove(chosen)
        if me is not None:
            self.others.append(me)
        self.holder = chosen
        chosen.awake.release()

    def run(self, bodies: list[tuple[Partition, Callable[[], Any]]]) -> Any:
        """All partitions to their ends, the first as whoever has the baton; its result."""
        found: list[Any] = [None]
        ended = threading.Semaphore(0)
        main, inference = self.holder, torch.is_inference_mode_enabled()

        def live(partition: Partition, body: Callable[[], Any]) -> None:
            partition.awake.acquire()
            try:
                if self.failure is None:
                    with torch.inference_mode(inference):  # a thread has its own
                        result = body()
                    partition.end()
                    if partition is main:
                        found[0] = result
            except BaseException as error:
                if not isinstance(error, _EndedElsewhere):
                    self.failure = error
            self._leave(ended)

        threads = [threading.Thread(target=live, args=each, daemon=True) for each in bodies]
        for thread in threads:
            thread.start()
        self.others = [partition for partition, _ in bodies]
        self._hand(None, self.others[0] if self.chance is None else self.chance.choice(self.others))
        ended.acquire()
        for thread in threads:
            thread.join()
        if self.failure is not None:
            raise self.failure
        self.holder = main
        return found[0]

    def _leave(self, ended: threading.Semaphore) -> None:
        """A partition is done: anyone else goes on; all, to their end, if it failed."""
        able = [each for each in self.others if self.failure is not None or each.ready()]
        if able:
            self._hand(None, able[0])
        elif self.others:
            self.failure = _stuck(*self.others)
            self._hand(None, self.others[0])
        else:
            ended.release()
