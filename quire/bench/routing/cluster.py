"""`make cluster`: a front, two prefill and two decode servers on this machine, and a prompt that goes through them.

Stays until Ctrl-C; with --once it ends after the answer. Everything listens on the loopback only."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

_START_SECONDS = 600.0
_PROMPT = ("A front sends each request to a decode server and names a prefill server, which computes the prompt and "
           "sends its keys and values over. ") * 4 + "In one sentence, this is useful because"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="smollm2-135m", help="(default: %(default)s)")
    parser.add_argument("--port", type=int, default=8000, help="of the front; the servers have the next four "
                                                               "(default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="end after the first answer")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make cluster", description=__doc__)
    add_arguments(parser)
    args = parser.parse_args(argv)
    front = f"http://127.0.0.1:{args.port}"
    servers = [f"http://127.0.0.1:{args.port + place}" for place in range(1, 5)]
    with cluster(args.model, args.port):
        body = {"model": args.model, "prompt": _PROMPT, "max_tokens": 24, "temperature": 0}
        answer = json.loads(_post(f"{front}/v1/completions", body))
        print(f"\n{_PROMPT}\x1b[1m{answer['choices'][0]['text']}\x1b[0m\n")
        for name, url in zip(("prefill", "prefill", "decode", "decode"), servers, strict=True):
            print(f"  {name} {url}  {_counted(url)}")
        if args.once:
            return 0
        print(f"\nthe front is at {front}: curl, quire chat --url {front}, or a browser. Ctrl-C ends all of it.")
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()
    return 0


@contextlib.contextmanager
def cluster(model: str, port: int) -> Iterator[None]:
    """Five processes, up when this begins and gone when it ends."""
    environment = {"QUIRE_KV_SECRET": secrets.token_hex(32), **os.environ}
    urls = [f"http://127.0.0.1:{port + place}" for place in range(1, 5)]
    share = ["--num-threads", "1", "--max-model-len", "2048", "--kv-cache-memory", "256MiB"]
    commands = [["serve", model, "--served-model-name", model, "--port", str(port + place), "--kv-role", role, *share]
                for place, role in enumerate(("prefill", "prefill", "decode", "decode"), start=1)]
    commands.append(["route", "--port", str(port), "--prefill", *urls[:2], "--decode", *urls[2:]])
    running: list[subprocess.Popen[bytes]] = []
    try:
        for command in commands:
            print("quire " + " ".join(command), flush=True)
            running.append(subprocess.Popen([sys.executable, "-m", "quire", *command], env=environment,
                                            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE))
        for url in [*urls, f"http://127.0.0.1:{port}"]:
            _wait_for(url, running)
        yield
    finally:
        for process in running:
            process.terminate()
        for process in running:
            process.wait()


def _wait_for(url: str, running: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        for process in running:
            if process.poll() is not None:
                said = b"" if process.stderr is None else process.stderr.read()[-500:]
                raise SystemExit(f"a server ended before it was ready: {said.decode(errors='replace')}")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            if answer.status == 200:
                return
        time.sleep(0.2)
    raise SystemExit(f"{url} was not ready after {_START_SECONDS:g} s")


def _post(url: str, body: dict[str, object]) -> bytes:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=_START_SECONDS) as answer:
        found: bytes = answer.read()
    return found


def _counted(url: str) -> str:
    """What a server says it has computed for others, or got from them."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
        lines = answer.read().decode().splitlines()
    wanted = {"quire:kv_prefills_total": "prompts computed for others", "quire:kv_prompts_arrived_total":
              "prompts computed by others", "quire:kv_tokens_sent_total": "tokens of KV sent",
              "quire:kv_tokens_received_total": "tokens of KV received"}
    found = [f"{float(line.rsplit(' ', 1)[1]):.0f} {words}" for line in lines for name, words in wanted.items()
             if line.startswith(name + "{") or line.startswith(name + " ")]
    return ", ".join(each for each in found if not each.startswith("0 ")) or "idle"


if __name__ == "__main__":
    sys.exit(main())
