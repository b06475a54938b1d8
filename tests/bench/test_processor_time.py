"""Shares of processor time: what a process and its children take is theirs, the rest is others' or the host's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.bench.processor_time import ProcessorWatch, Reading, Taken

TICK = os.sysconf("SC_CLK_TCK")


def write_proc(folder: Path, cores: list[tuple[int, ...]], processes: dict[int, tuple[int, ...]]) -> None:
    """`cores`: counts of each; `processes`: parent, user, system, and both of children that have ended."""
    lines = [f"cpu  {' '.join('9' * 10)}"]
    lines += [f"cpu{number} {' '.join(map(str, counts))} 0 0" for number, counts in enumerate(cores)]
    (folder / "stat").write_text("\n".join([*lines, "intr 1 2 3", ""]))
    for pid, (parent, *times) in processes.items():
        (folder / str(pid)).mkdir(exist_ok=True)
        fields = ["S", str(parent), *"0" * 9, *map(str, times), "0"]
        (folder / str(pid) / "stat").write_text(f"{pid} (a) name (b) {' '.join(fields)}\n")


def test_time_is_counted_on_our_cores_and_for_all_descendants(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "77").mkdir()  # has ended: no counts are left of it
    cores = [(100, 20, 30, 999, 999, 4, 5, 7), (200, 0, 0, 0, 0, 0, 0, 8), (5000, 0, 0, 0, 0, 0, 0, 500)]
    write_proc(tmp_path, cores, {10: (1, 10, 1, 2, 3), 11: (10, 20, 0, 0, 0), 12: (11, 30, 4, 0, 0),
                                 13: (1, 900, 0, 0, 0)})
    found = ProcessorWatch(10, tmp_path, cores={0, 1}).read()
    assert found.busy == pytest.approx((159 + 200) / TICK)
    assert found.stolen == pytest.approx(15 / TICK)
    assert found.own == pytest.approx((16 + 20 + 34) / TICK)


def test_what_is_not_our_own_is_taken_by_others() -> None:
    watch = ProcessorWatch(os.getpid(), cores={0, 1})
    taken = watch.taken(Reading(10.0, 100.0, 3.0, 50.0), Reading(20.0, 118.0, 3.5, 66.0))
    assert taken.others == pytest.approx(2 / 20) and taken.stolen == pytest.approx(0.5 / 20)
    # Counts of the system and of processes are made at different moments: never less than nothing.
    assert watch.taken(Reading(0.0, 0.0, 0.0, 0.0), Reading(1.0, 1.0, 0.0, 1.01)).others == 0.0


@pytest.mark.parametrize(("others", "stolen", "disturbed"), [
    (0.0, 0.0, False), (0.015, 0.004, False), (0.021, 0.0, True), (0.0, 0.03, True), (0.015, 0.01, True)])
def test_a_run_is_disturbed_by_others_and_by_the_host(others: float, stolen: float, disturbed: bool) -> None:
    assert Taken(others, stolen).disturbed is disturbed


def test_a_loop_in_a_child_is_ours_and_one_beside_it_is_not() -> None:
    """On the real system, with a process that computes for half a second of processor time when it is told to."""
    loop = ("import time\nprint('ready', flush=True)\ninput()\nend = time.process_time() + 0.5\n"
            "while time.process_time() < end: pass\nprint('done', flush=True)\ninput()")
    with subprocess.Popen([sys.executable, "-c", loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as child:
        assert child.stdin is not None and child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        watches = [ProcessorWatch(pid) for pid in (os.getpid(), child.pid, 2**30)]
        before = [watch.read() for watch in watches]
        child.stdin.write("go\n")
        child.stdin.flush()
        assert child.stdout.readline() == "done\n"
        after = [watch.read() for watch in watches]
        child.communicate("end\n")
    # Counts are in ticks, each rounded down.
    ours, its, nobodys = (end.own - start.own for start, end in zip(before, after, strict=True))
    assert ours >= 0.45 and its >= 0.45 and nobodys == 0.0
    assert watches[2].taken(before[2], after[2]).others > 0.0
