"""cuBLASLt with a chosen algorithm, for GEMMs where the library's own choice is not the fastest.

torch takes whatever the library's heuristic puts first. For few rows that is often 5 to 20% slower than the best of
the list, so `quire bench gpu --tune-library` times the list and the GEMM table keeps the winner. An algorithm is 64
bytes that mean something only to the library version they came from: with another version `gemm` returns None, and the
caller uses torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from ctypes import POINTER, byref, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

_SONAMES = ("libcublasLt.so.13", "libcublasLt.so.12")
_TYPES = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_FLOAT32 = 68
_TRANSPOSED = 1
_DESC_TRANSPOSE_A = 3
_PREFER_WORKSPACE, _PREFER_REDUCTIONS = 1, 3
_CONFIG_PARTS, _CONFIG_REDUCTION = 2, 3
_REDUCE_IN_FLOAT32 = 2
_ALIGNMENT = 256
"""Bytes: what the library's heuristic takes for granted, and torch's allocator gives."""
WORKSPACE = 32 << 20
_ALLOC_FAILED = 3
"""The only status that means out of memory; its error must be recognisable (`worker.gpu.memory.ran_out`)."""


class _Algorithm(ctypes.Structure):
    _fields_ = [("data", c_uint64 * 8)]


class _Found(ctypes.Structure):
    _fields_ = [
        ("algorithm", _Algorithm),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", c_float),
        ("reserved", c_int * 4),
    ]


@dataclass(frozen=True, slots=True)
class Candidate:
    """An algorithm that the library offers for a GEMM."""

    code: str
    """Its 64 bytes in hexadecimal digits."""
    workspace: int


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A GEMM of fixed sizes with a fixed algorithm, ready to be launched."""

    weight: c_void_p
    rows: c_void_p
    result: c_void_p
    algorithm: _Algorithm


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    """The copy that torch has loaded; None where there is none (a CPU, another vendor)."""
    if not torch.cuda.is_available() or torch.version.cuda is None:
        return None
    for name in _SONAMES:
        try:
            library = ctypes.CDLL(name)
        except OSError:
            continue
        library.cublasLtGetVersion.restype = c_size_t
        library.cublasLtMatrixLayoutCreate.argtypes = [POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64]
        library.cublasLtMatmulAlgoConfigSetAttribute.argtypes = [c_void_p, c_int, c_void_p, c_size_t]
        library.cublasLtMatmul.argtypes = [c_void_p] * 14 + [c_size_t, c_void_p]
        return library
    return None


def version() -> int:
    """Of the library in use; 0 without one."""
    library = _library()
    return 0 if library is None else int(library.cublasLtGetVersion())


