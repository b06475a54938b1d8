"""Seeded request streams for judging prefix caches: each favours or punishes another way of evicting."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from random import Random

Request = list[int]
"""Block ids of one prompt, root first; equal ids mean equal prefixes."""


class _Ids:
    """Hands out block ids that were never used before."""

    def __init__(self) -> None:
        self._next = 0

    def take(self, count: int) -> Request:
        self._next += count
        return list(range(self._next - count, self._next))


def _lognormal(random: Random, median: float, spread: float, most: int) -> int:
    return max(1, min(most, round(random.lognormvariate(math.log(median), spread))))


def _zipf_weights(count: int, exponent: float) -> list[float]:
    return [1.0 / (rank + 1) ** exponent for rank in range(count)]


def conversations(random: Random, requests: int) -> Iterator[Request]:
    """Chats that go on after a pause or end, all behind one system prompt; the last block is never full."""
    ids = _Ids()
    system = ids.take(1)
    waiting: list[tuple[float, int, Request, float]] = []
    clock = 0.0
    for number in range(requests):
        clock += random.expovariate(1.0)
        if waiting and waiting[0][0] <= clock:
            _, _, prompt, going_on = heapq.heappop(waiting)
        else:
            prompt, going_on = system + ids.take(_lognormal(random, 10, 1.0, 120)), random.betavariate(1, 1.5)
        yield prompt + ids.take(1)
        if random.random() < going_on:
            pause = random.lognormvariate(math.log(150), 1.0)
            longer = prompt + ids.take(random.randint(1, 4))
            heapq.heappush(waiting, (clock + pause, number, longer, going_on))


def system_prompts(random: Random, requests: int) -> Iterator[Request]:
    """Three hundred system prompts of Zipf popularity, each followed by a question nobody repeats."""
    ids = _Ids()
    prompts = [ids.take(_lognormal(random, 10, 0.7, 60)) for _ in range(300)]
    weights = _zipf_weights(len(prompts), 0.9)
    for prompt in random.choices(prompts, weights, k=requests):
        yield prompt + ids.take(random.randint(1, 6))


def drifting_prompts(random: Random, requests: int) -> Iterator[Request]:
    """As `system_prompts`, but what is popular keeps changing: yesterday's favourites are dead weight."""
    ids = _Ids()
    prompts = [ids.take(_lognormal(random, 10, 0.7, 60)) for _ in range(150)]
    weights = _zipf_weights(len(prompts), 1.0)
    for number in range(requests):
        if number % 25 == 24:
            prompts.insert(random.randrange(20), ids.take(_lognormal(random, 10, 0.7, 60)))
            prompts.pop()
        yield random.choices(prompts, weights)[0] + ids.take(random.randint(1, 4))


def scans(random: Random, requests: int) -> Iterator[Request]:
    """Chats and popular prompts, with long one-off documents washing through in bursts."""
    ids = _Ids()
    chats = conversations(random, requests)
    prompts = [ids.take(_lognormal(random, 8, 0.5, 40)) for _ in range(60)]
    weights = _zipf_weights(len(prompts), 0.8)
    for number in range(requests):
        if number % 400 < 80:
            yield [-1 - block for block in ids.take(random.randint(20, 80))]
        elif random.random() < 0.5:
            yield [-1 - block for block in random.choices(prompts, weights)[0] + ids.take(2)]
        else:
            yield next(chats)


def loop(random: Random, requests: int) -> Iterator[Request]:
    """The same 150 documents in the same order, round and round: hopeless for LRU in a smaller cache."""
    ids = _Ids()
    documents = [ids.take(random.randint(5, 15)) for _ in range(150)]
    for number in range(requests):
        yield documents[number % len(documents)] + ids.take(1)


def recency(random: Random, requests: int) -> Iterator[Request]:
    """The next document is one of the last few used, the later the likelier: nothing beats LRU here."""
    ids = _Ids()
    stack = [ids.take(random.randint(4, 16)) for _ in range(20)]
    for _ in range(requests):
        depth = int(random.paretovariate(0.7)) - 1
        if depth >= len(stack):
            document = ids.take(random.randint(4, 16))
        else:
            document = stack.pop(-1 - depth)
        stack.append(document)
        yield list(document)


def agents(random: Random, requests: int) -> Iterator[Request]:
    """Agents that re-send a growing context every few requests, for a while, and then stop for good."""
    ids = _Ids()
    tools = [ids.take(12) for _ in range(4)]
    running: list[tuple[Request, int]] = []
    for _ in range(requests):
        if len(running) < 24:
            running.append((list(random.choice(tools)), random.randint(5, 60)))
        slot = random.randrange(len(running))
        context, left = running[slot]
        context += ids.take(random.randint(1, 3))
        yield list(context)
        if left > 1:
            running[slot] = (context, left - 1)
        else:
            running.pop(slot)


