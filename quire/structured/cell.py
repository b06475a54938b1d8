"""What runs in the processes of grammars: the nursery, a process for each grammar, and cells with matchers.

The nursery reads the vocabulary once. It forks a process for each grammar, which compiles it and then forks cells, in
which matchers follow the outputs of sequences. Who computes for longer than most goes after the engine's own work. A
cell that computes for too long at one token is ended by the kernel (its profiling timer), one that wants too much
memory by its limit. Packets are JSON, or queries and masks as bytes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import math
import os
import resource
import select
import signal
import socket
import threading
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from quire.errors import QuireError
from quire.structured.compiler import as_refusal, parse_grammar
from quire.structured.matcher import CompiledGrammar, SequenceGrammar, allows_any
from quire.structured.output import Output
from quire.structured.packets import (
    ANSWER,
    ANSWER_SECONDS,
    FULL_BYTES,
    LAST,
    OVER,
    PACKET_BYTES,
    QUERY,
    SLOW,
    SPENT,
    CellLimits,
)
from quire.structured.spec import StructuredOutputs
from quire.structured.vocabulary import Vocabulary, import_xgrammar

_SMALL_STACK = 256 << 10
_LOW_NICE, _LOWEST_NICE = 10, 19
"""Beside one thread of the engine, such a one gets 10 % of a core, or 1.5 %."""
_LONG_SECONDS = 1.0
_LOOK_SECONDS = 0.25
"""Seconds between two checks whether long work is still wanted."""


class _Aside(threading.Thread):
    """Work on a thread whose priority can be lowered; that of the process, and of what it forks later, stays."""

    def __init__(self, work: Callable[[], Any], nice: int = 0) -> None:
        """`nice`: with which it begins."""
        super().__init__(daemon=True)
        self._work, self._nice = work, nice
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        _lower(self.native_id, self._nice)
        try:
            self._result = self._work()
        except BaseException as error:
            self._error = error

    def result(self, quick_seconds: float, link: socket.socket) -> Any:
        """Of the work, or its error. What is not quick goes after others, what is long after all others. The process
        ends here when the other side of `link` does: an engine that was killed ends nobody's work itself."""
        self.start()
        closed = select.poll()
        closed.register(link, select.POLLHUP | select.POLLRDHUP)
        for seconds, nice in ((quick_seconds, _LOW_NICE), (_LONG_SECONDS, _LOWEST_NICE), (math.inf, _LOWEST_NICE)):
            until = time.monotonic() + seconds
            while self.is_alive() and (left := until - time.monotonic()) > 0.0:
                self.join(min(left, _LOOK_SECONDS))
                if closed.poll(0):
                    os._exit(0)
            if self.is_alive():
                _lower(self.native_id, nice)
        if self._error is not None:
            raise self._error
        return self._result


def _lower(thread: int | None, nice: int) -> None:
    """The priority of a thread (0 or a process: its main one). Only who has privileges could raise it again."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, thread or 0, max(nice, os.getpriority(os.PRIO_PROCESS, thread or 0)))


def nursery(control: socket.socket, read: Callable[[], Vocabulary], limits: CellLimits, hurry: bool = True
            ) -> NoReturn:
    """Fork a process for each grammar that is asked for, until the other side closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    _announce(control, pid=os.getpid())
    vocabulary: Vocabulary | None = None
    compiler, problem = None, "the vocabulary could not be read"
    try:
        vocabulary = _Aside(read, 0 if hurry else _LOWEST_NICE).result(limits.compile_seconds, control)
        compiler = import_xgrammar().GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    except Exception as error:
        problem = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()
    _announce(control, ready=vocabulary is not None)
    while True:
        data, fds, _, _ = socket.recv_fds(control, PACKET_BYTES, 1)
        if not data:
            os._exit(0)
        with socket.socket(fileno=fds[0]) as link:
            if vocabulary is None:
                _tell(link, pid=0, error=problem)
            elif os.fork() == 0:
                control.close()
                _ends_with(functools.partial(_grammar, link, data, compiler, vocabulary, limits))


def _ends_with(work: Callable[[], None]) -> NoReturn:
    """A forked process does its work and goes, without anything that its parent would do in the end."""
    code = 1
    try:
        work()
        code = 0
    except BrokenPipeError:
        code = 0  # the engine has gone
    finally:
        os._exit(code)


def _announce(control: socket.socket, **fields: Any) -> None:
    try:
        _tell(control, **fields)
    except BrokenPipeError:
        os._exit(0)  # the engine has gone


def _tell(link: socket.socket, **fields: Any) -> None:
    link.send(json.dumps(fields).encode())


