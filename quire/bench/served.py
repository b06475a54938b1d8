"""A server and its engine inside a benchmark's own event loop, on a free port of loopback."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

from quire.config import ServerConfig


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
