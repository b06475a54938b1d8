"""Models for tests of the engine in its own process: a tiny one that computes, and one that only pretends to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from quire import AsyncLLM, SamplingParams
from quire.engine.front.request_stream import RequestStream
from quire.engine.outputs.output import RequestOutput

T = TypeVar("T")
PATIENCE = 120.0
"""Seconds after which a test counts as hanging, on a machine where everything is slow."""


def run(job: Callable[[AsyncLLM], Awaitable[T]], model: str | Path, **options: Any) -> T:
    """Start an engine, do a job with it, shut it down; a hang is a failure."""

    async def everything() -> T:
        fixed: dict[str, Any] = {"num_threads": 1, "device": "cpu", "grammar_warm_start": False}
        llm = await AsyncLLM.start(str(model), **{**fixed, **options})
        try:
            return await job(llm)
        finally:
            await llm.shutdown()

    async def bounded() -> T:
        return await asyncio.wait_for(everything(), PATIENCE)

    return asyncio.run(bounded())


def greedy(max_tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **more)


async def last(stream: RequestStream) -> RequestOutput:
    """The last output of a request."""
    final = None
    async for output in stream:
        final = output
    assert final is not None
    return final


async def until(condition: Callable[[], Any], seconds: float = 60.0) -> None:
    """Wait for something to become true, or fail."""
    async with asyncio.timeout(seconds):
        while True:
            found = condition()
            if asyncio.iscoroutine(found):
                found = await found
            if found:
                return
            await asyncio.sleep(0.02)
