"""Mixed requests of a soak (streams, groups, beams, bad input, clients that hang up), and which answers fit them."""

from __future__ import annotations

import asyncio
import collections
import random
from dataclasses import dataclass, field
from typing import Any

from quire.bench.serving.http_client import Reply, ask

SLOWEST = 180.0
"""Seconds within which every request must have an answer."""
_GOOD = {200}
_ALWAYS = {429, 500}
"""A full queue, an engine that died meanwhile."""
_NO_ENGINE = ("metrics", "tokenize")


@dataclass(slots=True)
class Findings:
    """What the soak saw, and what was wrong."""

    statuses: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    hung_up: int = 0
    retries: int = 0
    kill_ranks: bool = False
    """Ranks are killed instead of the engine."""
    killed: set[int] = field(default_factory=set)
    """Processes that must be gone in the end: engines that died, and their ranks."""
    kills: int = 0
    seconds: float = 0.0
    memory_half: int = 0
    memory_end: int = 0


async def mixed_request(address: str, dice: random.Random, found: Findings) -> None:
    """One request of a random kind; its answer must fit it."""
    kind, path, body, expected = _mixed(dice)
    hang_up = dice.choice([0, 200, 600]) if dice.random() < 0.15 else None
    try:
        async with asyncio.timeout(SLOWEST):
            reply = await ask(address, path, body, hang_up_after=hang_up)
            while reply.status == 503 and kind not in _NO_ENGINE and not _quarantined(reply):
                # As clients do: come back later.
                found.retries += 1
                await asyncio.sleep(0.5)
                reply = await ask(address, path, body, hang_up_after=hang_up)
    except TimeoutError:
        found.wrong.append(f"{kind}: no answer within {SLOWEST:g} seconds")
        return
    except (OSError, asyncio.IncompleteReadError) as error:
        found.wrong.append(f"{kind}: the connection broke: {error!r}")
        return
    found.hung_up += reply.hung_up
    if reply.hung_up:
        return
    found.statuses[f"{kind} {reply.status}"] += 1
    complaint = _complaint(kind, reply, expected)
    if complaint is not None:
        found.wrong.append(complaint)


def _mixed(dice: random.Random) -> tuple[str, str, Any, set[int]]:
    """(kind, path, body, statuses that are right)."""
    prompt = dice.choice(["Hello", "x " * dice.randrange(1, 200), "The same start of a prompt. " * 12])
    tokens = dice.randrange(1, 40)
    base: dict[str, Any] = {"prompt": prompt, "max_tokens": tokens, "seed": dice.randrange(1000)}
    chat = {"messages": [{"role": "user", "content": prompt}], "max_tokens": tokens}
    wrong: list[dict[str, Any]] = [
        {"n": 0}, {"foo": 1}, {"max_tokens": -1}, {"prompt": []}, {"temperature": "hot"}, {"prompt": [1 << 30]},
        {"logit_bias": {"99999999": 1}}, {"stop": [""]}, {"prompt": "y" * 200_000},
    ]
    spoiled: dict[str, Any] = {**base, **dice.choice(wrong)}
    bad: Any = dice.choice([b"{", b"\xff", {}, spoiled, spoiled])
    several: list[Any] = dice.choice([[prompt, "b"], [[1, 2], [3]]])
    kinds: list[tuple[str, str, Any, set[int]]] = [
        ("whole", "/v1/completions", base, _GOOD),
        ("stream", "/v1/completions", {**base, "stream": True, "stream_options": {"include_usage": True}}, _GOOD),
        ("stream", "/v1/completions", {**base, "stream": True, "ignore_eos": True}, _GOOD),
        ("chat", "/v1/chat/completions", chat, _GOOD | {400}),
        ("chat stream", "/v1/chat/completions", {**chat, "stream": True, "n": 2}, _GOOD | {400}),
        ("group", "/v1/completions", {**base, "n": 3, "best_of": 4, "logprobs": 2}, _GOOD),
        ("beams", "/v1/completions", {**base, "seed": None, "n": 2, "use_beam_search": True}, _GOOD),
        ("batch", "/v1/completions", {**base, "prompt": several, "echo": True}, _GOOD),
        ("bad", "/v1/completions", bad, {400}),
        ("metrics", "/metrics", None, _GOOD),
        ("tokenize", "/tokenize", {"prompt": prompt}, _GOOD),
        ("priority", "/v1/completions", {**base, "priority": dice.randrange(-5, 5), "cache_salt": "s"}, _GOOD),
        ("impatient", "/v1/completions", {**base, "timeout": 0.02, "max_tokens": 200}, _GOOD | {504}),
    ]
    return dice.choice(kinds)


def _quarantined(reply: Reply) -> bool:
    """Two engines died while it ran, as this soak wants it; an engine does not try a third time soon."""
    return reply.status == 503 and b"request_quarantined" in reply.body


def _complaint(kind: str, reply: Reply, expected: set[int]) -> str | None:
    if _quarantined(reply):
        return None
    if reply.status not in expected | (set() if kind in _NO_ENGINE else _ALWAYS):
        return f"{kind}: status {reply.status}: {reply.body[:200]!r}"
    if reply.status == 500 and reply.json()["error"]["code"] == "internal_error":
        return f"{kind}: an internal error: {reply.body[:200]!r}"
    if reply.status == 200 and "stream" in kind and not reply.complete:
        last = reply.events()[-1] if reply.events() else {}
        if last.get("error", {}).get("code") not in ("engine_dead", "engine_error"):
            return f"{kind}: a stream without an end: {reply.body[-200:]!r}"
    return None
