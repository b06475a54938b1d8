"""Reads a GGUF file: a bounded parser of its header, and its tensors dequantized one at a time."""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import numpy as np

from quire.errors import InvariantError, ModelLoadError
from quire.models.loader.gguf_quants import (
    QUANT_FORMATS,
    Codes,
    QuantFormat,
    ReadAt,
    dequantize_into,
    known_formats,
    read_codes,
    read_mxfp4,
    unread_format,
)

MAGIC = b"GGUF"
KNOWN_VERSIONS = (2, 3)
# Real headers are under 20 MB (a 262k vocabulary with its merges). The caps keep a forged one cheap.
MAX_HEADER_BYTES = 128 << 20
MAX_METADATA_KEYS = 65_536
MAX_TENSORS = 262_144
MAX_ARRAY_ITEMS = 4_000_000
MAX_NAME_BYTES = 1_024
MAX_DIMS = 4
MAX_DIM = 1 << 40
MAX_ALIGNMENT = 1 << 20
READ_CHUNK = 4 << 20

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, struct.Struct] = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_U32, _U64 = _SCALARS[4], _SCALARS[10]

MetadataValue = int | float | bool | str | list[str] | np.ndarray


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of the file. `shape` is row-major (torch order), the reverse of what the file stores."""

    name: str
    shape: tuple[int, ...]
    format: QuantFormat
    offset: int
    nbytes: int


class _Header:
    """A cursor over the head of the file that never reads past its end nor past the header cap."""

    def __init__(self, file: BinaryIO, size: int, where: str) -> None:
        self.file = file
        self.limit = min(size, MAX_HEADER_BYTES)
        self.size = size
        self.where = where
        self.buffer = b""
        self.position = 0

    def fail(self, reason: str) -> ModelLoadError:
        return ModelLoadError(f"{self.where}: not a usable GGUF file: {reason}")

    def ensure(self, end: int) -> None:
        """Make `buffer[:end]` available, or say that the file ends too early."""
        if end <= len(self.buffer):
            return
        if end > self.limit:
            if end > self.size:
                raise self.fail(
                    f"the file ends at byte {self.size} but its header goes on to byte {end}; "
                    "it is truncated or corrupted, download it again"
                )
            raise self.fail(f"its header is longer than {MAX_HEADER_BYTES >> 20} MiB")
        wanted = min(self.limit, max(end, len(self.buffer) * 2, READ_CHUNK))
        self.buffer += self.file.read(wanted - len(self.buffer))
        if len(self.buffer) < end:
            raise self.fail("the file became shorter while it was read")

    def unpack(self, form: struct.Struct) -> int | float | bool:
        end = self.position + form.size
        self.ensure(end)
        value: int | float | bool = form.unpack_from(self.buffer, self.position)[0]
        self.position = end
        return value

    def u32(self) -> int:
        return int(self.unpack(_U32))

    def u64(self) -> int:
        return int(self.unpack(_U64))

    def raw_string(self, cap: int) -> bytes:
        length = self.u64()
        if length > cap:
            raise self.fail(f"a string of {length} bytes where at most {cap} are allowed")
        start = self.position
        self.ensure(start + length)
        self.position = start + length
        return self.buffer[start : self.position]

    def name(self) -> str:
        raw = self.raw_string(MAX_NAME_BYTES)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"a name is not UTF-8: {raw[:40]!r}") from None

    def strings(self, count: int) -> list[str]:
        """`count` strings; the hot loop of the header (hundreds of thousands of tokens and merges)."""
        unpack = _U64.unpack_from
        out: list[str] = []
        position, have, buffer = self.position, len(self.buffer), self.buffer
        for _ in range(count):
            start = position + 8
            if start > have:
                self.ensure(start)
                have, buffer = len(self.buffer), self.buffer
            position = start + unpack(buffer, position)[0]
            if position > have:
                self.ensure(position)
                have, buffer = len(self.buffer), self.buffer
            out.append(buffer[start:position].decode("utf-8", "replace"))
        self.position = position
        return out

    def array(self) -> list[str] | np.ndarray:
        kind, count = self.u32(), self.u64()
        if count > MAX_ARRAY_ITEMS:
            raise self.fail(f"an array of {count} items where at most {MAX_ARRAY_ITEMS} are allowed")
        if kind == _STRING:
            self.ensure(self.position + 8 * count)
            return self.strings(count)
        form = _SCALARS.get(kind)
        if form is None:
            raise self.fail(f"an array of items of type {kind}, which is not supported")
        end = self.position + form.size * count
        self.ensure(end)
        values = np.frombuffer(self.buffer, np.dtype(form.format), count, self.position).copy()
        self.position = end
        return values

    def value(self) -> MetadataValue:
        kind = self.u32()
        if kind == _STRING:
            return self.raw_string(MAX_HEADER_BYTES).decode("utf-8", "replace")
        if kind == _ARRAY:
            return self.array()
        form = _SCALARS.get(kind)
        if form is None:
            raise self.fail(f"a metadata value of unknown type {kind}")
        return self.unpack(form)


def _read_metadata(head: _Header, count: int) -> dict[str, MetadataValue]:
    metadata: dict[str, MetadataValue] = {}
    for _ in range(count):
        key = head.name()
        if key in metadata:
            raise head.fail(f"the metadata key {key!r} appears twice")
        metadata[key] = head.value()
    return metadata


def _tensor_extent(head: _Header, name: str, dims: list[int], kind: int) -> tuple[QuantFormat, int]:
    """The tensor's format and its length in bytes, with every factor checked first."""
    quant = QUANT_FORMATS.get(kind)
    if quant is None:
        raise head.fail(f"tensor {name!r} is in {unread_format(kind)}; Quire reads {known_formats()}")
    elements = 1
    for dim in dims:
        if not 1 <= dim <= MAX_DIM:
            raise head.fail(f"tensor {name!r} has an impossible dimension {dim}")
        elements *= dim
        if elements > MAX_DIM:
            raise head.fail(f"tensor {name!r} has an impossible shape {dims}")
    if dims[0] % quant.block_elements:
        raise head.fail(
            f"tensor {name!r}: rows of {dims[0]} are no multiple of {quant.name}'s {quant.block_elements}"
        )
    return quant, elements // quant.block_elements * quant.block_bytes


