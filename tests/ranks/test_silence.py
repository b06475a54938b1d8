"""Ranks that say nothing: a stopped one is lost in under three seconds, one whose machine is starved is waited for."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from quire.parallel.place import Place
from quire.ranks.group import RankGroup
from quire.ranks.local import same_for_all, start_local
from quire.scheduler.plan import StepPlan
from tests.ranks.processes import PATIENCE

NOTICED_SECONDS = 3.0


class Silent:
    """A rank that gives no sign of life; `found`: what looking at its process says."""

    pid, local, link = 1, False, None

    def __init__(self, found: bool | None) -> None:
        self.found = found

    def ended(self, seconds: float) -> str | None:
        return None

    def stopped(self) -> bool | None:
        return self.found

    def end(self) -> None: ...

    kill = end


class Watched:
    """A group whose thread does not run: time passes as the test says."""

    def __init__(self, found: bool | None, ready: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("quire.ranks.group.time.monotonic", lambda: self.now)
        launcher: Any = type("Launcher", (), {"places": Place.all(1, 1), "close": lambda self: None})()
        listener: Any = type("Listener", (), {"died": lambda self, error: None})()
        self.group = RankGroup(launcher, same_for_all, listener)
        self.group.handles = [Silent(found)]  # type: ignore[list-item]
        self.group._looked_at = self.group.states[0].heard = self.now
        if ready:
            self.group.ready.set_result({})
            self.group.states[0].ready = True

    def lost_after(self, looks_every: float = 0.25, most: float = 200.0) -> float:
        """Seconds from its last sign of life until it is lost."""
        began = self.now
        while self.group.failure is None and self.now - began < most:
            self.now += looks_every
            self.group._look()
        return self.now - began


@pytest.mark.parametrize(("found", "ready", "looks_every", "least", "most"), [
    (True, True, 0.25, 1.5, NOTICED_SECONDS),  # stopped
    (True, False, 0.25, 1.5, NOTICED_SECONDS),  # stopped while it loads
    (True, True, 1.0, 1.5, NOTICED_SECONDS),  # stopped, and the watcher seldom gets a processor
    (None, True, 0.25, 2.0, NOTICED_SECONDS),  # on another machine: nobody can look
    (False, True, 0.25, 15.0, 25.0),  # it runs, but says nothing: its machine is starved
    (None, False, 0.25, 100.0, 130.0),  # it loads, and nobody can look
    (False, False, 0.25, 100.0, 130.0)])
def test_how_long_a_silent_rank_is_waited_for(found: bool | None, ready: bool, looks_every: float, least: float,
                                              most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    assert least < Watched(found, ready, monkeypatch).lost_after(looks_every) < most


def test_a_rank_that_ran_and_is_then_stopped_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its silence was forgiven while its process could be seen to run, and so is a moment in which it is stopped."""
    watched = Watched(False, True, monkeypatch)
    rank: Any = watched.group.handles[0]
    for stopped, seconds in ((False, 10.0), (True, 0.5), (False, 2.0)):
        rank.found = stopped
        watched.lost_after(most=seconds)
        assert watched.group.failure is None
    rank.found = True
    assert watched.lost_after() <= 1.0


def test_time_in_which_the_watcher_itself_was_starved_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(None, True, monkeypatch)
    watched.now += 10.0
    watched.group._look()
    assert watched.group.failure is None
    assert watched.lost_after() < NOTICED_SECONDS


def test_a_rank_that_runs_and_cannot_speak_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that keeps the interpreter to itself stands for a processor that others have: no pulse, not stopped."""
    flag = tmp_path / "now"
    (tmp_path / "sitecustomize.py").write_text(
        "import ctypes, os, threading, time\n"
        "def hold():\n"
        f"    while not os.path.exists({str(flag)!r}):\n"
        "        time.sleep(0.02)\n"
        "    ctypes.PyDLL(None).usleep(3_200_000)\n"
        "threading.Thread(target=hold, daemon=True).start()\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    executor, _ = start_local(Place.all(1, 1), {"kind": "dummy", "vocab_size": 9})
    try:
        executor.submit(StepPlan(1)).result(PATIENCE)
        state, longest = executor.ranks.states[0], 0.0
        flag.touch()
        began = time.monotonic()
        while time.monotonic() - began < 3.5:
            longest = max(longest, time.monotonic() - state.heard)
            time.sleep(0.05)
        assert longest > 2.5
        executor.submit(StepPlan(2)).result(PATIENCE)
        assert executor.failure is None
    finally:
        executor.close()