def bursts(random: Random, requests: int) -> Iterator[Request]:
    """Documents asked about many times within minutes and never again: counting uses keeps the dead."""
    ids = _Ids()
    hot: list[tuple[Request, int]] = []
    for _ in range(requests):
        if len(hot) < 40:
            hot.append((ids.take(random.randint(5, 30)), random.randint(1, 12)))
        slot = random.randrange(len(hot))
        document, left = hot[slot]
        yield document + ids.take(1)
        if left > 1:
            hot[slot] = (document, left - 1)
        else:
            hot.pop(slot)


def twice(random: Random, requests: int) -> Iterator[Request]:
    """Every document comes back once, after a while, and never a third time: a hit means it can go."""
    ids = _Ids()
    due: list[tuple[float, Request]] = []
    for number in range(requests):
        if due and due[0][0] <= number:
            yield heapq.heappop(due)[1]
            continue
        document = ids.take(random.randint(5, 20))
        heapq.heappush(due, (number + random.uniform(20, 400), document))
        yield list(document)


def uniform(random: Random, requests: int) -> Iterator[Request]:
    """Four hundred equally popular documents: every policy gets the share that fits."""
    ids = _Ids()
    documents = [ids.take(random.randint(5, 15)) for _ in range(400)]
    for _ in range(requests):
        yield list(random.choice(documents))


def phases(random: Random, requests: int) -> Iterator[Request]:
    """Chats, then popular prompts, then a loop, then agents, changing without notice."""
    parts = [conversations, system_prompts, loop, agents, recency]
    phase = max(1, requests // 10)
    for number in range(0, requests, phase):
        kind = parts[number // phase % len(parts)]
        for request in kind(random, min(phase, requests - number)):
            yield [block * requests + number for block in request]


def tool_mix(random: Random, requests: int) -> Iterator[Request]:
    """A few very popular tool prompts with short tails among ordinary chats."""
    ids = _Ids()
    tools = [ids.take(length) for length in (12, 5, 8, 20, 3)]
    chats = conversations(random, requests)
    for _ in range(requests):
        if random.random() < 0.55:
            tool = random.choices(tools, (8, 5, 2, 1, 1))[0]
            yield [-1 - block for block in tool + ids.take(random.randint(1, 4))]
        else:
            yield next(chats)


def regular(random: Random, requests: int) -> Iterator[Request]:
    """Jobs that come back at a steady beat of their own with a prompt that grows, among prompts that never do."""
    ids = _Ids()
    due: list[tuple[float, int, Request, float, int]] = []
    for number in range(requests):
        if due and due[0][0] <= number:
            _, _, prompt, beat, left = heapq.heappop(due)
        elif random.random() < 0.35:
            yield ids.take(_lognormal(random, 12, 0.6, 60))
            continue
        else:
            prompt = ids.take(_lognormal(random, 14, 0.6, 80))
            beat, left = random.uniform(60, 900), random.randint(2, 8)
        yield prompt + ids.take(1)
        if left:
            longer = prompt + ids.take(random.randint(0, 2))
            heapq.heappush(due, (number + beat * random.uniform(0.95, 1.05), number, longer, beat, left - 1))


def regular_documents(random: Random, requests: int) -> Iterator[Request]:
    """Documents that are asked about a few times at even distances, at first close together, then apart."""
    ids = _Ids()
    due: list[tuple[float, int, Request, float, int]] = []
    for number in range(requests):
        if due and due[0][0] <= number:
            _, _, document, gap, left = heapq.heappop(due)
        else:
            document, gap, left = ids.take(random.randint(8, 30)), random.choice((15.0, 60.0, 240.0)), 3
        yield document + ids.take(random.randint(1, 3))
        if left and random.random() < 0.8:
            heapq.heappush(due, (number + gap * random.uniform(0.9, 1.1), number, document, 2 * gap, left - 1))


PREFIX_WORKLOADS: dict[str, Callable[[Random, int], Iterator[Request]]] = {
    kind.__name__: kind
    for kind in (conversations, system_prompts, drifting_prompts, scans, loop, recency, agents, bursts, twice,
                 uniform, phases, tool_mix, regular, regular_documents)
}


def make_workload(name: str, requests: int, seed: int = 0) -> list[Request]:
    """The first `requests` prompts of the named workload; the same for the same seed, everywhere."""
    return list(PREFIX_WORKLOADS[name](Random(seed), requests))
