"""Runs tests in several processes, without pytest-xdist: a GPU machine may have nothing but pytest.

    python tests/parallel.py -n 12 --alone tests/gpu/test_memory.py tests/gpu tests/kernels/triton

Every process collects the same tests and asks this one for the next to run, so none idles while others have a queue.
Tests start in the order of the paths: name the longest first. Those of a file that share a fixture of the module stay
in one process. Paths after `--alone` run at the end, one process at a time, when nobody else uses the machine. If a
process dies, or its GPU is of no more use after an error, another takes its place; the test it died in has failed. A
test that hangs ends its process, which shows where every thread was.
"""

from __future__ import annotations

import argparse
import faulthandler
import io
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any, TextIO

SLOWEST = 20
REPLACEMENTS = 20
"""Processes that may be lost before the run is given up."""
_LOST_GPU = ("CUDA error", "illegal memory access", "device-side assert")


@dataclass
class Report:
    """What became of one test, all its phases together."""

    name: str
    outcome: str = "passed"
    seconds: float = 0.0
    text: str = ""


class Puller:
    """The pytest plugin of a process: runs what the parent names, and tells it what came of it."""

    def __init__(self, parent: Connection, longest: float, stacks: TextIO) -> None:
        """`longest`: seconds of a test after which its process shows on `stacks` where it is, and ends."""
        self._parent = parent
        self._longest, self._stacks = longest, stacks
        self._report = Report("")

    def pytest_runtestloop(self, session: Any) -> bool:
        items = {item.nodeid: item for item in session.items}
        self._parent.send(("collected", _units(session.items)))
        ahead = self._pull(items)
        while ahead:
            now, ahead = ahead, []
            for place, item in enumerate(now):
                following = now[place + 1] if place + 1 < len(now) else None
                if following is None:
                    # Asked for before this one ends: pytest keeps the fixtures that both use.
                    ahead = self._pull(items)
                    following = ahead[0] if ahead else None
                self._report = Report(item.nodeid)
                self._parent.send(("started", item.nodeid))
                faulthandler.dump_traceback_later(self._longest, exit=True, file=self._stacks)
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                faulthandler.cancel_dump_traceback_later()
                self._parent.send(("done", self._report))
                if self._report.outcome == "failed" and any(sign in self._report.text for sign in _LOST_GPU):
                    os._exit(3)
        return True

    def _pull(self, items: dict[str, Any]) -> list[Any]:
        self._parent.send(("next", None))
        return [items[name] for name in self._parent.recv()]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self._parent.send(("trouble", f"could not be collected: {report.nodeid}\n{report.longreprtext}"))

    def pytest_runtest_logreport(self, report: Any) -> None:
        mine = self._report
        mine.seconds += report.duration
        if report.failed:
            mine.outcome = "failed"
            mine.text += f"{report.longreprtext}\n" + "".join(f"--- {name}\n{text}\n" for name, text in report.sections)
        elif report.skipped and mine.outcome == "passed":
            mine.outcome = "skipped"
            mine.text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def _units(items: Sequence[Any]) -> list[list[str]]:
    """Tests by themselves, but those of a file that share a fixture of the module together."""
    found: dict[str, list[str]] = {}
    for item in items:
        fixtures = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
        shared = any(one.scope in ("module", "class") for each in fixtures for one in each)
        found.setdefault(item.nodeid.split("::")[0] if shared else item.nodeid, []).append(item.nodeid)
    return list(found.values())


def _process(paths: list[str], longest: float, parent: Connection) -> None:
    import pytest

    shown = io.StringIO()
    # A copy, since pytest takes the process's own for itself while a test runs.
    with os.fdopen(os.dup(2), "w") as stacks, redirect_stdout(shown), redirect_stderr(shown):
        code = pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:terminalreporter", *paths],
                           [Puller(parent, longest, stacks)])
    parent.send(("ended", (int(code), shown.getvalue())))


