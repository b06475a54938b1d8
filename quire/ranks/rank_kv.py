"""One rank's part when KV goes to another engine or a store, or comes from there: it copies between its own blocks and
memory that it shares with the engine.

The engine's side is `shared_kv.py`. Jobs run on a thread for each direction, beside the steps.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from quire.errors import KVTransferError, QuireError
from quire.kvtransfer.layout import Piece, Span
from quire.kvtransfer.memory import KVMemory
from quire.ranks.connections import open_memory
from quire.ranks.frames import ConnectionLost
from quire.ranks.start import MemoryAddress

Job = dict[str, Any]
DESCRIBE, ATTACH, GATHER, SCATTER = "describe", "attach", "gather", "scatter"


class RankKV:
    """Carries out what the engine asks for. `take` comes from the thread that listens to it, `step_over` from the one
    that runs steps."""

    def __init__(self, memory: Callable[[], KVMemory | None], answer: Callable[[Job], None]) -> None:
        """`memory` is asked for when the first job comes: most engines have none. `answer` may be called from any
        thread."""
        self._make, self._answer = memory, answer
        self._memory: KVMemory | None = None
        self._slots: dict[str, memoryview] = {}
        """By direction: this rank's part of the shared memory."""
        self._lanes: dict[str, SimpleQueue[Job | None]] = {}
        self._steps_over = 0
        self._waiting = 0
        self._passed = threading.Condition()

    def step_over(self, number: int) -> None:
        """Plan `number` has been carried out here, or has failed."""
        self._steps_over = number
        if self._waiting:
            with self._passed:
                self._passed.notify_all()

    def take(self, job: Job) -> None:
        what = job["do"]
        if what in (DESCRIBE, ATTACH):
            self._carry_out(job)
            return
        if what not in self._lanes:
            lane = self._lanes[what] = SimpleQueue()
            threading.Thread(target=self._work, args=(lane,), name=f"quire-kv-{what}", daemon=True).start()
        self._lanes[what].put(job)

    def close(self) -> None:
        for lane in list(self._lanes.values()):
            lane.put(None)

    def _work(self, lane: SimpleQueue[Job | None]) -> None:
        with contextlib.suppress(ConnectionLost):  # the engine has gone
            while (job := lane.get()) is not None:
                self._await_step(job["after"])
                self._carry_out(job)

    def _await_step(self, number: int) -> None:
        """The rank that draws may be a moment ahead of this one: blocks are touched only when the steps that the engine
        knows to be over are over here too."""
        if self._steps_over >= number:
            return
        with self._passed:
            self._waiting += 1
            self._passed.wait_for(lambda: self._steps_over >= number)
            self._waiting -= 1

    def _carry_out(self, job: Job) -> None:
        answer: Job = {"job": job["job"]}
        try:
            answer |= self._done(job)
        except Exception as error:
            answer["error"] = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
        self._answer(answer)

    def _done(self, job: Job) -> Job:
        if self._memory is None:
            self._memory = self._make()
        memory = self._memory
        if memory is None:
            raise KVTransferError("without a model there is no KV to move")
        if job["do"] == DESCRIBE:
            return {"layout": memory.layout.to_data()}
        if job["do"] == ATTACH:
            shared = open_memory(MemoryAddress(*job["memory"]))
            shared.close()
            whole = memoryview(shared.map)
            self._slots = {what: whole[first : first + size] for what, (first, size) in job["slots"].items()}
            return {}
        start, end, starts = job["span"]
        span, pieces = Span(start, end, tuple(starts)), [Piece(*piece) for piece in job["pieces"]]
        if job["do"] == GATHER:
            memory.gather(job["tables"], span, pieces, self._slots[GATHER])
        else:
            data = self._slots[SCATTER][: job["bytes"]]
            memory.scatter(job["tables"], span, pieces, data, job["dtype"], job["scale"])
        return {}
