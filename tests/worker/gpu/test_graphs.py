"""Graphs that cannot be captured: the stream is freed of the capture, and the error is the one that broke it."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from quire.worker.gpu import graphs as graphs_module


class Device:
    """As much of a GPU as a capture touches."""

    def __init__(self, refuses_end: bool = False) -> None:
        self.capturing = False
        self.refuses_end = refuses_end
        device = self

        class Graph:
            def capture_begin(self, **_: Any) -> None:
                device.capturing = True

            def capture_end(self) -> None:
                device.capturing = False
                if device.refuses_end:
                    raise RuntimeError("CUDA error: capturing stream has unjoined work")

            def reset(self) -> None:
                pass

        stream = SimpleNamespace(wait_stream=lambda _: None)
        self.cuda = SimpleNamespace(
            CUDAGraph=Graph, Stream=lambda _: stream, current_stream=lambda _: stream, stream=lambda _: nullcontext(),
            synchronize=self.synchronize, graph_pool_handle=lambda: 0,
        )  # fmt: skip

    def synchronize(self, _: Any) -> None:
        if self.capturing:
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")


@pytest.mark.parametrize("refuses_end", [False, True])
def test_running_out_inside_a_capture_ends_it_and_is_what_is_raised(
    monkeypatch: pytest.MonkeyPatch, refuses_end: bool
) -> None:
    device = Device(refuses_end)
    monkeypatch.setattr(graphs_module, "torch", device)
    calls: list[int] = []

    def launch(rung: int, separate_rope: bool) -> None:
        calls.append(rung)
        if len(calls) == 2:
            raise RuntimeError("CUDA error: out of memory")

    cache = graphs_module.GraphCache(None, launch)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="out of memory"):
        cache.capture([8])
    assert not device.capturing and len(cache) == 0
    cache.close()
