"""Requests that arrive over time, played through an engine in real time, and when their tokens came."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING

from quire.sampling.params import SamplingParams

if TYPE_CHECKING:
    from quire.llm import LLM


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: when it comes, in seconds from the start, what it asks, and how many tokens it wants."""

    at: float
    prompt: list[int]
    num_output: int


def arrivals(count: int, rate: float, prompt_tokens: tuple[int, int], output_tokens: tuple[int, int],
             vocab_size: int, seed: int) -> list[Arrival]:
    """Poisson arrivals of `rate` per second with uniform lengths; the same for the same seed."""
    rng = random.Random(f"quire-arrivals-{seed}")
    at, found = 0.0, []
    for _ in range(count):
        length, lowest = rng.randint(*prompt_tokens), min(100, vocab_size - 1)
        prompt = [rng.randrange(lowest, vocab_size) for _ in range(length)]
        found.append(Arrival(at, prompt, rng.randint(*output_tokens)))
        at += rng.expovariate(rate)
    return found


@dataclass(slots=True)
class Story:
    """What became of one request, in seconds from the start."""

    arrived: float
    scheduled: float = 0.0
    tokens: list[float] = field(default_factory=list)

    @property
    def first_token_time(self) -> float:
        return self.tokens[0] - self.arrived

    @property
    def gaps(self) -> list[float]:
        return [later - sooner for sooner, later in pairwise(self.tokens)]


def play(llm: LLM, requests: Sequence[Arrival]) -> list[Story]:
    """Add each request when its time has come, step the engine, note the time of every token.

    Times count from the planned arrival, also where the engine was in the middle of a step then: a request
    waits from when it came, not from when somebody had time to look.
    """
    start, epoch = time.perf_counter(), time.time()
    stories = [Story(request.at) for request in requests]
    coming = list(enumerate(requests))[::-1]
    while coming or llm.has_unfinished_requests():
        now = time.perf_counter() - start
        if coming and coming[-1][1].at > now and not llm.has_unfinished_requests():
            time.sleep(coming[-1][1].at - now)
            continue
        while coming and coming[-1][1].at <= now:
            index, request = coming.pop()
            params = SamplingParams(
                temperature=0, max_tokens=request.num_output, ignore_eos=True, detokenize=False)
            llm.add_request(f"arrival-{index}", request.prompt, params, arrival_time=epoch + request.at)
        outputs = llm.step()
        now = time.perf_counter() - start
        for output in outputs:
            story = stories[int(output.request_id.rpartition("-")[2])]
            story.tokens += [now] * len(output.outputs[0].token_ids_delta)
            if output.error is not None:
                raise RuntimeError(f"{output.request_id} failed: {output.error}")
            if output.metrics.first_scheduled_time is not None:
                story.scheduled = max(story.arrived, output.metrics.first_scheduled_time - epoch)
    return stories


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-share * len(ordered) // 1) - 1))]
