"""One engine on one case of `bench cpu`, in a process of its own: several of them can take turns."""

from __future__ import annotations

import json
import subprocess
import tempfile
from types import TracebackType
from typing import Any

from quire.child import child_environment, module_command
from quire.errors import QuireError


class CaseProcess:
    """One engine on one case in a process of its own, which runs when it is told to."""

    def __init__(self, engine: str, case: str, model: str, options: dict[str, Any]) -> None:
        self._name = f"case {case} failed on {engine}"
        # A file, since a pipe that nobody reads is full some day: an engine may live for many rounds.
        self._told = tempfile.TemporaryFile("w+")  # noqa: SIM115 (closed in __exit__)
        self._process = subprocess.Popen(
            module_command("quire.bench.cpu.contestant", engine, case, model, json.dumps(options)),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._told, text=True, env=child_environment())
        self.pid = self._process.pid
        self.seconds: list[float] = []
        self._read()

    def __enter__(self) -> CaseProcess:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._told):
            if stream is not None:
                stream.close()

    def _read(self) -> Any:
        """The next line of JSON; what a library prints in between is passed over."""
        assert self._process.stdout is not None
        while line := self._process.stdout.readline():
            try:
                return json.loads(line)
            except json.JSONDecodeError:
                continue
        code = self._process.wait()
        self._told.seek(0)
        told = self._told.read().strip().splitlines() or [f"exit code {code}"]
        raise QuireError(f"{self._name}: {told[-1]}")

    def run(self) -> float:
        """Seconds of one run of the case."""
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        self.seconds.append(float(self._read()))
        return self.seconds[-1]

    def finish(self) -> dict[str, Any]:
        """Seconds of each run, peak memory, the tokens and more of that kind."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return {"seconds": self.seconds, **self._read()}


def contest(engine: str, case: str, model: str, repeat: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """What one engine alone takes for a case, so many times over."""
    with CaseProcess(engine, case, model, options or {}) as one:
        for _ in range(repeat):
            one.run()
        return one.finish()
