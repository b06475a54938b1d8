"""The timeline of an engine's steps as a file that Perfetto and Chrome open (Trace Event Format)."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from pathlib import Path
from types import TracebackType
from typing import Any

from quire.engine.core import EngineCore
from quire.scheduler.plan import StepPlan
from quire.scheduler.preemption import PreemptionReason
from quire.scheduler.request import Request

_ENGINE, _SEQUENCES = 1, 2
"""Processes of the picture."""
_STEPS, _COPIES, _PREEMPTIONS = 1, 2, 3
"""Threads of the engine."""
_MOST_HELD = 4096
"""Events kept before they are written."""


class StepTrace:
    """Records from its making until `close`. One per engine at a time.

    Whenever the engine has nothing to do, and every few thousand events, what there is goes to the file, which is
    whole each time: the file can be opened at any time, and a long trace fills no memory.
    """

    def __init__(self, core: EngineCore, path: str | Path) -> None:
        self.path = Path(path)
        # A path that cannot be written fails now, not after the run.
        self._file = self.path.open("w", encoding="utf-8")
        self._file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        self._end = self._file.tell()
        self._written = False
        self._core = core
        self._began = time.perf_counter()
        self._events: list[dict[str, Any]] = [
            _name("process_name", _ENGINE, 0, "engine"),
            _name("process_name", _SEQUENCES, 0, "sequences"),
            _name("thread_name", _ENGINE, _STEPS, "steps"),
            _name("thread_name", _ENGINE, _COPIES, "block copies"),
            _name("thread_name", _ENGINE, _PREEMPTIONS, "preemptions"),
        ]
        self._in_flight: deque[tuple[float, StepPlan, list[tuple[str, int]]]] = deque()
        self._lanes: dict[str, int] = {}
        self._flush()
        core.trace = self
        core.scheduler.on_preempt = self.preempted

    def _now(self) -> float:
        """Microseconds since the trace began."""
        return 1e6 * (time.perf_counter() - self._began)

    # ---- what the engine reports

    def submitted(self, plan: StepPlan) -> None:
        names = {seq.row: f"{request.request_id}[{seq.index}]"
                 for request in self._core.scheduler.running.values() for seq in request.sequences}
        entries = [(names.get(entry.row, f"row {entry.row}"), entry.num_tokens) for entry in plan.entries]
        self._in_flight.append((self._now(), plan, entries))

    def collected(self) -> None:
        """The oldest step is back (or lost)."""
        if not self._in_flight:
            return  # it was submitted before the trace began
        began, plan, entries = self._in_flight.popleft()
        duration = self._now() - began
        self._add("X", f"step {plan.step}", _ENGINE, _STEPS, began, dur=duration, args={
            "tokens": plan.num_tokens, "sequences": len(entries), "rows started": len(plan.starts),
            "rows freed": len(plan.freed_rows), "block copies": len(plan.copies)})
        for name, tokens in entries:
            shown = "draws" if tokens == 0 else f"{tokens} token{'s' * (tokens > 1)}"
            self._add("X", shown, _SEQUENCES, self._lane(name), began, dur=duration,
                      args={"step": plan.step, "tokens": tokens})
        if plan.copies or plan.transfers:
            kinds = Counter({"on write": len(plan.copies)} if plan.copies else {})
            for start in plan.transfers:
                kinds[f"out to {start.tier}" if start.out else f"in from {start.tier}"] += len(start.moves)
            shown = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            self._add("X", shown, _ENGINE, _COPIES, began, dur=duration, args={"step": plan.step, **kinds})
        self._count_blocks(began + duration)
        if len(self._events) >= _MOST_HELD:
            self._flush()

    def idle(self) -> None:
        self._flush()

    def preempted(self, request: Request, reason: PreemptionReason) -> None:
        how = "computed again" if request.swapped is None else "moved to the host"
        self._add("i", f"{request.request_id}: {reason.value}", _ENGINE, _PREEMPTIONS, self._now(), s="t", args={
            "request": request.request_id, "reason": reason.value, "KV": how,
            "sequences": len(request.live), "priority": request.priority})

    def _count_blocks(self, at: float) -> None:
        cache = self._core.scheduler.cache
        used, cached = sum(p.num_used for p in cache.pools), sum(p.num_cached for p in cache.pools)
        total = sum(p.num_blocks for p in cache.pools)
        self._add("C", "KV blocks", _ENGINE, 0, at,
                  args={"used": used, "cached": cached, "free": total - used - cached})
        for tier in cache.tiers:
            self._add("C", f"{tier.name} blocks", _ENGINE, 0, at,
                      args={"used": tier.num_used, "cached": tier.num_cached})
        scheduler = self._core.scheduler
        self._add("C", "requests", _ENGINE, 0, at,
                  args={"running": len(scheduler.running), "waiting": len(scheduler.waiting),
                        "arriving": len(scheduler.arriving)})

    # ---- the file

    def _add(self, phase: str, name: str, process: int, thread: int, at: float, **more: Any) -> None:
        self._events.append({"ph": phase, "name": name, "pid": process, "tid": thread, "ts": round(at, 1), **more})

    def _lane(self, name: str) -> int:
        if name not in self._lanes:
            self._lanes[name] = len(self._lanes) + 1
            self._events.append(_name("thread_name", _SEQUENCES, self._lanes[name], name))
        return self._lanes[name]

    def _flush(self) -> None:
        """New events take the place of the brackets that close the file, and are closed again."""
        if not self._events:
            return
        self._file.seek(self._end)
        if self._written:
            self._file.write(",\n")
        self._file.write(",\n".join(json.dumps(event) for event in self._events))
        self._events, self._written = [], True
        self._end = self._file.tell()
        self._file.write("\n]}\n")
        self._file.flush()

    def close(self) -> None:
        """Stop recording. Idempotent."""
        if self._core.trace is not self:
            return
        self._core.trace = None
        self._core.scheduler.on_preempt = None
        self._flush()
        self._file.close()

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _name(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
