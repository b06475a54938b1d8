"""Records the kernel calls of a decoder's step on a CPU, and runs them again as one call into C.

A step of one token makes some hundreds of kernel calls, and each costs Python several microseconds. But which calls
they are depends on the number of tokens alone, also where tensor ranks exchange sums in them; only the step's context
(positions, slots, block tables, ...) is another each time. So the decoder's forward runs once with a library in front
of the kernels that writes down every call. From then on `quire_replay` makes the same calls on the new context, and
Python is not asked.

An argument of a recorded call is a constant (a weight, a cache, a size), or one of the step's words (`Step.words`),
or lies among the intermediate results, for which the recorder has one piece of memory: results that are not needed at
the same time share it.

Nothing is recorded on trust. A torch operation that computes something would be missing from the list, so it refuses
the step (`_Watch`), as does a kernel that has no recorded form. A step must be recorded twice with the same outcome
before it is run from the list. What is refused runs by plain calls, as do steps of many tokens, where Python's part is
small.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from operator import is_
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire.errors import EngineError
from quire.kernels.cpu.sampling import Rules, check_rules
from quire.kernels.types import LayerCache, StepContext
from quire.ops.cpu_drafts import Chain, ChainStep, Guesses, RecordedPass, check_ids
from quire.ops.cpu_step import RESULTS, ZERO, StepNumber, read_step
from quire.parallel.collectives import KernelGroup

GROUP_KERNELS = ("quire_group_linear", "quire_group_embed")
"""Those that wait for other ranks: what they return is for `KernelGroup.check`."""
MOST_TOKENS = 64
"""Steps of more tokens are not recorded."""
_OFTEN_SEEN, _FIRST_TIMES = 8, 3
"""Of steps of more tokens than that so many are run before one is recorded."""
_MOST_BYTES = 64 << 20
"""Nor those whose intermediate results take more: while a step is recorded they are all kept."""
_MOST_WORDS = 24  # MOST_WORDS of recorded.h
_ALIGNMENT = 64
_CALL = np.dtype([("run", np.int64), ("count", np.int32), ("bases", np.uint8, _MOST_WORDS),
                  ("values", np.int64, _MOST_WORDS)], align=True)  # recorded_call of recorded.h
_ATEN = torch.ops.aten
_INPUTS = (torch.int64, torch.float32)
_NEW = (_ATEN.empty.memory_format, _ATEN.new_empty.default)
_VIEWS = (_ATEN.view.default, _ATEN.slice.Tensor, _ATEN.select.int, _ATEN.detach.default, _ATEN.alias.default)
Words = tuple[str, tuple[int, ...], tuple[int, ...]]
"""A call: the kernel's name, for each argument a place among the step's words, and what is added to that word."""


class RecordableOps(Protocol):
    """The operations whose kernel calls are recorded."""

    @property
    def library(self) -> ctypes.CDLL: ...

    def calling(self, library: Any) -> AbstractContextManager[None]:
        """Inside, kernels are called through `library`, and the step is looked at anew."""
        ...


class _Recording:
    """Stands in front of the library, makes the calls of its own thread and writes them down."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._thread = threading.get_ident()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.results: list[Tensor] = []
        self._bytes = 0
        self.refused: str | None = None
        """Why this step cannot be run from a list."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = partial(self._call, name, getattr(self._library, name))
        setattr(self, name, call)
        return call

    def _call(self, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
        if threading.get_ident() == self._thread:
            self.calls.append((name, arguments))
        return function(*arguments)

    def keep(self, result: Tensor) -> None:
        """Memory for a result: it is kept, so that no other result has its address."""
        self._bytes += result.nbytes
        if self._bytes > _MOST_BYTES:
            self.refuse("its intermediate results take too much memory")
        if self.refused is None:
            self.results.append(result)

    def refuse(self, reason: str) -> None:
        self.refused = self.refused or reason
        self.results.clear()


class _Watch(TorchDispatchMode):
    """Sees every torch operation while a step is recorded: those that compute something refuse the recording."""

    def __init__(self, recording: _Recording) -> None:
        super().__init__()
        self._recording = recording

    def _see(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _NEW:
            self._recording.keep(found)
        elif func not in _VIEWS:
            self._recording.refuse(f"{func} is not one of our kernels")
        return found


# Torch wraps a method of this name that the class is born with, and the wrapper's first call imports all of
# torch._dynamo: more than a second, and packages that are not ours to need.
_Watch.__torch_dispatch__ = _Watch._see  # type: ignore[assignment, method-assign]


@dataclass(slots=True)
class _Span:
    """An intermediate result: where it lay while it was recorded, the first and last call that name it, and where it
    lies when the step is run again."""

    start: int
    end: int
    first: int = -1
    last: int = -1
    offset: int = 0


@dataclass(frozen=True, slots=True)
class _Ready:
    """The words of a step; keeps alive what they point at."""

    ctx: StepContext
    ids: Tensor
    words: ctypes.Array[ctypes.c_int64]


@dataclass(slots=True)
class RecordedStep:
    """The calls of a step, and where it leaves its results."""

    calls: list[Words]
    results_bytes: int
    outs: list[tuple[int, tuple[int, int]]]
    """Where each of its results lies, and its shape."""
    confirmed: bool = field(default=False, compare=False)
    encoded: npt.NDArray[Any] | None = field(default=None, compare=False)
    address: int = field(default=0, compare=False)
    results: tuple[Tensor, ...] | None = field(default=None, compare=False)
    lasting: dict[int, _Ready] = field(default_factory=dict, compare=False)
    """The words of contexts that last, by their identity."""

    def encode(self, library: ctypes.CDLL) -> None:
        """The calls as `quire_replay` reads them."""
        self.encoded = encoded = np.zeros(len(self.calls), _CALL)
        for row, (name, bases, values) in zip(encoded, self.calls, strict=True):
            row["run"] = ctypes.cast(getattr(library, f"{name}_recorded"), ctypes.c_void_p).value or 0
            row["count"] = len(bases)
            row["bases"][: len(bases)] = bases
            row["values"][: len(values)] = values
        self.address = encoded.ctypes.data
        self.confirmed = True


class StepRecorder:
    """Records the steps of one decoder over one set of caches. The results of a step that was run again lie in the
    recorder's memory and hold until the next step.

    Weights are loaded once and stay where they are. Caches are compared at every step: with others, all is recorded
    again.
    """

    def __init__(self, ops: RecordableOps, ranks: KernelGroup | None = None) -> None:
        self._ops, self._ranks = ops, ranks
        self._failed = ctypes.c_int64()
        self._caches: list[LayerCache] = []
        self._steps: dict[Hashable, RecordedStep] = {}
        self._seen: dict[Hashable, int] = {}
        self._memory = torch.empty(0, dtype=torch.uint8)
        self.replayed = 0
        """Steps that were run from a list."""
        self.refused: dict[Hashable, str] = {}
        """Why steps are not recorded, by their key."""

    @property
    def memory_bytes(self) -> int:
        """Of intermediate results of steps that were run again."""
        return self._memory.nbytes

    def run(self, variant: Hashable, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache],
            forward: Callable[[], Tensor]) -> Tensor:
        """As `run_all`, of a forward with one result."""
        return self.run_all(variant, ids, ctx, caches, lambda: (forward(),))[0]

    def run_all(self, variant: Hashable, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache],
                forward: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """What `forward` returns: rows [tokens, hidden] that it computes from `ids`, `ctx` and `caches` by these
        operations. `ids` are token ids, or the rows that the stage before has handed on. Forwards that make other
        calls have another `variant`."""
        tokens = ids.shape[0]
        if not 0 < tokens <= MOST_TOKENS or ids.dtype not in _INPUTS or not ids.is_contiguous():
            return forward()
        self._look_at(caches)
        key: tuple[Hashable, ...] = (variant, tokens) if ctx.detours is None else (variant, tokens, "detours")
        known = self._steps.get(key)
        if known is not None and known.confirmed:
            return self._replay(known, ids, ctx, forward)
        if key in self.refused or (tokens > _OFTEN_SEEN and self._first_times(key)):
            return forward()
        return self._record(key, known, ids, ctx, forward)

    def _first_times(self, key: Hashable) -> bool:
        """Recording takes longer than running. Steps of many tokens are mostly prompts, whose lengths seldom come
        again: they are recorded when they have."""
        self._seen[key] = self._seen.get(key, 0) + 1
        return self._seen[key] <= _FIRST_TIMES

    def run_chain(self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], guesses: Guesses, chain: Chain,
                  first: tuple[Tensor, StepContext] | None = None, rules: Rules | None = None) -> bool:
        """Run a step of one token of each sequence again and again, each time with the tokens that its second result,
        logits, and the `rules` give. `guesses` has room for them, and the chances of the chains so far. `ids`, `ctx`
        and `rules` are changed.
        `first`: the first time it is this step, of more tokens, and then `ctx` stands at the last of them. Steps have
        the number of sequences for a variant. False: they are not recorded yet, and nothing was run."""
        self._look_at(caches)
        seqs = ids.shape[0]
        inputs = [(ids, ctx)] if first is None else [first, (ids, ctx)]
        steps = [self._steps.get((seqs, each.shape[0])) for each, _ in inputs]
        if any(step is None or not step.confirmed for step in steps):
            return False
        known = [step for step in steps if step is not None]
        for step in known:
            self._make_room(step)
        contexts = [read_step(each) for _, each in inputs]
        width, context = known[0].outs[1][1][1], contexts[-1]
        check_ids(chain.guessed, width)
        check_rules(rules, seqs)
        if not context.tokens == context.seqs == contexts[0].seqs == guesses.tokens.shape[1]:
            raise EngineError(f"a chain of {guesses.tokens.shape[1]} sequences is not a step of {context.tokens}")
        passes, held = [], []
        for step, (tokens, _), each in zip(known, inputs, contexts, strict=True):
            words = each.words(self._memory.data_ptr(), tokens.data_ptr())
            held.append((ctypes.c_int64 * len(words))(*words))
            assert step.encoded is not None
            passes.append(RecordedPass(step.address, len(step.encoded), ctypes.addressof(held[-1]),
                                       self._memory.data_ptr() + step.outs[1][0]))
        at = ChainStep(ids.data_ptr(), context.positions, context.slots[0], context.context_len, context.tables[0],
                       context.strides[0], seqs, chain.block_size)
        guesses.passes = self._ops.library.quire_draft_chain(
            None if first is None else ctypes.byref(passes[0]), ctypes.byref(passes[-1]), ctypes.byref(self._failed),
            ctypes.byref(at), width, None if chain.guessed is None else chain.guessed.data_ptr(),
            rules, guesses.tokens.ctypes.data, guesses.chances.ctypes.data, len(guesses.tokens), chain.floor,
        )  # fmt: skip
        if guesses.passes < 0:
            step = known[0 if guesses.passes == -1 else -1]
            raise EngineError(f"{step.calls[self._failed.value][0]} refused a recorded step of a draft")
        self.replayed += guesses.passes
        return True

    def _look_at(self, caches: Sequence[LayerCache]) -> None:
        """With others than before, everything is recorded again."""
        if len(caches) != len(self._caches) or not all(map(is_, caches, self._caches)):
            self._caches = list(caches)
            self._steps.clear()
            self.refused.clear()

    def _record(self, key: Hashable, before: RecordedStep | None, ids: Tensor, ctx: StepContext,
                forward: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        recording = _Recording(self._ops.library)
        ranks = self._ranks
        exchanges = 0 if ranks is None else ranks.other_calls()
        with self._ops.calling(recording), _Watch(recording):
            out = forward()
        if ranks is not None and ranks.other_calls() != exchanges:
            recording.refuse("ranks exchange something outside the kernels")
        step = None if recording.refused else self._listed(recording, ids, ctx, out)
        if step is not None and before is not None and step != before:
            recording.refuse("two recordings of it differ")
        if step is None or recording.refused:
            self.refused[key] = recording.refused or "unknown"
            self._steps.pop(key, None)
            return out
        if before is not None:
            step.encode(self._ops.library)
        self._steps[key] = step
        return out

    def _listed(self, recording: _Recording, ids: Tensor, ctx: StepContext, outs: tuple[Tensor, ...]
                ) -> RecordedStep | None:
        """The calls with arguments that hold for the next step too; None where that cannot be said."""
        context = read_step(ctx)
        addresses = context.addresses(ids.data_ptr())
        if len(addresses) != 4 + (ctx.detours is not None) + 2 * len(context.slots):
            recording.refuse("two parts of its context share their memory")
            return None
        spans = sorted((_Span(one.data_ptr(), one.data_ptr() + one.nbytes) for one in recording.results if one.nbytes),
                       key=lambda span: span.start)
        starts = [span.start for span in spans]
        for number, (name, arguments) in enumerate(recording.calls):
            if len(arguments) > _MOST_WORDS or not has_recorded_form(self._ops.library, name):
                recording.refuse(f"{name} has no recorded form")
                return None
            kinds = getattr(self._ops.library, name).argtypes
            pointers = [each for each, kind in zip(arguments, kinds, strict=True) if kind is ctypes.c_void_p and each]
            for span in filter(None, (_span_at(spans, starts, each) for each in pointers)):
                span.first, span.last = number if span.first < 0 else span.first, number
        finals: list[_Span] = []
        for out in outs:
            final = _span_at(spans, starts, out.data_ptr())
            if final is None or out.dim() != 2 or not out.is_contiguous() or out.dtype is not torch.float32:
                recording.refuse("its result was not computed by a kernel")
                return None
            final.last = len(recording.calls)
            finals.append(final)
        needed = _share_memory(spans)
        calls = [_words(self._ops.library, call, addresses, spans, starts) for call in recording.calls]
        return RecordedStep(calls, needed, [(final.offset + out.data_ptr() - final.start, (out.shape[0], out.shape[1]))
                                            for out, final in zip(outs, finals, strict=True)])

    def _replay(self, step: RecordedStep, ids: Tensor, ctx: StepContext, forward: Callable[[], tuple[Tensor, ...]]
                ) -> tuple[Tensor, ...]:
        words = self._words_of(step, ids, ctx)
        if words is None:
            return forward()  # which says what is wrong
        assert step.encoded is not None
        state = self._ops.library.quire_replay(step.address, len(step.encoded), words, ctypes.byref(self._failed))
        if state:
            return self._failed_replay(step, state, forward)
        self.replayed += 1
        if step.results is None:
            step.results = tuple(self._memory[offset : offset + 4 * rows * width].view(torch.float32).view(rows, width)
                                 for offset, (rows, width) in step.outs)
        return step.results

    def _words_of(self, step: RecordedStep, ids: Tensor, ctx: StepContext) -> ctypes.Array[ctypes.c_int64] | None:
        """None: a step of so many tokens was not recorded."""
        ready = step.lasting.get(id(ctx)) if ctx.lasting else None
        if ready is not None and ready.ids is ids:
            return ready.words
        context = read_step(ctx)
        if context.tokens != step.outs[0][1][0]:
            return None
        self._make_room(step)
        numbers = context.words(self._memory.data_ptr(), ids.data_ptr())
        words = (ctypes.c_int64 * len(numbers))(*numbers)
        if ctx.lasting:
            step.lasting[id(ctx)] = _Ready(ctx, ids, words)
        return words

    def _make_room(self, step: RecordedStep) -> None:
        if step.results_bytes > self._memory.nbytes:
            self._memory = torch.empty(step.results_bytes, dtype=torch.uint8)
            for each in self._steps.values():
                each.results = None
                each.lasting.clear()

    def _failed_replay(self, step: RecordedStep, state: int, forward: Callable[[], tuple[Tensor, ...]]
                       ) -> tuple[Tensor, ...]:
        """A call has found something wrong. Alone, plain calls say what it is. Where ranks share the step they have
        exchanged something already, and another forward would hand them values of other layers."""
        if self._ranks is None:
            return forward()
        name = step.calls[self._failed.value][0]
        if name in GROUP_KERNELS:
            self._ranks.check(state)
        raise EngineError(f"{name} refused a recorded step: {state}")


def has_recorded_form(library: ctypes.CDLL, name: str) -> bool:
    """Whether `quire_replay` can call this kernel."""
    try:
        getattr(library, f"{name}_recorded")
    except AttributeError:
        return False
    return True


def _span_at(spans: list[_Span], starts: list[int], address: int) -> _Span | None:
    """The intermediate result that an address lies in."""
    at = bisect_right(starts, address) - 1
    return spans[at] if at >= 0 and address < spans[at].end else None


def _share_memory(spans: list[_Span]) -> int:
    """Give every result its place; those that are needed at the same time have different ones. Returns the bytes."""
    placed: list[_Span] = []
    most = 0
    for span in sorted((span for span in spans if span.first >= 0), key=lambda span: span.first):
        placed = [other for other in placed if other.last >= span.first]
        size, offset = span.end - span.start, 0
        for other in sorted(placed, key=lambda other: other.offset):
            if other.offset - offset >= size:
                break
            offset = max(offset, _aligned(other.offset + other.end - other.start))
        span.offset = offset
        most = max(most, _aligned(offset + size))
        placed.append(span)
    return most


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _words(library: ctypes.CDLL, call: tuple[str, tuple[Any, ...]], addresses: dict[int, int], spans: list[_Span],
           starts: list[int]) -> Words:
    name, arguments = call
    bases, values = [], []
    for kind, argument in zip(getattr(library, name).argtypes, arguments, strict=True):
        base, value = ZERO, argument
        if kind is ctypes.c_float:
            value = struct.unpack("<I", struct.pack("<f", argument))[0]
        elif kind is ctypes.c_void_p:
            value = argument or 0
            span = _span_at(spans, starts, value)
            if argument in addresses:
                base, value = addresses[argument], 0
            elif span is not None:
                base, value = RESULTS, span.offset + argument - span.start
        elif isinstance(argument, StepNumber):
            base, value = argument.word, 0
        bases.append(base)
        values.append(int(value))
    return name, tuple(bases), tuple(values)