@dataclass
class Run:
    """One pool of processes over some paths."""

    paths: list[str]
    size: int
    longest: float
    """Seconds that a test may take."""
    reports: list[Report] = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    """What no test can be blamed for."""
    times: TextIO | None = None
    """Where each test's end and length are written, in seconds, as it ends."""
    began: float = field(default_factory=time.perf_counter)
    _queue: deque[list[str]] | None = None
    _running: dict[Connection, str | None] = field(default_factory=dict)
    _promised: dict[Connection, list[str]] = field(default_factory=dict)
    _processes: dict[Connection, Any] = field(default_factory=dict)
    _lost: int = 0

    def run(self) -> None:
        for _ in range(self.size):
            self._start()
        while self._processes:
            for link in wait(list(self._processes)):
                try:
                    kind, value = link.recv()  # type: ignore[union-attr]
                except (EOFError, ConnectionError):
                    self._died(link)  # type: ignore[arg-type]
                else:
                    self._take(link, kind, value)  # type: ignore[arg-type]
        if self._queue:
            self.trouble.append(f"{sum(map(len, self._queue))} tests were not run")

    def _start(self) -> None:
        here, there = multiprocessing.Pipe()
        process = multiprocessing.get_context("spawn").Process(target=_process, args=(self.paths, self.longest, there))
        process.start()
        there.close()
        self._processes[here], self._running[here], self._promised[here] = process, None, []

    def _take(self, link: Connection, kind: str, value: Any) -> None:
        if kind == "collected":
            if self._queue is None:
                self._queue = deque(sorted(value, key=self._turn))
        elif kind == "next":
            unit = self._queue.popleft() if self._queue else []
            self._promised[link] += unit
            link.send(unit)
        elif kind == "started":
            self._running[link] = value
            self._promised[link].remove(value)
        elif kind == "done":
            self._running[link] = None
            self.reports.append(value)
            self._show(value)
        elif kind == "trouble":
            if value not in self.trouble:
                self.trouble.append(value)
        elif kind == "ended":
            code, text = value
            if code not in (0, 1, 5):
                self.trouble.append(f"pytest ended with {code}\n{text}")

    def _show(self, report: Report) -> None:
        """At once: a run that is cut off has said what failed and what took long."""
        mark = {"passed": ".", "skipped": "s", "failed": f"\n===== FAILED {report.name}\n{report.text}\n"}
        print(mark[report.outcome], end="", flush=True)
        if self.times is not None:
            ended = time.perf_counter() - self.began
            print(f"{ended:8.2f} {report.seconds:8.2f} {report.name}", file=self.times, flush=True)

    def _turn(self, unit: list[str]) -> int:
        """Of the first path that names it; pytest itself may sort the paths it is given."""
        named = [place for place, path in enumerate(self.paths) if unit[0].startswith(path)]
        return min(named, default=len(self.paths))

    def _died(self, link: Connection) -> None:
        """The end of a process: the last of a good one, or in the middle of something."""
        process = self._processes.pop(link)
        process.join()
        running, promised = self._running.pop(link), self._promised.pop(link)
        if running is not None:
            text = f"its process ended with {process.exitcode}"
            self.reports.append(Report(running, "failed", 0.0, text))
            self._show(self.reports[-1])
        if not process.exitcode:
            return
        if promised and self._queue is not None:
            self._queue.appendleft(promised)
        self._lost += 1
        if self._queue is None:
            self.trouble.append(f"a process ended with {process.exitcode} before it had collected the tests")
        elif self._queue and self._lost <= REPLACEMENTS:
            self._start()


def main() -> int:
    parser = argparse.ArgumentParser(description="Run tests in several processes, without pytest-xdist.")
    parser.add_argument("-n", type=int, default=os.cpu_count() or 1, metavar="PROCESSES")
    parser.add_argument("--alone", action="append", default=[], metavar="PATH", help="run it by itself, at the end")
    parser.add_argument("--times", type=argparse.FileType("w"), metavar="FILE", help="write each one's end and seconds")
    parser.add_argument("--longest", type=float, default=180, metavar="SECONDS",
                        help="a test that takes longer has failed, and shows where it hangs (180)")
    parser.add_argument("paths", nargs="+")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    apart = [option for path in args.alone for option in ("--ignore", path)]
    started = time.perf_counter()
    sizes = [([*args.paths, *apart], args.n), *(([path], 1) for path in args.alone)]
    runs = [Run(paths, size, args.longest, times=args.times) for paths, size in sizes]
    for run in runs:
        begin = time.perf_counter()
        run.run()
        print(f"\n{' '.join(run.paths)}: {len(run.reports)} tests in {time.perf_counter() - begin:.0f} s", flush=True)
    return summary([report for run in runs for report in run.reports], [each for run in runs for each in run.trouble],
                   time.perf_counter() - started)


def summary(reports: Sequence[Report], trouble: Sequence[str], seconds: float) -> int:
    """Print what came of it all; the exit status."""
    counts = {kind: sum(report.outcome == kind for report in reports) for kind in ("passed", "failed", "skipped")}
    for report in reports:
        if report.outcome == "failed":
            print(f"FAILED {report.name}")
    for each in trouble:
        print(f"\n===== {each}")
    print(f"\nslowest {SLOWEST}:")
    for report in sorted(reports, key=lambda report: -report.seconds)[:SLOWEST]:
        print(f"{report.seconds:8.2f} s  {report.name}")
    for reason in sorted({report.text for report in reports if report.outcome == "skipped"}):
        print(f"skipped: {reason}")
    print(f"{', '.join(f'{count} {kind}' for kind, count in counts.items())} in {seconds:.0f} s")
    return 0 if counts["passed"] and not counts["failed"] and not trouble else 1


if __name__ == "__main__":
    # Not this folder, whose `tests` would not be the package of that name; the root, as `python -m pytest` has it.
    sys.path[0] = os.getcwd()
    sys.exit(main())