def _read_tensor_infos(head: _Header, count: int) -> list[GgufTensor]:
    """Tensor records with offsets still relative to the data section."""
    tensors: list[GgufTensor] = []
    seen: set[str] = set()
    for _ in range(count):
        name = head.name()
        if name in seen:
            raise head.fail(f"the tensor {name!r} appears twice")
        seen.add(name)
        rank = head.u32()
        if not 1 <= rank <= MAX_DIMS:
            raise head.fail(f"tensor {name!r} has {rank} dimensions")
        dims = [head.u64() for _ in range(rank)]
        quant, nbytes = _tensor_extent(head, name, dims, head.u32())
        tensors.append(GgufTensor(name, tuple(reversed(dims)), quant, head.u64(), nbytes))
    return tensors


def _place_tensors(head: _Header, tensors: list[GgufTensor], alignment: int) -> dict[str, GgufTensor]:
    """Absolute offsets, checked to lie inside the file and not over one another."""
    start = -(-head.position // alignment) * alignment
    placed: dict[str, GgufTensor] = {}
    for tensor in tensors:
        if tensor.offset % alignment:
            raise head.fail(f"tensor {tensor.name!r} is not aligned to {alignment} bytes")
        offset = start + tensor.offset
        if offset + tensor.nbytes > head.size:
            raise head.fail(
                f"tensor {tensor.name!r} ends at byte {offset + tensor.nbytes} but the file has {head.size}; "
                "it is truncated or corrupted, download it again"
            )
        placed[tensor.name] = GgufTensor(tensor.name, tensor.shape, tensor.format, offset, tensor.nbytes)
    end, before = start, "the header"
    for tensor in sorted(placed.values(), key=lambda t: t.offset):
        if tensor.offset < end:
            raise head.fail(f"tensor {tensor.name!r} overlaps {before}")
        end, before = tensor.offset + tensor.nbytes, repr(tensor.name)
    return placed


def _alignment(head: _Header, metadata: dict[str, MetadataValue]) -> int:
    value = metadata.get("general.alignment", 32)
    if not isinstance(value, int) or not 8 <= value <= MAX_ALIGNMENT or value & (value - 1):
        raise head.fail(f"general.alignment is {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class _Part:
    """A rectangle of a tensor, and the blocks of each of its rows that hold it."""

    tensor: GgufTensor
    first_row: int
    rows: int
    first_block: int
    blocks: int
    low: int
    """The first column that is wanted, counted in the blocks that are read."""
    width: int

    @classmethod
    def of(cls, tensor: GgufTensor, dim: int, start: int, stop: int, within: tuple[int, int] | None = None) -> _Part:
        """[start, stop) along dimension `dim`; of rows, the columns `within`."""
        quant, columns = tensor.format, tensor.shape[-1]
        rows = tensor.nbytes // (columns // quant.block_elements * quant.block_bytes)
        by_row = dim < len(tensor.shape) - 1
        first_row, last_row, low, high = (start, stop, *(within or (0, columns))) if by_row else (0, rows, start, stop)
        first, last = low // quant.block_elements, -(-high // quant.block_elements)
        skipped = low - first * quant.block_elements
        return cls(tensor, first_row, last_row - first_row, first, last - first, skipped, high - low)

    def reader(self, read_at: ReadAt) -> ReadAt:
        """From the bytes of the wanted blocks alone, as if they lay side by side."""
        quant = self.tensor.format
        stored = self.tensor.shape[-1] // quant.block_elements * quant.block_bytes
        kept = self.blocks * quant.block_bytes

        def read_rows(offset: int, into: memoryview) -> None:
            done = 0
            while done < len(into):
                row, within = divmod(offset + done, kept)
                count = len(into) - done if kept == stored else min(kept - within, len(into) - done)
                place = (self.first_row + row) * stored + self.first_block * quant.block_bytes + within
                read_at(place, into[done : done + count])
                done += count

        return read_rows


class GgufFile:
    """A GGUF file with its header parsed: `metadata`, `tensors`, and `read` for one tensor's values."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file = open(self.path, "rb")  # noqa: SIM115  (kept open: tensors are read from it later)
        except OSError as error:
            raise ModelLoadError(f"cannot open the model file {self.path}: {error.strerror}") from error
        try:
            self._parse(os.fstat(self._file.fileno()).st_size)
        except BaseException:
            self._file.close()
            raise

    def _parse(self, size: int) -> None:
        head = _Header(self._file, size, str(self.path))
        head.ensure(4)
        if head.buffer[:4] != MAGIC:
            raise head.fail(f"it starts with {head.buffer[:4]!r} instead of {MAGIC!r}")
        head.position = 4
        self.version = head.u32()
        if self.version not in KNOWN_VERSIONS:
            hint = " (big-endian files are not supported)" if self.version in (2 << 24, 3 << 24) else ""
            raise head.fail(f"version {self.version}{hint}; Quire reads versions 2 and 3")
        tensor_count, key_count = head.u64(), head.u64()
        if tensor_count > MAX_TENSORS or key_count > MAX_METADATA_KEYS:
            raise head.fail(f"it claims {tensor_count} tensors and {key_count} metadata keys")
        self.metadata = _read_metadata(head, key_count)
        tensors = _read_tensor_infos(head, tensor_count)
        self.tensors = _place_tensors(head, tensors, _alignment(head, self.metadata))
        if int_value(self.metadata, "split.count", 1) > 1:
            raise head.fail("it is one part of a split model; join the parts with `llama-gguf-split --merge`")

    def forget_vocabulary(self) -> None:
        """Let go of the lists of tokens and merges, which are most of the header, once a tokenizer was made of them."""
        for key in [key for key, value in self.metadata.items() if isinstance(value, list | np.ndarray)]:
            if key.startswith("tokenizer."):
                del self.metadata[key]

    def read(self, tensor: GgufTensor, out: np.ndarray) -> None:
        """Dequantize `tensor` into `out`, a flat C-contiguous float32 array, through small file reads."""
        dequantize_into(tensor.format, self._reader(tensor), out)

    def read_range(
        self, tensor: GgufTensor, dim: int, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> np.ndarray:
        """[start, stop) along dimension `dim` of a matrix, or of a vector; of rows these `columns`. Nothing is read
        beside but the rest of the blocks at the borders. Of merged experts, [experts, rows, columns], whole ones."""
        if len(tensor.shape) == 3:
            experts, rows, width = tensor.shape
            flat = replace(tensor, shape=(experts * rows, width))
            return self.read_range(flat, 0, start * rows, stop * rows).reshape(-1, rows, width)
        part = _Part.of(tensor, dim, start, stop, columns)
        out = np.empty((part.rows, part.blocks * tensor.format.block_elements), np.float32)
        dequantize_into(tensor.format, part.reader(self._reader(tensor)), out.reshape(-1))
        kept = out[:, part.low : part.low + part.width]
        return kept if len(tensor.shape) > 1 else kept[0]

    def read_codes(
        self, tensor: GgufTensor, dim: int, start: int, stop: int, columns: tuple[int, int] | None = None
    ) -> Codes:
        """Of the same part of a quantized matrix: codes uint8, the rest float32, [rows, …] each. Columns are cut at
        borders of groups."""
        quant, coding = tensor.format, tensor.format.coding
        if coding is None:
            raise InvariantError(f"the GGUF tensor {tensor.name!r} of {quant.name} has no codes")
        part = _Part.of(tensor, dim, start, stop, columns)
        if part.low % coding.group or part.width % coding.group:
            raise InvariantError(f"columns {start} to {stop} of {tensor.name!r} cut a group of {coding.group}")
        found = read_codes(quant, coding, part.reader(self._reader(tensor)), part.rows * part.blocks)

        def kept(values: np.ndarray, unit: int) -> np.ndarray:
            columns = slice(part.low // unit, (part.low + part.width) // unit)
            return np.ascontiguousarray(values.reshape(part.rows, -1)[:, columns])

        offsets = None if found.offsets is None else kept(found.offsets, coding.group)
        cut = part.low % quant.block_elements or part.width % quant.block_elements
        steps = None if cut or found.steps is None else found.steps.reshape(part.rows, -1, found.steps.shape[-1])
        return Codes(kept(found.codes, 1), kept(found.scales, coding.group), offsets, steps)

    def read_mxfp4(self, tensor: GgufTensor, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows [start, stop) of a matrix in MXFP4: codes, two columns a byte, and exponents, [rows, ...] each."""
        part = _Part.of(tensor, 0, start, stop)
        codes, scales = read_mxfp4(tensor.format, part.reader(self._reader(tensor)), part.rows * part.blocks)
        return codes.reshape(part.rows, -1), scales.reshape(part.rows, -1)

    def _reader(self, tensor: GgufTensor) -> ReadAt:
        descriptor = self._file.fileno()

        def read_at(offset: int, into: memoryview) -> None:
            # preadv keeps no file position, so that two threads may read from one file.
            done = 0
            while done < len(into):
                got = os.preadv(descriptor, [into[done:]], tensor.offset + offset + done)
                if got <= 0:
                    raise ModelLoadError(f"{self.path} became shorter while tensor {tensor.name!r} was read")
                done += got

        return read_at

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def int_value(metadata: dict[str, MetadataValue], key: str, default: int) -> int:
    """An integer metadata value, or `default` when the key is missing; another type is an error."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelLoadError(f"GGUF metadata {key!r} should be an integer, it is {type(value).__name__}")
    return value


def float_value(metadata: dict[str, MetadataValue], key: str, default: float) -> float:
    """A float metadata value as its shortest decimal: 9.99999974e-06 stored in 32 bits reads as 1e-05."""
    value = metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ModelLoadError(f"GGUF metadata {key!r} should be a number, it is {type(value).__name__}")
    if not np.isfinite(value) or abs(value) > 1e30:
        raise ModelLoadError(f"GGUF metadata {key!r} is {value}")
    return float(str(np.float32(value)))


def str_value(metadata: dict[str, MetadataValue], key: str, default: str) -> str:
    value = metadata.get(key, default)
    if not isinstance(value, str):
        raise ModelLoadError(f"GGUF metadata {key!r} should be text, it is {type(value).__name__}")
    return value


def positive_value(file: GgufFile, key: str, default: int | None = None) -> int:
    """A positive integer of a file's metadata; without a default the key must be there."""
    if default is None and key not in file.metadata:
        raise ModelLoadError(f"{file.path}: GGUF metadata lacks {key!r}, the file cannot be used as a model")
    value = int_value(file.metadata, key, default or 0)
    if not 0 < value < 1 << 31:
        raise ModelLoadError(f"{file.path}: GGUF metadata {key!r} is {value}")
    return value


def tensor_named(file: GgufFile, name: str) -> GgufTensor:
    if name not in file.tensors:
        raise ModelLoadError(f"{file.path}: the tensor {name!r} is missing; is this a vocabulary-only file?")
    return file.tensors[name]
