"""Reads the weights of a Hugging Face folder: one safetensors file or several behind an index."""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from quire.errors import ModelLoadError
from quire.models.loader.json_file import read_json_object
from quire.models.spec import Shape
from quire.models.stored_parts import NOTHING, Ranges

if TYPE_CHECKING:
    import torch

    from quire.kernels.unread import UnreadRows

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
REOPEN_BYTES = 32 << 20
"""Of a file that may be mapped, and not be needed any more."""
READ_BYTES = 16 << 20
"""Of one tensor, of which ranges are read, that are mapped at once."""
NO_MATRICES = ("bias", "norm.weight")
"""Endings of tensors that are no matrices, though those of all heads, or experts, may have two dimensions."""
SMALL_BYTES = 1 << 20
"""Of a tensor that may be kept as it is. Larger ones are packed, and let go of."""
Held = TypeVar("Held")

RangesOf = Callable[[str, Shape], Ranges | None]
"""Which part is wanted of a tensor of this name and shape; None: all of it."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder, in a fixed order; ModelLoadError names what is missing."""
    if (folder / INDEX).is_file():
        return _indexed_files(folder)
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    others = sorted(folder.glob("*.safetensors"))
    if len(others) == 1:
        return others
    if others:
        raise ModelLoadError(f"{folder} has several safetensors files but no {INDEX} that says which to read")
    pickled = sorted(folder.glob("*.bin")) + sorted(folder.glob("*.pt*"))
    hint = f" ({pickled[0].name} is a pickle, which Quire does not read: convert it)" if pickled else ""
    raise ModelLoadError(f"{folder} has no {SINGLE} and no {INDEX}{hint}")


def _weight_map(folder: Path) -> dict[str, str]:
    index = read_json_object(folder / INDEX)
    weight_map = index.get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelLoadError(f"{folder / INDEX} has no 'weight_map' of tensor names to file names")
    return weight_map


def _indexed_files(folder: Path) -> list[Path]:
    files = []
    for name in sorted(set(_weight_map(folder).values())):
        # A shard is a plain file name. Anything else could point outside the folder.
        if name != Path(name).name or name in ("", ".", "..") or "\\" in name:
            raise ModelLoadError(f"{folder / INDEX} points outside its folder: {name!r}")
        if not (folder / name).is_file():
            raise ModelLoadError(
                f"the shard {name} that {INDEX} names is missing from {folder}; download it again"
            )
        files.append(folder / name)
    return files


def _names_by_file(folder: Path) -> dict[str, set[str]] | None:
    if not (folder / INDEX).is_file():
        return None
    wanted: dict[str, set[str]] = {}
    for tensor, file in _weight_map(folder).items():
        wanted.setdefault(file, set()).add(tensor)
    return wanted


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """What safetensors says of a file it cannot read, as an error that names the file."""
    from safetensors import SafetensorError

    try:
        yield
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ModelLoadError(f"{path} is truncated or corrupted ({error}); download it again") from error


def tensor_names(folder: Path) -> list[str]:
    """The tensors of a folder, without reading them."""
    if (folder / INDEX).is_file():
        return list(_weight_map(folder))
    return [name for path in weight_files(folder) for name in _names_in(path, None)]


def tensor_shapes(folder: Path) -> Iterator[tuple[str, Shape]]:
    """Name and shape of every tensor of a folder, without reading them."""
    from safetensors import safe_open

    for path in weight_files(folder):
        with _explained(path), safe_open(path, framework="np") as shard:
            yield from [(name, tuple(shard.get_slice(name).get_shape())) for name in list(shard.keys())]


def read_tensor(folder: Path, name: str) -> torch.Tensor:
    """One of them, by itself."""
    from safetensors import safe_open

    path = folder / _weight_map(folder)[name] if (folder / INDEX).is_file() else weight_files(folder)[0]
    with _explained(path), safe_open(path, framework="pt") as shard:
        tensor: torch.Tensor = shard.get_tensor(name).clone()  # which does not hold the mapping
    return tensor


