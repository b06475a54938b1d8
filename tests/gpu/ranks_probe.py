"""What two processes on one GPU can do together: share memory over IPC, wait for each other in kernels and in graphs.

python3 tests/gpu/ranks_probe.py      prints a line for each question; no line takes more than its time limit
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import subprocess
import sys
import time
from typing import Any

import torch
import triton
import triton.language as tl

ROUNDS = 20
CHAIN = 50


@triton.jit
def _meet(mine, theirs, counter, failed, limit):
    """Tell the other where I am, wait until it is there too."""
    epoch = tl.load(counter) + 1
    tl.store(counter, epoch)
    tl.atomic_xchg(theirs, epoch, sem="release", scope="sys")
    seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
    turns = tl.zeros([], tl.int64)
    while (seen < epoch) & (turns < limit):
        seen = tl.atomic_add(mine, 0, sem="acquire", scope="sys")
        turns += 1
    if seen < epoch:
        tl.store(failed, 1)


class View:
    def __init__(self, pointer: int, count: int) -> None:
        self.__cuda_array_interface__ = {"shape": (count,), "typestr": "<i4", "data": (pointer, False), "version": 3}


def tensor_at(pointer: int, count: int) -> torch.Tensor:
    return torch.as_tensor(View(pointer, count), device="cuda")


cuda = ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    code = getattr(cuda, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        cuda.cuGetErrorName(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {code} {text.value!r}")


class Handle(ctypes.Structure):
    _fields_ = [("data", ctypes.c_char * 64)]


def allocate(size: int) -> int:
    pointer = ctypes.c_uint64()
    call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size))
    call("cuMemsetD8_v2", pointer, ctypes.c_ubyte(0), ctypes.c_size_t(size))
    torch.cuda.synchronize()
    return int(pointer.value)


def export(pointer: int) -> bytes:
    handle = Handle()
    call("cuIpcGetMemHandle", ctypes.byref(handle), ctypes.c_uint64(pointer))
    return bytes(handle)


def opened(data: bytes) -> int:
    handle, pointer = Handle.from_buffer_copy(data), ctypes.c_uint64()
    cuda.cuIpcOpenMemHandle_v2.argtypes = [ctypes.c_void_p, Handle, ctypes.c_uint]
    call("cuIpcOpenMemHandle_v2", ctypes.byref(pointer), handle, 1)
    return int(pointer.value)


def say(data: str) -> None:
    print(data, flush=True)


def hear() -> str:
    return sys.stdin.readline().strip()


def child(kind: str) -> None:
    torch.zeros(1, device="cuda")
    if kind.startswith("ipc"):
        own = allocate(4096)
        say(export(own).hex())
        other = opened(bytes.fromhex(hear()))
    else:
        fd = int(sys.argv[3])
        memory = mmap.mmap(fd, 8192)
        base = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        call("cuMemHostRegister_v2", ctypes.c_void_p(base), ctypes.c_size_t(8192), 3)
        device = ctypes.c_uint64()
        call("cuMemHostGetDevicePointer_v2", ctypes.byref(device), ctypes.c_void_p(base), 0)
        own = int(device.value) + 4096 * int(sys.argv[4])
        other = int(device.value) + 4096 * (1 - int(sys.argv[4]))
        say("-")
        hear()
    mine, theirs = tensor_at(own, 1024), tensor_at(other, 1024)
    say("mapped")
    hear()
    counter, failed = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
    work = torch.randn(1024, 1024, device="cuda")
    if kind.endswith("values"):
        values(own, other)
        return
    limit = 20_000_000

    def meet() -> None:
        _meet[(1,)](mine, theirs, counter, failed, limit, num_warps=1)

    meet()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(ROUNDS):
        torch.mm(work, work)
        meet()
    torch.cuda.synchronize()
    eager = (time.perf_counter() - begin) / ROUNDS
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CHAIN):
            torch.mm(work, work)
            meet()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    each = (time.perf_counter() - begin) / 3 / CHAIN
    say(json.dumps({"eager_ms": 1e3 * eager, "graph_ms": 1e3 * each, "failed": int(failed), "met": int(counter)}))


def values(own: int, other: int) -> None:
    """Waiting by the stream, not by a kernel; plainly, then captured."""
    stream = torch.cuda.Stream()

    def meet(value: int) -> None:
        raw = ctypes.c_void_p(stream.cuda_stream)
        call("cuStreamWriteValue32_v2", raw, ctypes.c_uint64(other), ctypes.c_uint32(value), 0)
        call("cuStreamWaitValue32_v2", raw, ctypes.c_uint64(own), ctypes.c_uint32(value), 0)

    found: dict[str, Any] = {}
    with torch.cuda.stream(stream):
        meet(1)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for value in range(2, 2 + ROUNDS):
            meet(value)
        torch.cuda.synchronize()
        found["stream_ms"] = 1e3 * (time.perf_counter() - begin) / ROUNDS
        try:
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for value in range(100, 100 + CHAIN):
                meet(value)
            graph.capture_end()
            begin = time.perf_counter()
            graph.replay()
            torch.cuda.synchronize()
            found["graph_ms"] = 1e3 * (time.perf_counter() - begin) / CHAIN
        except Exception as error:
            found["graph"] = str(error)[:200]
    say(json.dumps(found))


def pair(kind: str, seconds: float) -> str:
    fd = os.memfd_create("probe")
    os.ftruncate(fd, 8192)
    both = [subprocess.Popen([sys.executable, __file__, kind, str(fd), str(fd), str(i)], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True, pass_fds=[fd]) for i in range(2)]
    timer = __import__("threading").Timer(seconds, lambda: [one.kill() for one in both])
    timer.start()
    try:
        handles = [one.stdout.readline() for one in both]
        for one, handle in zip(both, reversed(handles), strict=True):
            one.stdin.write(handle)
            one.stdin.flush()
        for one in both:
            if not one.stdout.readline():
                return "failed before memory was mapped"
        for one in both:
            one.stdin.write("go\n")
            one.stdin.flush()
        lines = [one.stdout.readline().strip() for one in both]
        return " | ".join(lines) if all(lines) else f"no answer within {seconds:.0f} s: {lines}"
    except BrokenPipeError:
        return "a child ended early"
    finally:
        timer.cancel()
        for one in both:
            one.kill()
            one.wait()


def threads() -> str:
    """Two streams of one process, each with a graph that waits for the other's."""
    base = allocate(8192)
    sides = []
    for index in range(2):
        mine, theirs = tensor_at(base + 4096 * index, 1024), tensor_at(base + 4096 * (1 - index), 1024)
        counter, failed = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        sides.append((mine, theirs, counter, failed, torch.cuda.Stream()))
    for mine, theirs, counter, failed, stream in sides:
        with torch.cuda.stream(stream):
            _meet[(1,)](mine, theirs, counter, failed, 20_000_000, num_warps=1)
    torch.cuda.synchronize()
    graphs = []
    for mine, theirs, counter, failed, stream in sides:
        with torch.cuda.stream(stream):
            graph = torch.cuda.CUDAGraph()
            graph.capture_begin(capture_error_mode="thread_local")
            for _ in range(CHAIN):
                _meet[(1,)](mine, theirs, counter, failed, 20_000_000, num_warps=1)
            graph.capture_end()
            graphs.append(graph)
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for graph, side in zip(graphs, sides, strict=True):
        with torch.cuda.stream(side[-1]):
            graph.replay()
    torch.cuda.synchronize()
    return f"graph_ms {1e3 * (time.perf_counter() - begin) / CHAIN:.4f} failed {[int(s[3]) for s in sides]}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        child(sys.argv[1])
    else:
        print("torch", torch.__version__, "compute mode", subprocess.getoutput(
            "nvidia-smi --query-gpu=compute_mode --format=csv,noheader"), flush=True)
        for kind in ("ipc", "host", "ipc-values", "host-values"):
            print(f"{kind}: {pair(kind, 60.0)}", flush=True)
        print("threads:", threads(), flush=True)
