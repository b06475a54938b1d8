"""GPU memory that processes share: made here, handed on as 64 bytes (CUDA IPC), opened there, by calls of the driver.

torch's allocator hands out parts of larger pieces and keeps count of who shares them in files; these pieces are whole,
belong to whoever made them, and go with their process.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

from quire.errors import EngineError

HANDLE_BYTES = 64
_ENABLE_PEER_ACCESS = 1


class _Handle(ctypes.Structure):
    _fields_ = (("data", ctypes.c_char * HANDLE_BYTES),)


class _Bytes:
    """Memory at an address, as torch takes it over without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3}


@cache
def _driver() -> Any:
    library = ctypes.CDLL("libcuda.so.1")
    library.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    library.cuMemsetD8_v2.argtypes = [ctypes.c_uint64, ctypes.c_ubyte, ctypes.c_size_t]
    library.cuMemFree_v2.argtypes = [ctypes.c_uint64]
    library.cuIpcGetMemHandle.argtypes = [ctypes.POINTER(_Handle), ctypes.c_uint64]
    library.cuIpcOpenMemHandle_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), _Handle, ctypes.c_uint]
    library.cuIpcCloseMemHandle.argtypes = [ctypes.c_uint64]
    return library


def call(name: str, *arguments: Any) -> None:
    code = getattr(_driver(), name)(*arguments)
    if code:
        said = ctypes.c_char_p()
        _driver().cuGetErrorName(code, ctypes.byref(said))
        reason = (said.value or b"?").decode()
        out_of_memory = " (out of memory)" if reason == "CUDA_ERROR_OUT_OF_MEMORY" else ""
        raise EngineError(f"ranks that share memory of a GPU: {name} failed with {reason}{out_of_memory}")


class SharedDeviceMemory:
    """A piece of a GPU's memory, all zero at first; `bytes` is all of it. Idempotent to close."""

    def __init__(self, address: int, size: int, device: torch.device, close: str) -> None:
        self.address = address
        self.bytes: Tensor = torch.as_tensor(_Bytes(address, size), device=device)
        self._close = close

    @classmethod
    def create(cls, size: int, device: torch.device) -> SharedDeviceMemory:
        torch.cuda.synchronize(device)  # the calls below are about the context that torch has made current
        address = ctypes.c_uint64()
        call("cuMemAlloc_v2", ctypes.byref(address), size)
        call("cuMemsetD8_v2", address, 0, size)
        torch.cuda.synchronize(device)
        return cls(int(address.value), size, device, "cuMemFree_v2")

    @classmethod
    def open(cls, handle: bytes, size: int, device: torch.device) -> SharedDeviceMemory:
        """What another process of this machine made; it must live as long as this is used."""
        address = ctypes.c_uint64()
        call("cuIpcOpenMemHandle_v2", ctypes.byref(address), _Handle.from_buffer_copy(handle), _ENABLE_PEER_ACCESS)
        return cls(int(address.value), size, device, "cuIpcCloseMemHandle")

    @property
    def handle(self) -> bytes:
        found = _Handle()
        call("cuIpcGetMemHandle", ctypes.byref(found), self.address)
        return bytes(found)

    def close(self) -> None:
        address, self.address = self.address, 0
        if address:
            call(self._close, address)
