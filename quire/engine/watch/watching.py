"""Attaches a view to an engine while a watcher keeps asking for frames, and detaches it afterwards."""

from __future__ import annotations

import time

from quire.engine.assembly.engine import Engine
from quire.engine.watch.view import EngineView

_LONGEST = 60.0
"""Seconds that one message may ask for."""


class Watching:
    """Lives beside the step loop, which asks it for frames between two steps."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._view: EngineView | None = None
        self._until = 0.0
        self._told_rest = False
        """The last frame showed the engine at rest, so there is nothing more to tell."""

    @property
    def active(self) -> bool:
        return self._view is not None

    def renew(self, seconds: float, fresh: bool, number: int = 0) -> None:
        """Send frames for so long from now on; `number` is this engine's among several."""
        self._until = time.monotonic() + min(max(0.0, seconds), _LONGEST)
        core = self._engine.core
        if self._view is None and seconds > 0 and core.trace is None:
            self._view = EngineView(core.scheduler, self._engine.pool, self._engine.source.name, engine=number,
                                    ranks=core.executor.describe_ranks, experts=core.executor.expert_load)
            core.trace = self._view
            self._told_rest = False
        elif fresh and self._view is not None:
            self._view.start_over()
            self._told_rest = False

    def frame(self, at_rest: bool) -> tuple[bytes, bool] | None:
        """The next frame if it is due; of an engine at rest only one."""
        view = self._view
        if view is None:
            return None
        if time.monotonic() > self._until:
            self._end(view)
            return None
        if not view.due or (at_rest and self._told_rest and not view.has_steps):
            return None
        self._told_rest = at_rest
        return view.frame()

    def patience_ms(self, most: int) -> int:
        """How long an engine at rest may wait for a message before it asks for a frame."""
        if self._view is None or (self._told_rest and not self._view.has_steps):
            return most
        return min(most, 1 + int(1e3 * self._view.due_in))

    def _end(self, view: EngineView) -> None:
        view.close()
        if self._engine.core.trace is view:
            self._engine.core.trace = None
        self._view = None
