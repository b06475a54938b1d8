"""The stories that the page can play: who arrives when, on which small engines, and what to look for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any

from quire.server.view.sandbox import Layout, Sandbox, Visitor
from quire.server.view.sandbox_pair import SandboxPair


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    title: str
    look_for: str
    """One sentence for the viewer."""
    engines: tuple[Layout, ...]
    visitors: tuple[Visitor, ...]
    pair: bool = False
    """The first two engines are one: the second computes prompts for the first."""
    live: bool = False
    """It makes sense on the server's own engine too; the page sends the requests."""

    def card(self) -> dict[str, Any]:
        return {"name": self.name, "title": self.title, "look_for": self.look_for, "live": self.live,
                "engines": [layout.title for layout in self.engines]}


def _many(count: int, every: float, **more: Any) -> tuple[Visitor, ...]:
    return tuple(Visitor(at=i * every, **more) for i in range(count))


SCENARIOS: dict[str, Scenario] = {each.name: each for each in (
    Scenario(
        "shared-prefix", "Shared prefix",
        "The first to come computes the long common prompt once; when its blocks turn striped, the others hold them "
        "too and compute only their own few tokens.",
        (Layout("64 blocks of 16 tokens, prefix caching on"),),
        _many(6, 0.35, shared_tokens=160, own_tokens=12, max_tokens=24), live=True),
    Scenario(
        "memory-pressure", "Memory pressure",
        "Five answers grow in a pool that holds three: when no block is free the last to come is preempted (✕); the "
        "first engine computes its KV again later, the second moves its blocks to the host and back.",
        (Layout("24 blocks, preempted requests compute again", num_blocks=24),
         Layout("24 blocks and 40 on the host, preempted requests move", num_blocks=24, num_host_blocks=40)),
        _many(5, 0.1, shared_tokens=0, own_tokens=60, max_tokens=64)),
    Scenario(
        "long-prompt", "A long prompt among short ones",
        "Request 5 brings 640 tokens: whole, they make one long step that everybody else's next token waits for; in "
        "chunks they ride along in ten short ones, and the others keep streaming.",
        (Layout("whole prompts", max_num_batched_tokens=1024, chunked_prefill=False),
         Layout("chunked prefill, 64 tokens a step", max_num_batched_tokens=64)),
        (*_many(4, 0.05, shared_tokens=0, own_tokens=16, max_tokens=48),
         Visitor(at=1.0, shared_tokens=0, own_tokens=640, max_tokens=8))),
    Scenario(
        "batching", "Static against continuous batching",
        "The same eight requests twice: a static batch of four ends with its longest answer before anybody else may "
        "begin; continuous batching gives every free place away at the next step.",
        (Layout("static batching", max_num_seqs=4, batching_policy="static"),
         Layout("continuous batching", max_num_seqs=4)),
        tuple(Visitor(at=0.0, shared_tokens=0, own_tokens=24, max_tokens=length)
              for length in (8, 40, 12, 24, 10, 32, 8, 20))),
    Scenario(
        "prefill-apart", "Prefill here, decode there",
        "Long prompts come to the first engine, which has the second compute them: their KV arrives in reserved blocks "
        "while the streams go on token by token. The third engine does both, in chunks, and its streams stutter.",
        (Layout("decodes; prompts come from the other engine", num_blocks=192),
         Layout("computes prompts for the other engine", num_blocks=192),
         Layout("does both, in chunks of 256", num_blocks=192)),
        (*_many(4, 0.05, shared_tokens=0, own_tokens=16, max_tokens=64),
         *(Visitor(at=0.8 + 0.7 * i, shared_tokens=0, own_tokens=600, max_tokens=8) for i in range(3))), pair=True),
    Scenario(
        "samples", "n samples, copied on write",
        "Four samples begin on the blocks of one prompt; each gets a copy of the last, half-filled block (a ring) only "
        "when it writes into it, and the full ones stay shared.",
        (Layout("n = 4, a prompt of 72 tokens"),),
        (Visitor(at=0.0, shared_tokens=72, own_tokens=0, max_tokens=40, n=4),), live=True),
    Scenario(
        "speculation", "Tokens guessed ahead",
        "In each step of the second engine six guesses ride along with every sequence's own token: those that are "
        "right (high) are kept, and the first wrong one ends them (low, red). The answers are the same, in fewer "
        "steps. The third engine guesses as many, as a tree: two at a place, so that a wrong first guess need not end "
        "it; the branch that was right is kept, the others (red) go.",
        (Layout("one token a step"), Layout("six drafts, each right in 1 of 2 cases", drafts=6, right=0.5),
         Layout("six drafts as a tree, two at a place", drafts=6, right=0.5, width=2)),
        _many(4, 0.2, shared_tokens=0, own_tokens=24, max_tokens=48)),
    Scenario(
        "two-stages", "Two stages",
        "Half of the layers in each of two stages: with one step at a time one stage always waits for the other (the "
        "gaps); with two, each half of the requests is in another stage, and both compute nearly all the time.",
        (Layout("two stages, one step in flight", num_stages=2),
         Layout("two stages, two steps in flight", num_stages=2, steps_in_flight=2)),
        _many(6, 0.05, shared_tokens=0, own_tokens=40, max_tokens=32)),
)}


async def play(scenario: Scenario, speed: float) -> AsyncGenerator[bytes | dict[str, Any], None]:
    """Frames of all its engines as they come, and what became of each in the end."""
    boxes: list[Sandbox | SandboxPair] = []
    if scenario.pair:
        boxes.append(SandboxPair(scenario.engines[0], scenario.engines[1], speed))
    boxes += [Sandbox(layout, place, speed) for place, layout in enumerate(scenario.engines)
              if place > 1 or not scenario.pair]
    news: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()

    async def run(box: Sandbox | SandboxPair) -> None:
        try:
            async for frame in box.frames(scenario.visitors):
                news.put_nowait(frame)
            news.put_nowait(None)
        except Exception as error:
            news.put_nowait(error)

    tasks = [asyncio.create_task(run(box)) for box in boxes]
    running = len(tasks)
    try:
        while running:
            found = await news.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                running -= 1
            else:
                yield found
        yield {"end": [summary for box in boxes for summary in box.summaries()]}
    finally:
        for task in tasks:
            task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*tasks, return_exceptions=True)
