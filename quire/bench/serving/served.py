"""A server for a benchmark, on a free port of loopback: in its own event loop, or in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import IO, Any

from quire.child import child_environment, module_command
from quire.errors import QuireError
from quire.server_config import ServerConfig


@contextlib.asynccontextmanager
async def served(server: dict[str, Any], engine: dict[str, Any]) -> AsyncIterator[tuple[str, Any, Any]]:
    """(address, application, AsyncLLM) of a server that stops when the block is left."""
    from quire.async_llm import AsyncLLM
    from quire.server.run import Stops, serve

    stops = Stops()
    ready: asyncio.Future[tuple[str, Any]] = asyncio.get_running_loop().create_future()

    async def start() -> Any:
        return await AsyncLLM.start(**engine)

    serving = asyncio.create_task(serve(ServerConfig.create(port=0, **server), start,
                                        lambda address, app: ready.set_result((address, app)), stops))
    awaited: list[asyncio.Future[Any]] = [serving, ready]
    await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    address, app = ready.result()
    try:
        yield address, app, app.service.engine
    finally:
        stops.stop()
        await serving


@contextlib.contextmanager
def serve_process(options: dict[str, Any], flags: Sequence[str] = ()) -> Iterator[str]:
    """`quire serve` in a process of its own; its address."""
    with serving_process(options, flags) as (address, _):
        yield address


@contextlib.contextmanager
def serving_process(options: dict[str, Any], flags: Sequence[str] = (), *, command: str = "serve",
                    environment: dict[str, str] | None = None) -> Iterator[tuple[str, int]]:
    """The same with the process's id; `command` may also be "route"."""
    words = module_command("quire", command, "--port", "0", "--log-format", "json", *flags)
    for name, value in options.items():
        flag = "--" + name.replace("_", "-")
        words += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, str(value)]
    # The log is a line per request: read on, so that the pipe is never full.
    process = subprocess.Popen(words, stderr=subprocess.PIPE, 
                               env=child_environment(PYTHONUNBUFFERED="1", **(environment or {})))
    assert process.stderr is not None
    try:
        address, said = "", b""
        for line in process.stderr:
            said = line
            if b'"event": "ready"' in line:
                address = json.loads(line)["url"]
                break
        if not address:
            raise QuireError(f"quire {command} did not start: {said.decode(errors='replace').strip()}")
        reader = asyncio.new_event_loop()
        drained = reader.run_in_executor(None, _discard, process.stderr)
        yield address, process.pid
        process.terminate()
        reader.run_until_complete(drained)
        reader.close()
    finally:
        process.kill()
        process.wait()


def _discard(stream: IO[bytes]) -> None:
    while stream.read(1 << 16):
        pass
