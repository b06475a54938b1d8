"""Compiles grammars beside the step loop, and keeps the compiled ones within a bound.

Compiling takes from a millisecond to many seconds. It runs on threads of its own (the compiler lets go of
Python's lock), several requests that ask for the same share one compilation, and what takes too long, is too
large or cannot be enforced fails only the requests that asked for it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Final

from quire.errors import InvalidRequestError, QuireError
from quire.structured.json_schema import check_schema
from quire.structured.matcher import CompiledGrammar
from quire.structured.regex import portable_regex
from quire.structured.spec import StructuredOutputs
from quire.structured.tags import enforced_tag
from quire.structured.vocabulary import Vocabulary, import_xgrammar

MAX_WHITESPACE: Final = 16
"""Most white space in a row between the parts of JSON: a model left to itself may go on with it for ever."""
MAX_GRAMMARS: Final = 1024


@dataclass(frozen=True, slots=True)
class CompileLimits:
    """What compiling may take, and what is kept of it."""

    timeout_s: float = 30.0
    cache_bytes: int = 256 << 20
    threads: int = 2


@dataclass(slots=True)
class _Job:
    """One compilation; `deadline` is the latest of those who wait for it."""

    future: Future[CompiledGrammar]
    deadline: float


class PendingGrammar:
    """A request's claim on a grammar."""

    __slots__ = ("_clock", "_deadline", "_field", "_future", "_timeout")

    def __init__(self, future: Future[CompiledGrammar], field: str, timeout: float,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._future = future
        self._field = field
        self._timeout = timeout
        self._clock = clock
        self._deadline = clock() + timeout

    @property
    def settled(self) -> bool:
        """It is there, or has failed, or took too long."""
        return self._future.done() or self._clock() > self._deadline

    def result(self) -> CompiledGrammar:
        """Of a settled one; raises InvalidRequestError, naming the field, if there is none."""
        if not self._future.done():
            raise InvalidRequestError(f"{self._field} took longer than {self._timeout:g} s to compile: simplify it, or "
                                      "raise grammar_timeout", field=self._field)
        return self._future.result()

    def wait(self, seconds: float) -> None:
        """Until it is done, but no longer than that."""
        wait([self._future], timeout=seconds)

    def release(self) -> None:
        """Its request has ended."""


class GrammarCompiler:
    """Grammars for one model. `vocabulary` is called once, on a compiling thread, when the first is asked for."""

    def __init__(self, vocabulary: Callable[[], Vocabulary], limits: CompileLimits | None = None) -> None:
        self.limits = CompileLimits() if limits is None else limits
        self._read_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._compiler: Any = None
        self._setting_up = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._lock = threading.Lock()
        self._jobs: OrderedDict[bytes, _Job] = OrderedDict()
        self._cached_bytes = 0

    @property
    def cached_bytes(self) -> int:
        return self._cached_bytes

    @property
    def num_cached(self) -> int:
        return len(self._jobs)

    def check(self, spec: StructuredOutputs) -> None:
        """Parse it here and now, without the vocabulary; raises InvalidRequestError. What is known is not parsed."""
        with self._lock:
            if spec.key in self._jobs:
                return
        parse_grammar(spec)

    def submit(self, spec: StructuredOutputs, tenant: str = "",
               stop_ids: frozenset[int] = frozenset()) -> PendingGrammar:
        """Ask for a grammar; returns at once. For whom, and what ends it, makes no difference here."""
        key, timeout = spec.key, self.limits.timeout_s
        deadline = time.monotonic() + timeout
        with self._lock:
            job = self._jobs.get(key)
            if job is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(self.limits.threads, thread_name_prefix="quire-grammar")
                job = self._jobs[key] = _Job(Future(), deadline)
                self._pool.submit(self._run, key, job, spec)
            job.deadline = max(job.deadline, deadline)
            self._jobs.move_to_end(key)
        return PendingGrammar(job.future, spec.field, timeout)

    def _run(self, key: bytes, job: _Job, spec: StructuredOutputs) -> None:
        try:
            if time.monotonic() > job.deadline:
                raise InvalidRequestError(f"{spec.field} waited longer than {self.limits.timeout_s:g} s for other "
                                          "grammars to be compiled: try again later", field=spec.field)
            compiled = self._compile(spec)
        except BaseException as error:
            with self._lock:
                self._jobs.pop(key, None)
            job.future.set_exception(as_refusal(error, spec))
        else:
            self._keep(compiled)
            job.future.set_result(compiled)

    def _compile(self, spec: StructuredOutputs) -> CompiledGrammar:
        grammar = parse_grammar(spec)
        with self._setting_up:
            if self._vocabulary is None or self._compiler is None:
                self._vocabulary = self._read_vocabulary()
                # Its own cache is off: ours has a bound and knows what is in use.
                self._compiler = import_xgrammar().GrammarCompiler(
                    self._vocabulary.info, max_threads=1, cache_enabled=False)
        compiled = CompiledGrammar(self._compiler.compile_grammar(grammar), self._vocabulary, spec.named_tokens)
        if compiled.num_bytes > self.limits.cache_bytes:
            raise InvalidRequestError(
                f"{spec.field} needs {compiled.num_bytes} bytes when compiled, and grammar_cache_memory is "
                f"{self.limits.cache_bytes}: simplify it", field=spec.field)
        return compiled

    def _keep(self, compiled: CompiledGrammar) -> None:
        """Count it in, and forget the least recently used while there are too many, or too much of them."""
        with self._lock:
            self._cached_bytes += compiled.num_bytes
            for key, job in list(self._jobs.items()):
                if self._cached_bytes <= self.limits.cache_bytes and len(self._jobs) <= MAX_GRAMMARS:
                    break
                # One that is under way stays: those who wait for it would otherwise compile it again.
                if job.future.done():
                    del self._jobs[key]
                    self._cached_bytes -= job.future.result().num_bytes

    def close(self) -> None:
        """What is being compiled is abandoned."""
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool = None


def parse_grammar(spec: StructuredOutputs) -> Any:
    """xgrammar's Grammar, or InvalidRequestError with what it said."""
    xgrammar = import_xgrammar()
    make = xgrammar.Grammar
    value = getattr(spec, spec.kind)
    try:
        if spec.kind == "json":
            return make.from_json_schema(_enforced(value), any_whitespace=True, max_whitespace_cnt=MAX_WHITESPACE)
        if spec.kind == "json_object":
            return make.from_json_schema('{"type": "object", "additionalProperties": true}', any_whitespace=True,
                                         max_whitespace_cnt=MAX_WHITESPACE)
        if spec.kind == "regex":
            return make.from_regex(portable_regex(value))
        if spec.kind == "choice":
            return make.from_ebnf("root ::= " + " | ".join(_literal(text) for text in value))
        if spec.kind == "structural_tag":
            return make.from_structural_tag(enforced_tag(json.loads(value)))
        return make.from_ebnf(value)
    except Exception as error:
        raise as_refusal(error, spec) from None


def _enforced(schema: str) -> str:
    """The schema in the words that the compiler enforces."""
    parsed = json.loads(schema)
    problem = check_schema(parsed)
    if problem is not None:
        raise ValueError(problem)
    return json.dumps(parsed)


def _literal(text: str) -> str:
    """A text as a literal of EBNF: the escapes of JSON, which are those of EBNF for all but a slash."""
    return json.dumps(text, ensure_ascii=False)


def as_refusal(error: BaseException, spec: StructuredOutputs) -> QuireError:
    """What a caller is told: errors of the compiler are the request's fault, and name its field."""
    if isinstance(error, QuireError):
        return error
    said = str(error).strip().splitlines()
    # The compiler prefixes its own file and line.
    reason = said[-1].split(": ", 1)[-1] if said else type(error).__name__
    return InvalidRequestError(f"{spec.field} cannot be used: {reason:.400}", field=spec.field)