def iterate_weights(
    folder: Path, dtype: torch.dtype | None, ranges_of: RangesOf | None = None, fp8: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) pairs, one in memory at a time, cast to `dtype` (None keeps the stored type); with `ranges_of`
    only those parts of them are read. `fp8`: tensors in fp8 are handed over too, as they are. Those of no layer come
    first (`tables_first`)."""
    for path, some in _files(folder):
        with _explained(path):
            for name, tensor in _read_file(path, some, ranges_of):
                yield name, tensor if fp8 and tensor.dtype.itemsize == 1 else _cast(name, tensor, dtype, path)


def iterate_unread(
    folder: Path, ranges_of: RangesOf | None = None, fp8: bool = False, codes: Callable[[str], bool] | None = None
) -> Iterator[tuple[str, torch.Tensor | UnreadRows]]:
    """The same in the types that they are stored in. Large matrices of floats, and merged experts, are left in their
    file: whoever packs them reads a few rows at a time. `codes`: and those of bytes, or of words, that have such a
    name. Any other is handed over, for whoever gets it to look at its type."""
    for path, names in _files(folder):
        with _explained(path):
            large = _large(path, names, ranges_of, codes)
            for left, some in groupby(names, large.__contains__):
                if left:
                    yield from ((name, large[name]) for name in some)
                    continue
                for name, tensor in _read_file(path, list(some), ranges_of):
                    yield name, tensor if fp8 and tensor.dtype.itemsize == 1 else _cast(name, tensor, None, path)


def _large(
    path: Path, names: list[str], ranges_of: RangesOf | None, codes: Callable[[str], bool] | None
) -> dict[str, UnreadRows]:
    """Those of a file's tensors that are left in it."""
    from safetensors import safe_open

    from quire.kernels.unread import UnreadRows

    found = {}
    with safe_open(path, framework="pt") as shard:
        for name in names:
            stored = shard.get_slice(name)
            shape = tuple(stored.get_shape())
            if len(shape) < 2 or name.endswith(NO_MATRICES):
                continue
            none: torch.Tensor = stored[:0]
            is_code = codes is not None and codes(name)
            may_be_code = none.element_size() == 1 or stored.get_dtype() == "I32"
            if not (is_code if may_be_code else none.is_floating_point()):
                continue
            dim, runs = (ranges_of and ranges_of(name, shape)) or (0, ((0, shape[0]),))
            size = [*shape]
            size[dim] = sum(stop - start for start, stop in runs)
            if math.prod(size) * none.element_size() > READ_BYTES:
                rows = size[0] if len(size) == 2 else size[0] * size[1]
                found[name] = UnreadRows(0, (rows, math.prod(size) // rows), _RowReader(path, name, shape, (dim, runs)))
    return found


class _RowReader:
    """Reads rows of the ranges that are wanted of a tensor. The rows of merged experts, [experts, rows, ...], are
    counted as if they lay one below the other."""

    def __init__(self, path: Path, name: str, shape: Shape, ranges: Ranges) -> None:
        self._path = path
        self._name = name
        self._shape = shape
        self._dtype: str | None = None
        self._each = shape[1] if len(shape) > 2 else 1
        self._dim, self._runs = ranges
        self._width = math.prod(shape[2:]) if len(shape) > 2 else shape[1]
        self._count = shape[0] if self._dim else self._each * sum(stop - start for start, stop in self._runs)
        self._stored: Any = None
        """The tensor in the mapped file, between two reads: opening one for every few rows takes time."""
        self._mapped = 0

    def __call__(self, start: int, stop: int) -> torch.Tensor:
        """They lie in the mapped file, unless they had to be joined."""
        import torch

        with _explained(self._path):
            stored = self._tensor()
            if start == stop:
                none: torch.Tensor = stored[:0]
                return none.new_empty(0, self._width)
            if self._dim == 1:
                found = [stored[start:stop, low:high] for low, high in self._runs]
            else:
                found = [self._rows(stored, low, high) for low, high in self._spans(start, stop)]
            self._mapped += (stop - start) * self._width * found[0].element_size()
            if self._mapped >= READ_BYTES or stop == self._count:
                self._stored = None  # and with it the pages that were read
            return found[0] if len(found) == 1 else torch.cat(found, self._dim)

    def _tensor(self) -> Any:
        from safetensors import safe_open

        if self._stored is None:
            self._stored, self._mapped = safe_open(self._path, framework="pt").get_slice(self._name), 0
            self._dtype = self._dtype or self._stored.get_dtype()
            if (tuple(self._stored.get_shape()), self._stored.get_dtype()) != (self._shape, self._dtype):
                raise ModelLoadError(f"{self._path} was replaced while {self._name!r} was read: load it again")
        return self._stored

    def _spans(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Rows of the stored tensor, each span of one expert."""
        before = 0
        for first, last in self._runs:
            shift = first * self._each - before
            before += (last - first) * self._each
            low, high = max(start + shift, first * self._each), min(stop + shift, last * self._each)
            while low < high:
                end = high if self._each == 1 else min(high, (low // self._each + 1) * self._each)
                yield low, end
                low = end

    def _rows(self, stored: Any, low: int, high: int) -> torch.Tensor:
        if self._each == 1:
            rows: torch.Tensor = stored[low:high]
            return rows
        expert, first = divmod(low, self._each)
        one: torch.Tensor = stored[expert : expert + 1, first : first + high - low]
        return one.flatten(2)[0]


def _files(folder: Path) -> Iterator[tuple[Path, list[str]]]:
    """Which tensors are read of which file, in the order in which they are."""
    wanted = _names_by_file(folder)
    files = weight_files(folder)
    held = [(path, name) for path in files for name in _names_in(path, None if wanted is None else wanted[path.name])]
    for path, some in groupby(tables_first(held, lambda entry: entry[1]), lambda entry: entry[0]):
        yield path, [name for _, name in some]


def tables_first(held: Sequence[Held], name_of: Callable[[Held], str]) -> list[Held]:
    """Tensors of no layer before the others, else in their order. A weight is in memory twice while it is packed, and
    those of a vocabulary are the largest: so they are when nothing else is there."""
    return sorted(held, key=lambda one: in_layer(name_of(one)))


def in_layer(name: str) -> bool:
    """Whether a tensor is one of a layer, in any family's names: layers are numbered."""
    return any(part.isdigit() for part in name.split("."))


def _names_in(path: Path, wanted: set[str] | None) -> list[str]:
    """The tensors of a file; refuses one that lacks a `wanted` tensor."""
    from safetensors import safe_open

    with _explained(path), safe_open(path, framework="pt") as shard:
        names = list(shard.keys())
    missing = (wanted or set()).difference(names)
    if missing:
        raise ModelLoadError(f"{path} lacks the tensor {min(missing)!r} that {INDEX} places there")
    return names


def _read_file(path: Path, wanted: list[str], ranges_of: RangesOf | None) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    names = deque(wanted)
    while names:
        # The pages of a mapped file count as memory until it is closed: read a part, close, open again.
        with safe_open(path, framework="pt") as shard:
            read = 0
            while names and read < REOPEN_BYTES:
                name = names.popleft()
                stored = shard.get_slice(name)
                ranges = None if ranges_of is None else ranges_of(name, tuple(stored.get_shape()))
                if ranges == NOTHING:
                    continue
                tensor, mapped = (_whole(shard.get_tensor(name)) if ranges is None
                                  else _read_ranges(path, name, stored, ranges))
                read += mapped
                yield name, tensor
                del tensor, stored  # which hold the mapping


def _whole(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """It lies in the mapped file, all of which who keeps it would keep; so a small one, a bias or a norm, is copied."""
    return tensor.clone() if tensor.nbytes <= SMALL_BYTES else tensor, tensor.nbytes


def _read_ranges(path: Path, name: str, stored: Any, ranges: Ranges) -> tuple[torch.Tensor, int]:
    """Joined, and how much of the open file was mapped for it: nothing where many bytes are read a part at a time. Of
    some columns all rows are mapped."""
    import torch
    from safetensors import safe_open

    dim, runs = ranges
    rows, *inner = stored.get_shape()
    spans = [(0, rows)] if dim else list(runs)
    none: torch.Tensor = stored[:0]
    row_bytes = math.prod(inner) * none.element_size()
    mapped = row_bytes * sum(stop - start for start, stop in spans)
    if mapped <= READ_BYTES:
        parts = [stored[:, start:stop] if dim else stored[start:stop] for start, stop in runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim), mapped
    size = [rows, *inner]
    size[dim] = sum(stop - start for start, stop in runs)
    out, place = torch.empty(size, dtype=none.dtype), 0
    step = max(1, READ_BYTES // max(1, row_bytes))
    for start, stop in spans:
        for row in range(start, stop, step):
            end = min(row + step, stop)
            with safe_open(path, framework="pt") as shard:
                piece = shard.get_slice(name)
                found = torch.cat([piece[row:end, low:high] for low, high in runs], 1) if dim else piece[row:end]
                out[place : place + end - row] = found
                del piece
            place += end - row
    return out, 0


def _cast(name: str, tensor: torch.Tensor, dtype: torch.dtype | None, path: Path) -> torch.Tensor:
    if not tensor.dtype.is_floating_point:
        return tensor
    if tensor.dtype.itemsize < 2:
        raise ModelLoadError(
            f"{path}: {name} is stored as {tensor.dtype}; Quire reads float32, float16 and bfloat16"
        )
    return tensor if dtype is None else tensor.to(dtype)
