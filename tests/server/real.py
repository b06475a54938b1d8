"""`quire serve` as people run it, in a process of its own, and what tests do to it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
PATIENCE = 120.0


class ServeProcess:
    def __init__(self, process: subprocess.Popen[bytes], address: str, log: Path) -> None:
        self.process, self.address, self.log = process, address, log
        self.http = httpx.Client(base_url=address, timeout=PATIENCE)

    def engine_pid(self) -> int:
        """The process that the server has started; 0 where there is none now."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        found = [int(pid) for pid in children if b"quire.engine.process.main" in _command(pid)]
        return found[0] if found else 0

    def engine_gone(self, pid: int) -> bool:
        return b"quire.engine.process.main" not in _command(str(pid))

    def kill_engine(self) -> None:
        os.kill(self.engine_pid(), signal.SIGKILL)

    def memory(self) -> int:
        """Bytes of the server's process, without the engine's."""
        fields = Path(f"/proc/{self.process.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")

    def metric(self, name: str) -> float:
        lines = [line for line in self.http.get("/metrics").text.splitlines() if line.startswith(f"quire:{name}")]
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@contextlib.contextmanager
def quire_serve(model: Path | str, log: Path, *words: str, **environment: str) -> Iterator[ServeProcess]:
    """A server on a free port, ready for requests."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "quire", "serve", str(model), "--port", "0", "--num-threads", "1", "--device", "cpu",
             "--log-format", "json", "--no-grammar-warm-start", *words],
            stderr=errors, stdout=errors, env={**os.environ, "PYTHONPATH": path, **environment})
    try:
        until(lambda: b'"event": "ready"' in log.read_bytes() or process.poll() is not None, PATIENCE)
        assert process.poll() is None, log.read_text()
        address = log.read_text().split('"url": "')[1].split('"')[0]
        yield ServeProcess(process, address, log)
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