class CublasLt:
    """GEMMs x W^T on one GPU and in one type. Not for several streams at once: they would share the workspace."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        library = _library()
        if library is None:
            raise RuntimeError("cuBLASLt is not loaded")
        self._library = library
        self._type = _TYPES[dtype]
        self._handle, self._operation = c_void_p(), c_void_p()
        _check(library.cublasLtCreate(byref(self._handle)))
        _check(library.cublasLtMatmulDescCreate(byref(self._operation), _COMPUTE_FLOAT32, _TYPES[torch.float32]))
        transposed = c_int32(_TRANSPOSED)
        _check(library.cublasLtMatmulDescSetAttribute(self._operation, _DESC_TRANSPOSE_A, byref(transposed), 4))
        self._workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=device)
        self._one, self._zero = c_float(1.0), c_float(0.0)
        self._scales = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        self._prepared: dict[tuple[int, int, int, str], _Prepared | None] = {}
        self._layouts: dict[tuple[int, int], c_void_p] = {}

    def candidates(self, rows: int, features: int, width: int, most: int = 32) -> Iterator[Candidate]:
        """What the library offers for x [rows, width] times W [features, width] transposed, the likeliest first."""
        preference = c_void_p()
        _check(self._library.cublasLtMatmulPreferenceCreate(byref(preference)))
        for attribute, value in (
            (_PREFER_WORKSPACE, c_uint64(WORKSPACE)),
            (_PREFER_REDUCTIONS, c_uint32(_REDUCE_IN_FLOAT32)),
        ):
            _check(
                self._library.cublasLtMatmulPreferenceSetAttribute(
                    preference, attribute, byref(value), ctypes.sizeof(value)
                )
            )
        found, count = (_Found * most)(), c_int()
        weight, x, result = self._operands(rows, features, width)
        self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._operation, weight, x, result, result, preference, most, found, byref(count)
        )
        self._library.cublasLtMatmulPreferenceDestroy(preference)
        for one in found[: count.value]:
            if one.state == 0 and one.workspace <= WORKSPACE:
                yield Candidate(bytes(one.algorithm).hex(), one.workspace)

    def in_parts(self, code: str, parts: int) -> str:
        """The algorithm with its sums over columns split into parts, which are added in float32; whether there is such
        a one `fits` says."""
        algorithm = _Algorithm.from_buffer_copy(bytes.fromhex(code))
        for attribute, value in ((_CONFIG_PARTS, parts), (_CONFIG_REDUCTION, _REDUCE_IN_FLOAT32)):
            self._library.cublasLtMatmulAlgoConfigSetAttribute(byref(algorithm), attribute, byref(c_uint32(value)), 4)
        return bytes(algorithm).hex()

    def fits(self, rows: int, features: int, width: int, code: str) -> bool:
        """Whether the algorithm can compute a GEMM of these sizes."""
        return self._prepare(rows, features, width, code) is not None

    def gemm(self, x: Tensor, weight: Tensor, code: str, out: Tensor | None = None) -> Tensor | None:
        """x W^T with that algorithm; None if it cannot compute this GEMM (nothing was launched then)."""
        rows, (features, width) = x.shape[0], weight.shape
        prepared = self._prepare(rows, features, width, code)
        if prepared is None or not x.is_contiguous():
            return None
        if out is None:
            out = torch.empty(rows, features, dtype=x.dtype, device=x.device)
        places = weight.data_ptr(), x.data_ptr(), out.data_ptr()
        if any(place % _ALIGNMENT for place in places):
            return None
        one, zero = self._scales
        _check(
            self._library.cublasLtMatmul(
                self._handle,
                self._operation,
                one,
                places[0],
                prepared.weight,
                places[1],
                prepared.rows,
                zero,
                places[2],
                prepared.result,
                places[2],
                prepared.result,
                ctypes.addressof(prepared.algorithm),
                self._workspace.data_ptr(),
                WORKSPACE,
                torch.cuda.current_stream(x.device).cuda_stream,
            )
        )
        return out

    def _prepare(self, rows: int, features: int, width: int, code: str) -> _Prepared | None:
        """The library is asked once whether the algorithm fits these sizes."""
        key = rows, features, width, code
        if key not in self._prepared:
            operands = self._operands(rows, features, width)
            algorithm, answer = _Algorithm.from_buffer_copy(bytes.fromhex(code)), _Found()
            weight, x, result = operands
            state = self._library.cublasLtMatmulAlgoCheck(
                self._handle, self._operation, weight, x, result, result, byref(algorithm), byref(answer)
            )
            fits = state == 0 and answer.state == 0 and answer.workspace <= WORKSPACE
            self._prepared[key] = _Prepared(*operands, algorithm) if fits else None
        return self._prepared[key]

    def _operands(self, rows: int, features: int, width: int) -> tuple[c_void_p, c_void_p, c_void_p]:
        """W, x and the result as the library sees our rows: as columns."""
        return self._layout(width, features), self._layout(width, rows), self._layout(features, rows)

    def _layout(self, height: int, columns: int) -> c_void_p:
        held = self._layouts.get((height, columns))
        if held is None:
            held = self._layouts[height, columns] = c_void_p()
            _check(self._library.cublasLtMatrixLayoutCreate(byref(held), self._type, height, columns, height))
        return held

    def close(self) -> None:
        for layout in self._layouts.values():
            self._library.cublasLtMatrixLayoutDestroy(layout)
        self._layouts.clear()
        self._prepared.clear()
        if self._handle:
            self._library.cublasLtMatmulDescDestroy(self._operation)
            self._library.cublasLtDestroy(self._handle)
            self._handle = c_void_p()


def _check(status: int) -> None:
    if status != 0:
        said = "CUBLAS_STATUS_ALLOC_FAILED" if status == _ALLOC_FAILED else f"status {status}"
        raise RuntimeError(f"cuBLASLt answered with {said}")


def named_library(device: torch.device, dtype: torch.dtype, known: int) -> CublasLt | None:
    """The library, if it is the version `known`, whose algorithms a table names, on a chip of the kind that they are
    for."""
    if device.type != "cuda" or dtype != torch.bfloat16 or not known or version() != known:
        return None
    return CublasLt(device, dtype) if torch.cuda.get_device_capability(device)[0] == 9 else None
