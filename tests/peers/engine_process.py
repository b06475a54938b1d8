"""An engine in a process of its own for tests that kill or stop it: commands as JSON lines on stdin, answers on stdout.

`python -m tests.peers.engine_process MODEL OPTIONS`: the first line says where other engines reach it.
"""

from __future__ import annotations

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from typing import Any

from quire import LLM, SamplingParams

ANSWER_SECONDS = 120.0


def main(model: str, options: str) -> None:
    lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
    called = threading.Event()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
            called.set()
        lines.put(None)
        called.set()

    threading.Thread(target=read, daemon=True).start()
    with LLM(model, **json.loads(options)) as llm:
        say({"address": llm.kv_address})
        while True:
            llm.serve_peers(called)
            called.clear()
            while not lines.empty():
                line = lines.get()
                if line is None:
                    return
                say(answer(llm, json.loads(line)))


def say(data: dict[str, Any]) -> None:
    print(json.dumps(data), flush=True)


def answer(llm: LLM, asked: dict[str, Any]) -> dict[str, Any]:
    if asked["do"] == "metrics":
        llm.check()
        return llm.metrics()
    outputs = llm.generate([asked["prompt"]], SamplingParams(**asked["params"]), use_tqdm=False)
    return {"tokens": list(outputs[0].outputs[0].token_ids),
            "logprobs": [sorted((token, each.logprob) for token, each in place.items())
                         for place in outputs[0].outputs[0].logprobs or []]}


class EngineProcess:
    """One such process; killed when it is left, whatever state it is in."""

    def __init__(self, model: str, **options: Any) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.peers.engine_process", model, json.dumps(options)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=dict(os.environ))
        self.address = str(self.answer()["address"])

    def ask(self, **asked: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_SECONDS)
        assert ready, "the engine does not answer"
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def metrics(self) -> dict[str, Any]:
        self.ask(do="metrics")
        return self.answer()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()


def eventually(check: Any, what: str, seconds: float = 60.0) -> None:
    """Wait for something that will be so, however busy the machine is."""
    deadline = time.monotonic() + seconds
    while not check():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
