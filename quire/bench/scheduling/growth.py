"""`quire bench scheduler --growth`: what the engine does per step or per request while queues and prompts grow.

It counts executed bytecodes, which are the same on every machine and in every run, and where no row should grow.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from quire.engine.front.admission import Admission
from quire.engine.outputs.output_processor import OutputProcessor
from quire.errors import QueueFullError
from quire.executor.dummy import DummyExecutor
from quire.kvcache.manager import KVCacheManager
from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.scheduler.beam import BeamSearch
from quire.scheduler.queue import FairQueue, FCFSQueue, PriorityQueue, WaitingQueue
from quire.scheduler.request import Request
from quire.scheduler.scheduler import Limits, Scheduler
from quire.speculation.ngram import NgramSource
from quire.speculation.speculator import LookupSpeculator
from quire.structured.output import Output, agreement

_BLOCK_SIZE = 16
_CHUNK = 512
_STEADY, _BISECTION = 1.05, 200
"""A row is said to grow beyond so many times the operations at the smallest size, and so many more: searching a prompt
by halves costs a few operations for each doubling."""


@dataclass(slots=True)
class Count:
    """Bytecodes that were executed."""

    operations: int = 0


@contextmanager
def counted() -> Iterator[Count]:
    """Count what the code within does in this thread, C functions apart."""
    count = Count()

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        frame.f_trace_opcodes = True
        frame.f_trace_lines = False
        if event == "opcode":
            count.operations += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield count
    finally:
        sys.settrace(before)


@dataclass(frozen=True, slots=True)
class Row:
    """One cost, measured at a size."""

    name: str
    of: str
    """What grows."""
    measure: Callable[[int], int]
    """Operations at a size."""

    def growth(self, sizes: list[int]) -> tuple[list[int], float]:
        """Operations at each size, and how many times those of the first the last are."""
        found = [self.measure(size) for size in sizes]
        return found, found[-1] / found[0]


def _prompt(seed: int, length: int) -> list[int]:
    return [(7919 * seed + 31 * j) % 4999 for j in range(length)]


def _request(name: str, prompt: list[int], max_tokens: int = 8, priority: int = 0, tenant: str = "") -> Request:
    return Request(name, prompt, SamplingParams(max_tokens=max_tokens, ignore_eos=True), seed=1, arrival_time=0.0,
                   priority=priority, tenant=tenant)


def _scheduler(num_blocks: int, longest: int, rows: int = 8, queue: WaitingQueue | None = None,
               chunk: int = _CHUNK) -> Scheduler:
    cache = KVCacheManager(num_blocks, _BLOCK_SIZE)
    return Scheduler(Limits(rows, chunk, longest), cache, queue or FCFSQueue())


def _run(scheduler: Scheduler, executor: DummyExecutor, steps: int | None = None) -> None:
    """So many steps, or until all is done."""
    while scheduler.has_requests and (steps is None or steps > 0):
        plan = scheduler.schedule()
        if plan is None:
            return
        scheduler.update(executor.execute(plan))
        scheduler.take_updates()
        steps = None if steps is None else steps - 1


def _count_step(scheduler: Scheduler, executor: DummyExecutor) -> int:
    with counted() as count:
        plan = scheduler.schedule()
    if plan is not None:
        scheduler.update(executor.execute(plan))
        scheduler.take_updates()
    return count.operations


def blocked_head(tokens: int) -> int:
    """A step in which a request with that many cached tokens finds no room behind one that decodes."""
    blocks = tokens // _BLOCK_SIZE
    scheduler, executor = _scheduler(blocks + 20, tokens + 400), DummyExecutor()
    prompt = _prompt(1, tokens)
    scheduler.add(_request("before", prompt, max_tokens=1))
    _run(scheduler, executor)
    scheduler.add(_request("decoding", _prompt(2, 64), max_tokens=128))
    _run(scheduler, executor, 2)
    scheduler.add(_request("blocked", [*prompt, *_prompt(3, 256)]))
    _run(scheduler, executor, 2)
    if scheduler.running.keys() != {"decoding"}:
        raise RuntimeError("the request was to be blocked")
    return _count_step(scheduler, executor)


def new_prompt(tokens: int) -> int:
    """The step that sees a prompt for the first time and computes its first chunk."""
    scheduler, executor = _scheduler(tokens // _BLOCK_SIZE + 16, tokens + 100), DummyExecutor()
    scheduler.add(_request("new", _prompt(1, tokens)))
    return _count_step(scheduler, executor)


def waiting_queue(waiting: int) -> int:
    """A decode step with that many requests waiting."""
    scheduler, executor = _scheduler(64, 600, rows=2), DummyExecutor()
    for i in range(2):
        scheduler.add(_request(f"running {i}", _prompt(i, 32), max_tokens=100))
    for i in range(waiting):
        scheduler.add(_request(f"waiting {i}", _prompt(i, 32)))
    _run(scheduler, executor, 3)
    return _count_step(scheduler, executor)


def fair_queue(waiting: int) -> int:
    """A decode step with that many tenants waiting in a fair queue."""
    scheduler, executor = _scheduler(64, 600, rows=2, queue=FairQueue()), DummyExecutor()
    for i in range(2):
        scheduler.add(_request(f"running {i}", _prompt(i, 32), max_tokens=100, tenant=f"running {i}"))
    _run(scheduler, executor, 1)
    for i in range(waiting):
        scheduler.add(_request(f"waiting {i}", [1, 2, 3], tenant=f"tenant {i}"))
    _run(scheduler, executor, 3)
    return _count_step(scheduler, executor)


def running_groups(size: int) -> int:
    """Letting one more in while a 64th as many run; planning those is another matter and is taken off."""
    running = size // 64

    def step(newcomers: int) -> int:
        scheduler, executor = _scheduler(4 * running + 64, 600, rows=running + 8, chunk=40 * running), DummyExecutor()
        for i in range(running):
            scheduler.add(_request(f"running {i}", _prompt(i, 16), max_tokens=100))
        _run(scheduler, executor, 3)
        for i in range(newcomers):
            scheduler.add(_request(f"new {i}", _prompt(7 * i + 1, 15)))
        return _count_step(scheduler, executor)

    return (step(5) - step(1)) // 4


def aborted_of_queue(waiting: int) -> int:
    """Per abort, when half of a priority queue is aborted and one is peeked at."""
    scheduler = _scheduler(64, 600, queue=PriorityQueue())
    for i in range(waiting):
        scheduler.add(_request(f"waiting {i}", [1, 2, 3], priority=i % 7))
    with counted() as count:
        for i in range(0, waiting, 2):
            scheduler.abort(f"waiting {i}")
        scheduler.waiting.peek()
    return count.operations // (waiting // 2)


def refusal(waiting: int) -> int:
    """Refusing a request when that many wait and as many have left within half a minute."""
    admission = Admission(waiting, 10**9, 1, clock=lambda: 0.0)
    for handle in range(2 * waiting + 1):
        admission.sent(handle, 10, 1, f"tenant {handle % 100}")
        if handle <= waiting:
            admission.started(handle)
            admission.ended(handle)
    admission.taken(2 * waiting)
    with counted() as count:
        try:
            admission.check(10, 1)
        except QueueFullError:
            admission.displaced_by("tenant 1", 10)
    return count.operations


def suffix_automaton(tokens: int) -> int:
    """The first decode step of a prompt that prompt lookup searches."""
    cache = KVCacheManager(tokens // _BLOCK_SIZE + 64, _BLOCK_SIZE)
    speculator = LookupSpeculator(NgramSource(2), 4)
    scheduler = Scheduler(Limits(2, tokens + 64, tokens + 100), cache, speculator=speculator)
    executor = DummyExecutor()
    scheduler.add(_request("long", _prompt(1, tokens)))
    _run(scheduler, executor, 1)
    return _count_step(scheduler, executor)


def grammar_token(tokens: int) -> int:
    """Seeing which token of an answer is new to its grammar, with that many before it."""
    text = _prompt(1, tokens)
    output, known = Output(text, 0), text[:-1]
    with counted() as count:
        new = output[agreement(output, known, len(known)) :]
    if new != text[-1:]:
        raise RuntimeError("one token was to be new")
    return count.operations


def beam_step(tokens: int) -> int:
    """Choosing how beams go on that have that many tokens."""
    most = tokens + 2
    beams = BeamSearch(BeamSearchParams(beam_width=2, max_tokens=most, ignore_eos=True), frozenset())

    def report() -> None:
        candidates = [(1, -1.0), (2, -1.5), (3, -2.5), (4, -3.0)]
        place = 0
        while not beams.report(place, candidates):
            place += 1

    for _ in range(tokens):
        report()
        beams.advance(most)
    report()
    with counted() as count:
        beams.advance(most)
    return count.operations


def answer_delta(tokens: int) -> int:
    """The output after one more token of an answer that long, of which the reader takes what is new."""
    processor = OutputProcessor("r", SamplingParams(max_tokens=None), None, [1])
    processor.process(_prompt(1, tokens))
    processor.output()
    with counted() as count:
        processor.process_token(1)
        if processor.output().outputs[0].token_ids_delta != [1]:
            raise RuntimeError("one token was to be new")
    return count.operations


ROWS = (
    Row("a blocked head of the queue, per step", "its prompt tokens", blocked_head),
    Row("first step of a new prompt", "its tokens", new_prompt),
    Row("a decode step", "waiting requests", waiting_queue),
    Row("a decode step, fair queue", "waiting tenants", fair_queue),
    Row("letting one request in", "64 x running requests", running_groups),
    Row("an abort in a priority queue", "waiting requests", aborted_of_queue),
    Row("a refusal", "waiting requests", refusal),
    Row("first decode step with prompt lookup", "prompt tokens", suffix_automaton),
    Row("a token under a grammar", "answer tokens", grammar_token),
    Row("a step of beam search", "answer tokens", beam_step),
    Row("an output with what is new", "answer tokens", answer_delta),
)


def print_table(sizes: list[int]) -> bool:
    """Print operations of every row at every size; true if none grows."""
    flat = True
    print(f"{'operations':<42}{'of':<24}" + "".join(f"{size:>10}" for size in sizes) + f"{'times':>8}")
    for row in ROWS:
        found, times = row.growth(sizes)
        flat = flat and found[-1] <= _STEADY * found[0] + _BISECTION
        print(f"{row.name:<42}{row.of:<24}" + "".join(f"{number:>10}" for number in found) + f"{times:>8.2f}",
              flush=True)
    print("no row grows" if flat else "a row grows")
    return flat