def _grammar(link: socket.socket, data: bytes, compiler: Any, vocabulary: Vocabulary, limits: CellLimits) -> None:
    """Compile, and fork cells until the engine has gone."""
    _tell(link, pid=os.getpid())
    cpu = int(time.process_time() + limits.compile_seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
    order = json.loads(data)
    spec = StructuredOutputs.from_dict(order["spec"])

    def work() -> CompiledGrammar:
        _limit_memory(limits.memory_bytes)
        return CompiledGrammar(compiler.compile_grammar(parse_grammar(spec)), vocabulary, spec.named_tokens)

    try:
        compiled = _Aside(work, _LOW_NICE if order["low"] else 0).result(limits.compile_quick_seconds, link)
    except (Exception, RecursionError) as error:
        _tell(link, error=str(as_refusal(error, spec)))
        return
    resource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    _tell(link, num_bytes=compiled.num_bytes)
    gc.freeze()
    while True:
        data, fds, _, _ = socket.recv_fds(link, PACKET_BYTES, 1)
        if not data:
            return
        with socket.socket(fileno=fds[0]) as cell:
            if os.fork() == 0:
                link.close()
                _ends_with(_Cell(cell, compiled, limits).run)


def _limit_memory(more: int) -> None:
    """So many bytes beyond what the process has already."""
    with open("/proc/self/status") as status:
        used = next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData:"))
    resource.setrlimit(resource.RLIMIT_DATA, (used + more, used + more))


@dataclass(slots=True)
class _Followed:
    """One sequence in a cell."""

    grammar: SequenceGrammar
    request: int
    output: list[int]
    num_followed: int = 0
    """Tokens of it that the matcher has seen."""


class _StepDown(threading.Thread):
    """Lowers the process's priority when the kernel's timer says that it has computed for too long at one mask. The
    signal is written to a pipe at once; a handler in Python would wait for the mask. `then`: what it calls then."""

    def __init__(self, then: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._then = then
        self._reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGVTALRM, lambda number, frame: None)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        self.done = False
        threading.stack_size(_SMALL_STACK)
        self.start()

    def run(self) -> None:
        os.read(self._reader, 1)
        _lower(os.getpid(), _LOWEST_NICE)
        self.done = True
        with contextlib.suppress(OSError):  # the engine has gone
            self._then()


class _Answers:
    """Sends masks, several in a packet. None that is ready waits for one that takes long: the engine blames the first
    that has not come for what the process computes. Those that wait here when the process dies at once come from
    another cell."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._unsent: list[bytes] = []
        self._num_bytes = 0
        self._sent_at = 0.0
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Questions have come."""
        self._sent_at = time.monotonic()

    def add(self, head: bytes, mask: bytes) -> None:
        with self._lock:
            self._unsent += (head, mask)
            self._num_bytes += len(head) + len(mask)
        if self._num_bytes >= FULL_BYTES or time.monotonic() - self._sent_at > ANSWER_SECONDS:
            self.send()

    def send(self) -> None:
        with self._lock:
            if self._unsent:
                self._link.send(b"".join(self._unsent))
                self._unsent, self._num_bytes = [], 0
            self._sent_at = time.monotonic()


class _Cell:
    """Answers queries in the order in which they come."""

    def __init__(self, link: socket.socket, compiled: CompiledGrammar, limits: CellLimits) -> None:
        self._link, self._compiled, self._limits = link, compiled, limits
        self._sequences: dict[int, _Followed] = {}
        self._spent: dict[int, float] = {}
        """Seconds of computing by request."""
        self._answers = _Answers(link)
        # Before the kernel ends it, what it has answered is sent.
        self._quick_seconds = min(limits.mask_quick_seconds, limits.token_seconds / 2)

    def run(self) -> None:
        _tell(self._link, pid=os.getpid())
        self._step_down = _StepDown(self._answers.send)
        space = bytearray(PACKET_BYTES)
        try:
            while size := self._link.recv_into(space):
                data = bytes(memoryview(space)[:size])
                if data[:1] == b"{":
                    self._manage(json.loads(data))
                else:
                    self._take_all(data)
        finally:
            self._answers.send()

    def _take_all(self, data: bytes) -> None:
        self._answers.begin()
        at = 0
        while at < len(data):
            head = QUERY.unpack_from(data, at)
            first = at + QUERY.size
            at = first + 4 * (head[4] + head[5])
            self._take(head, array("I", data[first:at]).tolist())
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
        self._answers.send()

    def _manage(self, message: dict[str, Any]) -> None:
        if "start" in message:
            grammar = self._compiled.start(frozenset(message["stop_ids"]))
            self._sequences[message["start"]] = _Followed(grammar, message["request"], [])
            self._spent.setdefault(message["request"], message["spent"])
        else:
            self._sequences.pop(message["end"], None)

    def _take(self, head: tuple[bytes, int, int, int, int, int], tokens: list[int]) -> None:
        kind, serial, index, start, num_tokens, num_drafts = head
        followed = self._sequences[index]
        if start < len(followed.output):
            followed.grammar.rewound(start)
        followed.output[start:] = tokens[:num_tokens]
        output = Output(followed.output, 0)
        began = time.process_time()
        if kind != b"Q":
            return
        again = len(followed.output) - followed.num_followed  # many after a move to this cell
        followed.num_followed = len(followed.output)
        signal.setitimer(signal.ITIMER_PROF, self._limits.token_seconds * (1 + num_drafts + again / 64))
        if not self._step_down.done:
            signal.setitimer(signal.ITIMER_VIRTUAL, self._quick_seconds)
        masks = followed.grammar.masks(output, tokens[num_tokens:])
        over = len(masks) == 1 and not allows_any(masks[0]) and followed.grammar.over(output)
        self._spent[followed.request] = spent = self._spent[followed.request] + time.process_time() - began
        flags = (OVER if over else 0) | (SPENT if spent > self._limits.request_seconds else 0)
        flags |= SLOW if self._step_down.done else 0
        for place, mask in enumerate(masks):
            last = LAST if place == len(masks) - 1 else 0
            self._answers.add(ANSWER.pack(b"M", serial, place, flags | last, len(mask)), mask)
