"""Captured decode steps: one CUDA graph per rung of the batch ladder and kind of step, all in one memory pool."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from typing import Any

import torch

from quire.errors import InvariantError

_capturing = Lock()
"""Engines of one process may be built in several threads, and all capture on one stream."""


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """The stream that all graphs of a process are captured on. cuBLAS never frees the workspace (32 MiB on Hopper) of
    a stream it ran on, so a stream per engine would leak one with every engine that is closed. Graphs may share the
    workspace, since all are replayed on one stream, one after another."""
    return torch.cuda.Stream(device)


@contextmanager
def _no_collection() -> Iterator[None]:
    """While a stream captures, nobody's graph, event or pinned memory may be freed: graphs are captured in the middle
    of serving too, when the garbage of another engine may be waiting."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


class GraphCache:
    """Replays `launch(rung, separate_rope)` from a captured graph (see `StepLaunches.decode`). The largest rung is
    captured first: the others then fit in its memory."""

    def __init__(self, device: torch.device, launch: Callable[[Any, bool], None], pool: Any = None) -> None:
        """A rung may be anything that has an order. `pool`: of other graphs, which never run at the same time."""
        self._device = device
        self._launch = launch
        self._graphs: dict[tuple[Any, bool], torch.cuda.CUDAGraph] = {}
        self.replays = 0
        """Steps that were replayed."""
        self.pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = capture_stream(device)

    def __len__(self) -> int:
        return len(self._graphs)

    def holds(self, rung: Any, separate_rope: bool = False) -> bool:
        """Whether that step is captured."""
        return (rung, separate_rope) in self._graphs

    def capture(self, rungs: Iterable[Any], separate_rope: bool = False) -> None:
        for rung in sorted(rungs, reverse=True):
            if (rung, separate_rope) not in self._graphs:
                self._graphs[rung, separate_rope] = self._captured(rung, separate_rope)

    def _captured(self, rung: Any, separate_rope: bool) -> torch.cuda.CUDAGraph:
        with _capturing:
            return self._capture(rung, separate_rope)

    def _capture(self, rung: Any, separate_rope: bool) -> torch.cuda.CUDAGraph:
        """One run outside a graph first: kernels are compiled and libraries set up where that is allowed."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._launch(rung, separate_rope)
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        # Not torch.cuda.graph(): it collects garbage and empties the allocator's cache before every capture.
        with torch.cuda.stream(self._stream), _no_collection():
            graph.capture_begin(pool=self.pool, capture_error_mode="thread_local")
            try:
                self._launch(rung, separate_rope)
            except BaseException:
                # A stream left capturing fails all that follows, the clean-up included, and hides what went wrong.
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def close(self) -> None:
        """Give the pool's memory back: a captured graph holds all that its kernels touch."""
        torch.cuda.synchronize(self._device)
        for graph in self._graphs.values():
            graph.reset()
        self._graphs.clear()
        self._launch = _closed

    def run(self, rung: Any, separate_rope: bool = False) -> None:
        graph = self._graphs.get((rung, separate_rope))
        if graph is None:
            graph = self._graphs[rung, separate_rope] = self._captured(rung, separate_rope)
        self.replays += 1
        graph.replay()


def _closed(rung: Any, separate_rope: bool) -> None:
    raise InvariantError("this engine is closed: it runs no more steps")
