"""What runs in the processes of grammars: the nursery, a process for each grammar, and cells with matchers.

The nursery reads the vocabulary once. It forks a process for each grammar, which compiles it and then forks cells, in
which matchers follow the outputs of sequences. A cell that computes for too long at one token is ended by the kernel
(its profiling timer), one that wants too much memory by its limit. Packets are JSON, or queries and masks as bytes.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import resource
import signal
import socket
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from quire.errors import QuireError
from quire.structured.compiler import as_refusal, parse_grammar
from quire.structured.matcher import CompiledGrammar, SequenceGrammar
from quire.structured.packets import ANSWER, LAST, OVER, PACKET_BYTES, QUERY, SPENT, CellLimits
from quire.structured.spec import StructuredOutputs
from quire.structured.vocabulary import Vocabulary, import_xgrammar


def nursery(control: socket.socket, read: Callable[[], Vocabulary], limits: CellLimits) -> NoReturn:
    """Fork a process for each grammar that is asked for, until the other side closes."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children are not waited for
    vocabulary: Vocabulary | None = None
    compiler, problem = None, "the vocabulary could not be read"
    try:
        vocabulary = read()
        compiler = import_xgrammar().GrammarCompiler(vocabulary.info, max_threads=1, cache_enabled=False)
    except Exception as error:
        problem = str(error) if isinstance(error, QuireError) else f"{type(error).__name__}: {error}"
    gc.collect()
    gc.freeze()
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
        code = 0  # nobody is interested any more
    finally:
        os._exit(code)


def _tell(link: socket.socket, **fields: Any) -> None:
    link.send(json.dumps(fields).encode())


def _grammar(link: socket.socket, data: bytes, compiler: Any, vocabulary: Vocabulary, limits: CellLimits) -> None:
    """Compile, and fork cells for as long as anybody may want them."""
    _tell(link, pid=os.getpid())
    _limit_memory(limits.memory_bytes)
    cpu = int(time.process_time() + limits.compile_seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, resource.RLIM_INFINITY))
    spec = StructuredOutputs.from_dict(json.loads(data))
    try:
        compiled = CompiledGrammar(compiler.compile_grammar(parse_grammar(spec)), vocabulary, spec.named_tokens)
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


class _Cell:
    """Answers queries in the order in which they come."""

    def __init__(self, link: socket.socket, compiled: CompiledGrammar, limits: CellLimits) -> None:
        self._link, self._compiled, self._limits = link, compiled, limits
        self._sequences: dict[int, _Followed] = {}
        self._spent: dict[int, float] = {}
        """Seconds of computing by request."""

    def run(self) -> None:
        _tell(self._link, pid=os.getpid())
        while data := self._link.recv(PACKET_BYTES):
            if data[:1] == b"{":
                self._manage(json.loads(data))
            else:
                self._take(data)

    def _manage(self, message: dict[str, Any]) -> None:
        if "start" in message:
            grammar = self._compiled.start(frozenset(message["stop_ids"]))
            self._sequences[message["start"]] = _Followed(grammar, message["request"], [])
            self._spent.setdefault(message["request"], message["spent"])
        else:
            self._sequences.pop(message["end"], None)

    def _take(self, data: bytes) -> None:
        kind, serial, index, start, num_tokens, num_drafts = QUERY.unpack_from(data)
        tokens = array("I", data[QUERY.size :]).tolist()
        followed = self._sequences[index]
        followed.output[start:] = tokens[:num_tokens]
        began = time.process_time()
        if kind != b"Q":
            return
        again = len(followed.output) - followed.num_followed  # many after a move to this cell
        followed.num_followed = len(followed.output)
        signal.setitimer(signal.ITIMER_PROF, self._limits.token_seconds * (1 + num_drafts + again / 64))
        masks = followed.grammar.masks(followed.output, tokens[num_tokens:])
        over = len(masks) == 1 and not any(masks[0]) and followed.grammar.over(followed.output)
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        self._spent[followed.request] = spent = self._spent[followed.request] + time.process_time() - began
        flags = (OVER if over else 0) | (SPENT if spent > self._limits.request_seconds else 0)
        for place, mask in enumerate(masks):
            last = LAST if place == len(masks) - 1 else 0
            self._link.send(ANSWER.pack(b"M", serial, place, flags | last) + mask)
