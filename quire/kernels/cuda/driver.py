"""CUDA's driver through ctypes: load machine code, describe a matrix to the copy engine, launch a kernel.

Everything happens in torch's context and on the stream that is given, so that it can be recorded in a graph.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char, c_char_p, c_int, c_uint, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from torch import Tensor

_SHARED_MEMORY, _CARVE_OUT, _STACK, _CLUSTER, _EARLY = 8, 9, 3, 4, 6
"""Numbers of attributes: three of a function, and two of a launch."""
_MOST_SHARED = 100
"""Per cent of what caches and shared memory have together: two kernels share a multiprocessor only if they divide it
alike."""
_BFLOAT16, _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _ZEROS = 9, 0, 3, 3, 0
_MAP_BYTES, _MAP_ALIGNMENT = 128, 64


class DriverError(RuntimeError):
    """The driver refused something."""


class _Attribute(ctypes.Structure):
    _fields_ = [("id", c_int), ("padding", c_char * 4), ("value", c_uint * 16)]


class _Config(ctypes.Structure):
    _fields_ = [
        ("grid", c_uint * 3),
        ("block", c_uint * 3),
        ("shared", c_uint),
        ("stream", c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", c_uint),
    ]


@lru_cache(maxsize=1)
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check(status: int, what: str) -> None:
    if status:
        text = c_char_p()
        _driver().cuGetErrorString(status, byref(text))
        raise DriverError(f"{what}: {(text.value or b'?').decode()} ({status})")


class TensorMap:
    """What the copy engine knows of a contiguous bf16 matrix: pieces of `height` rows by 64 columns, whose rows it
    swizzles."""

    def __init__(self, matrix: Tensor, height: int) -> None:
        self._memory = ctypes.create_string_buffer(_MAP_BYTES + _MAP_ALIGNMENT)
        address = ctypes.addressof(self._memory)
        self.address = address + -address % _MAP_ALIGNMENT
        rows, width = matrix.shape
        sizes, strides = (c_uint64 * 2)(width, rows), (c_uint64 * 1)(width * 2)
        box, steps = (c_uint32 * 2)(64, height), (c_uint32 * 2)(1, 1)
        status = _driver().cuTensorMapEncodeTiled(
            c_void_p(self.address), _BFLOAT16, 2, c_void_p(matrix.data_ptr()), sizes, strides, box, steps,
            _NO_INTERLEAVE, _SWIZZLE_128, _PROMOTE_256, _ZEROS)
        _check(status, f"a tensor map of {rows} x {width} in pieces of {height} rows")


@dataclass(frozen=True, slots=True)
class Launch:
    """Thread blocks in all and of a cluster, threads, and whether it may start while the kernel before it runs."""

    blocks: int
    cluster: int
    threads: int
    early: bool = False


class Kernel:
    """A function of a cubin, with so much shared memory beside its static one; with 0 the first cache, which is the
    same memory, stays as large as it can be. Of the device that is current when it is made."""

    def __init__(self, code: bytes, name: str, shared: int) -> None:
        self._module, self._function, self._shared = c_void_p(), c_void_p(), shared
        driver = _driver()
        _check(driver.cuModuleLoadData(byref(self._module), code), "loading a kernel")
        _check(driver.cuModuleGetFunction(byref(self._function), self._module, name.encode()), "finding a kernel")
        for attribute, value in ((_SHARED_MEMORY, shared), (_CARVE_OUT, _MOST_SHARED)) if shared else ():
            _check(driver.cuFuncSetAttribute(self._function, attribute, value), "asking for shared memory")

    @property
    def stack(self) -> int:
        """Bytes of a thread that did not fit into registers."""
        found = c_int()
        _check(_driver().cuFuncGetAttribute(byref(found), _STACK, self._function), "asking for the stack")
        return found.value

    def most_clusters(self, cluster: int, threads: int) -> int:
        """How many clusters run at the same time: a cluster stays within a part of the chip, and parts differ."""
        config, found = self._config(Launch(cluster, cluster, threads), 0), c_int()
        _check(_driver().cuOccupancyMaxActiveClusters(byref(found), self._function, byref(config)), "counting clusters")
        return found.value

    def __call__(self, launch: Launch, stream: int, arguments: Sequence[Any]) -> None:
        """`arguments` are ctypes values, or `TensorMap`s, which a kernel takes by value."""
        places = [each.address if isinstance(each, TensorMap) else ctypes.addressof(each) for each in arguments]
        config = self._config(launch, stream)
        status = _driver().cuLaunchKernelEx(byref(config), self._function, (c_void_p * len(places))(*places), None)
        _check(status, f"launching {launch}")

    def _config(self, launch: Launch, stream: int) -> _Config:
        attributes = (_Attribute * 2)()
        attributes[0].id = _CLUSTER
        attributes[0].value[0], attributes[0].value[1], attributes[0].value[2] = launch.cluster, 1, 1
        attributes[1].id, attributes[1].value[0] = _EARLY, 1
        count = 2 if launch.early else 1
        return _Config((launch.blocks, 1, 1), (launch.threads, 1, 1), self._shared, stream, attributes, count)
