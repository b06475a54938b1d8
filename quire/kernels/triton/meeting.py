"""Barriers between ranks on the device: counters in shared memory, which tiny kernels write and poll.

A rank that arrives adds one to its own counter and writes it to every other rank's flags; then it polls its own flags.
Whatever earlier kernels of its stream wrote is visible to a rank that has seen it arrive. Counters keep counting from
launch to launch, so that a captured graph can be replayed. One program of one warp waits: ranks that share a
GPU must not keep each other out of it.

A wait ends in an error, never in a hang: after a timeout, or when the host writes to `state`, all waits of this rank
end at once, later ones too. Results computed since are invalid; the code that collects results checks `state`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import globaltimer

TIMED_OUT = 1
STOPPED = 2
STATE_WORDS = 2
"""int64: why waits end (0: they do not), and nanoseconds waited so far."""
_TURNS_PER_MS = 1
"""Nanoseconds that a poll counts for where there is no clock: Triton's interpreter has none and takes about so long."""


@triton.jit
def _now(CLOCK: tl.constexpr):
    return globaltimer() if CLOCK else tl.zeros([], tl.int64)


@triton.jit
def _watch(flag, wanted, state, patience, CLOCK: tl.constexpr):
    """Until `flag` has come up to `wanted`. Both are counters of 32 bits that may wrap around."""
    began = _now(CLOCK)
    seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    ended = tl.load(state, volatile=True)
    turns = tl.zeros([], tl.int64)
    while (wanted - seen > 0) & (ended == 0):
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        ended = tl.load(state, volatile=True)
        turns = _now(CLOCK) - began if CLOCK else turns + 1
        if (turns > patience) & (ended == 0):
            ended += 1
            tl.store(state, ended)
    if CLOCK:
        tl.store(state + 1, tl.load(state + 1, volatile=True) + _now(CLOCK) - began)


@triton.jit
def _meet_kernel(peers, flags, counter, state, patience, RANK: tl.constexpr, SIZE: tl.constexpr, CLOCK: tl.constexpr):
    arrived = tl.load(counter) + 1
    tl.store(counter, arrived)
    for other in tl.static_range(SIZE):
        if other != RANK:
            theirs = tl.load(peers + other).to(tl.pointer_type(tl.int32))
            tl.atomic_xchg(theirs + RANK, arrived, sem="release", scope="sys")
    for other in tl.static_range(SIZE):
        if other != RANK:
            _watch(flags + other, arrived, state, patience, CLOCK)


@triton.jit
def _wait_kernel(flag, counter, ahead, state, patience, CLOCK: tl.constexpr):
    _watch(flag, tl.load(counter) + ahead, state, patience, CLOCK)


@triton.jit
def _post_kernel(flag, counter):
    count = tl.load(counter) + 1
    tl.store(counter, count)
    tl.atomic_xchg(flag, count, sem="release", scope="sys")


def _patience(counter: Tensor, seconds: float) -> int:
    return int(seconds * (1e9 if counter.is_cuda else 1e3 * _TURNS_PER_MS))


def meet(peers: Tensor, flags: Tensor, counter: Tensor, state: Tensor, rank: int, seconds: float) -> None:
    """Arrive, then wait until all ranks have.

    `peers`: int64 [ranks], addresses of every rank's `flags`, which is int32 [ranks] and written by the others;
    `counter`: int32 [1], this rank's own; `state`: int64 [STATE_WORDS], in memory that the host can read.
    """
    _meet_kernel[(1,)](peers, flags, counter, state, _patience(counter, seconds), rank, peers.shape[0],
                       counter.is_cuda, num_warps=1)


def wait_for(flag: Tensor, counter: Tensor, ahead: int, state: Tensor, seconds: float) -> None:
    """Until `flag` (int32 [1], written by another rank) is at least counter + ahead."""
    _wait_kernel[(1,)](flag, counter, ahead, state, _patience(counter, seconds), counter.is_cuda, num_warps=1)


def post(flag: Tensor, counter: Tensor) -> None:
    """Add one to `counter`, and write it to `flag`, which another rank watches."""
    _post_kernel[(1,)](flag, counter, num_warps=1)
