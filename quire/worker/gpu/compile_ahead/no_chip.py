"""Stands in for a GPU in a process that only compiles: torch, Triton and the driver believe in the chip that they are
told of, and nothing is ever launched.

`pretend` changes torch and Triton for good, so it is for processes that do nothing else.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from quire.attention import prefill_libraries
from quire.kernels import cublas
from quire.kernels.cuda import driver, nvrtc
from quire.worker.gpu.compile_ahead.request import Chip

Compile = Callable[[], Any]
_ASKED = object()
"""What Triton takes for the compiled kernel."""


class Work(triton.AsyncCompileMode):  # type: ignore[misc]
    """Compiles what is asked for on threads: Triton's passes and ptxas run without Python's lock. Of `shares`
    processes that ask for the same in the same order each compiles its `share`."""

    def __init__(self, executor: Executor, share: int, shares: int, finish: Callable[[Any], None]) -> None:
        """`finish`: called on the thread with every kernel of Triton's."""
        super().__init__(executor)
        self._share, self._shares, self._finish = share, shares, finish
        self._asked: dict[Any, Future[Any] | None] = {}

    @property
    def asked(self) -> list[Any]:
        """Keys in the order in which they came."""
        return list(self._asked)

    def submit(self, key: Any, compile_fn: Compile, finalize_fn: Callable[[Any], None]) -> Any:
        """Triton's hook: `finalize_fn` makes it remember what it gets as the kernel, so that it asks once."""
        self.add(key, lambda: self._finish(compile_fn()))
        finalize_fn(_ASKED)
        return _ASKED

    def add(self, key: Any, compile_it: Compile) -> None:
        if key not in self._asked:
            mine = len(self._asked) % self._shares == self._share
            self._asked[key] = self.executor.submit(compile_it) if mine else None

    def failures(self) -> int:
        """Waits for all; how many of this share could not be compiled."""
        return sum(each.exception() is not None for each in self._asked.values() if each is not None)


def pretend(chip: Chip, work: Work) -> None:
    """From here on there is such a chip; kernels in CUDA C are compiled like those of Triton, by `work`."""
    compiled = nvrtc.compiled

    def compile_later(source: str, options: Sequence[str]) -> bytes:
        work.add((source, tuple(options)), lambda: compiled(source, options))
        return b""

    for owner, name, new in (
        *((torch.cuda, name, new) for name, new in _torch_cuda(chip).items()),
        (torch.version, "cuda", torch.version.cuda or "none"),
        (torch, "tensor", _moved(torch.tensor)),
        (nvrtc, "compiled", compile_later),
        (driver, "_driver", _NoDriver),
        (cublas, "CublasLt", _NoLibrary),
        (prefill_libraries, "present", list),
        (JITFunction, "run", _only_compiled(JITFunction.run)),
    ):
        setattr(owner, name, new)
    triton.runtime.driver.set_active(_TritonDriver(chip))
    _leave_out_torchs_compiler()


def _leave_out_torchs_compiler() -> None:
    """Some operations on `meta` tell torch's compiler to pass them by, which imports all of it first."""
    if "torch._dynamo" not in sys.modules:
        stub: Any = ModuleType("torch._dynamo")
        stub.disable = lambda function, *_, **__: function
        sys.modules["torch._dynamo"] = stub
        setattr(torch, "_dynamo", stub)  # noqa: B010 (torch would import it for an attribute that is not there)


class _Nothing:
    """A stream, an event, a context: everything can be done with it, and nothing happens."""

    cuda_stream = 0

    def __call__(self, *_: Any, **__: Any) -> _Nothing:
        return self

    def __getattr__(self, name: str) -> _Nothing:
        return self

    def __enter__(self) -> _Nothing:
        return self

    def __exit__(self, *_: Any) -> None:
        pass


def _torch_cuda(chip: Chip) -> dict[str, Any]:
    properties = SimpleNamespace(
        name="", major=chip.capability[0], minor=chip.capability[1], multi_processor_count=chip.multiprocessors,
        shared_memory_per_block_optin=chip.shared_memory)
    nothing, memory = _Nothing(), 1 << 40
    names = ("Stream", "Event", "stream", "device", "current_stream", "synchronize", "empty_cache",
             "reset_peak_memory_stats")  # fmt: skip
    return {
        **dict.fromkeys(names, nothing),
        "_lazy_init": lambda: None,
        "current_device": lambda: 0,
        "get_device_capability": lambda device=None: chip.capability,
        "get_device_properties": lambda device=None: properties,
        "memory_allocated": lambda device=None: 0,
        "max_memory_allocated": lambda device=None: 0,
        "mem_get_info": lambda device=None: (memory, memory),
    }


def _moved(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`torch.tensor`, which fills memory of the device before it asks anybody: made on the CPU."""

    def made(values: Any, *, device: torch.device | str | None = None, **options: Any) -> Tensor:
        return make(values, device="cpu", **options).to(torch.empty(0).device if device is None else device)

    return made


def _only_compiled(run: Callable[..., Any]) -> Callable[..., Any]:
    def compiled(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        run(self, *args, grid=grid, warmup=True, **options)

    return compiled


class _TritonDriver:
    """As much of a driver as compilation asks for."""

    def __init__(self, chip: Chip) -> None:
        major, minor = chip.capability
        self._target = GPUTarget("cuda", 10 * major + minor, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def is_active(self) -> bool:
        return True


class _NoDriver:
    """CUDA's driver: takes every call, loads nothing and launches nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return _one_cluster if name == "cuOccupancyMaxActiveClusters" else _taken


def _taken(*_: Any) -> int:
    return 0


def _one_cluster(found: Any, *_: Any) -> int:
    ctypes.cast(found, ctypes.POINTER(ctypes.c_int))[0] = 1
    return 0


class _NoLibrary:
    """cuBLASLt, which has every algorithm and compiles nothing."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        pass

    def gemm(self, x: Tensor, weight: Tensor, algorithm: str, out: Tensor | None = None) -> Tensor:
        return x.new_empty(x.shape[0], weight.shape[0]) if out is None else out

    def close(self) -> None:
        pass
