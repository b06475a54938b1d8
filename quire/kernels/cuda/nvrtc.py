"""CUDA C to machine code by NVRTC, the compiler library that torch's CUDA packages bring. No toolkit is needed.

What was compiled once is kept beside Triton's kernels, by a digest of all that it depends on.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
from collections.abc import Iterator, Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from functools import lru_cache
from pathlib import Path

from triton.runtime.cache import get_cache_manager

_VERSIONS = ("13", "12")
"""Of CUDA. Only one of them can be there: the one that torch was built for."""
_NAME = "kernel.cubin"


class CompileError(RuntimeError):
    """The compiler did not take the source."""


class Missing(CompileError):
    """The compiler is not there."""


def compiled(source: str, options: Sequence[str]) -> bytes:
    """The machine code (a cubin) of a source; `options` name the chip."""
    library = _library()
    if library is None:
        raise Missing("NVRTC, the compiler library of CUDA, was not found")
    digest = hashlib.sha256(repr((_version(library), tuple(options), source)).encode()).hexdigest()
    cache = get_cache_manager(digest)
    kept = cache.get_file(_NAME)
    if kept is not None:
        return Path(kept).read_bytes()
    code = _compile(library, source, options)
    cache.put(code, _NAME, binary=True)
    return code


@lru_cache(maxsize=1)
def _library() -> ctypes.CDLL | None:
    for place in _places():
        try:
            library = ctypes.CDLL(place)
        except OSError:
            continue
        _load_builtins()
        return library
    return None


def _load_builtins() -> None:
    """The library opens a second one by its name alone, which the loader does not find in a package's folder unless it
    is loaded already."""
    with open("/proc/self/maps") as maps:
        places = {line.split(maxsplit=5)[-1].strip() for line in maps if "/libnvrtc.so" in line}
    for place in places:
        for other in Path(place).parent.glob("libnvrtc-builtins.so.*"):
            try:
                ctypes.CDLL(str(other))
            except OSError:
                continue


def _places() -> Iterator[str]:
    """Where the loader finds it by itself, else in NVIDIA's packages."""
    for version in _VERSIONS:
        yield f"libnvrtc.so.{version}"
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for version in _VERSIONS:
            yield from map(str, Path(folder).glob(f"*/lib/libnvrtc.so.{version}"))


def _version(library: ctypes.CDLL) -> tuple[int, int]:
    major, minor = c_int(), c_int()
    _check(library, library.nvrtcVersion(byref(major), byref(minor)))
    return major.value, minor.value


def _compile(library: ctypes.CDLL, source: str, options: Sequence[str]) -> bytes:
    program = c_void_p()
    _check(library, library.nvrtcCreateProgram(byref(program), source.encode(), b"kernel.cu", 0, None, None))
    try:
        words = (c_char_p * len(options))(*(option.encode() for option in options))
        status = library.nvrtcCompileProgram(program, len(options), words)
        if status:
            raise CompileError(_text(library, program))
        size = c_size_t()
        _check(library, library.nvrtcGetCUBINSize(program, byref(size)))
        code = ctypes.create_string_buffer(size.value)
        _check(library, library.nvrtcGetCUBIN(program, code))
        return code.raw
    finally:
        library.nvrtcDestroyProgram(byref(program))


def _text(library: ctypes.CDLL, program: c_void_p) -> str:
    """What the compiler said."""
    size = c_size_t()
    library.nvrtcGetProgramLogSize(program, byref(size))
    text = ctypes.create_string_buffer(size.value + 1)
    library.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace")


def _check(library: ctypes.CDLL, status: int) -> None:
    if status:
        library.nvrtcGetErrorString.restype = c_char_p
        raise CompileError(f"NVRTC: {library.nvrtcGetErrorString(status).decode()}")
