"""How one rank's KV lies in its memory, and the one form in which KV travels: by layer, part, token, head. No torch.

The wire form of some tokens is, for each layer in order and each of its parts (k, v), [tokens, heads, width] in the
element type of the sender's cache. It knows no blocks, ranks or devices: the sender cuts out what the receiving
rank holds, the receiver writes it into its own blocks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from quire.errors import KVMismatchError, KVTransferError

LAYOUT_VERSION = 1
ELEMENT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
                 "int32": 4}
"""Element types of caches, and their bytes. int32: words of four int8 codes, and scales (`cpu/code_cache.c`)."""
_CODES = "int32"
_MOST_LAYERS = 4096


@dataclass(frozen=True, slots=True)
class PartLayout:
    """One tensor of a layer: heads first_head … first_head + num_heads - 1 of the model's are on this rank."""

    name: str
    heads: int
    """Of the whole model."""
    width: int
    first_head: int
    num_heads: int
    tokens_last: bool
    """Inside a block the tokens are the last dimension (a CPU's keys), not the one before."""


@dataclass(frozen=True, slots=True)
class LayerLayout:
    layer: int
    """Its number in the whole model."""
    group: int
    """Its cache group in the whole model: whose block table it goes by."""
    window: int | None
    parts: tuple[PartLayout, ...]


@dataclass(frozen=True, slots=True)
class LayoutDescription:
    """The KV memory of one rank, as told to the other side at the handshake."""

    dtype: str
    block_size: int
    num_blocks: int
    layers: tuple[LayerLayout, ...]
    scale: float = 1.0
    """What stored numbers are multiplied by (fp8)."""
    addressable: bool = True
    """The host can write into its blocks; those of a GPU it reaches through staging only."""
    version: int = LAYOUT_VERSION

    @property
    def element_size(self) -> int:
        return ELEMENT_SIZES[self.dtype]

    @property
    def num_groups(self) -> int:
        return 1 + max((layer.group for layer in self.layers), default=-1)

    def tensors(self) -> Iterator[tuple[LayerLayout, PartLayout]]:
        """Every tensor in canonical order; its place in this order is its number as a region of memory."""
        return ((layer, part) for layer in self.layers for part in layer.parts)

    def block_bytes(self, part: PartLayout) -> int:
        return part.num_heads * part.width * self.block_size * self.element_size

    def pieces(self, group: int | None = None) -> tuple[Piece, ...]:
        """All that this rank holds, or what one cache group's layers do, in the order of the wire form."""
        return tuple(Piece(layer.layer, layer.group, part.name, part.width, part.first_head, part.num_heads)
                     for layer, part in self.tensors() if group is None or layer.group == group)

    # ---- as plain data

    def to_data(self) -> dict[str, Any]:
        layers = [[layer.layer, layer.group, layer.window,
                   [[part.name, part.heads, part.width, part.first_head, part.num_heads, part.tokens_last]
                    for part in layer.parts]] for layer in self.layers]
        return {"version": self.version, "dtype": self.dtype, "block_size": self.block_size,
                "num_blocks": self.num_blocks, "scale": self.scale, "addressable": self.addressable, "layers": layers}

    @classmethod
    def from_data(cls, data: object) -> LayoutDescription:
        """What `to_data` made, from another process: everything is checked; an error names the field."""
        if not isinstance(data, Mapping):
            raise KVTransferError("a KV layout must be an object")
        version = _count(data, "version")
        if version != LAYOUT_VERSION:
            raise KVMismatchError(f"another layout version: {version}, this side speaks {LAYOUT_VERSION}", "layout")
        dtype, scale, layers = data.get("dtype"), data.get("scale"), data.get("layers")
        if dtype not in ELEMENT_SIZES:
            raise KVTransferError(f"KV layout: dtype {dtype!r:.40} is not one of {', '.join(ELEMENT_SIZES)}")
        if not isinstance(scale, int | float) or isinstance(scale, bool) or not 0 < scale < float("inf"):
            raise KVTransferError(f"KV layout: scale {scale!r:.40} is not a positive number")
        if not isinstance(layers, list) or not 1 <= len(layers) <= _MOST_LAYERS:
            raise KVTransferError(f"KV layout: layers must be a list of 1 to {_MOST_LAYERS}")
        made = tuple(_layer_from(each) for each in layers)
        if any(a.layer >= b.layer for a, b in itertools.pairwise(made)):
            raise KVTransferError("KV layout: layers must be in order, each once")
        return cls(str(dtype), _count(data, "block_size", 1), _count(data, "num_blocks"), made, float(scale),
                   data.get("addressable") is True)


def _count(data: Mapping[Any, Any], field: str, least: int = 0) -> int:
    value = data.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value < 1 << 40:
        raise KVTransferError(f"KV layout: {field} must be a number from {least} on, not {value!r:.40}")
    return value


def _layer_from(data: object) -> LayerLayout:
    match data:
        case [int(layer), int(group), int() | None as window, [*parts]] if (
                0 <= layer < _MOST_LAYERS and 0 <= group < _MOST_LAYERS and (window is None or window >= 1) and parts):
            return LayerLayout(layer, group, window, tuple(_part_from(each) for each in parts))
    raise KVTransferError(f"KV layout: {data!r:.80} describes no layer")


def _part_from(data: object) -> PartLayout:
    match data:
        case [str(name), int(heads), int(width), int(first), int(held), bool(tokens_last)] if (
                len(name) <= 64 and 1 <= heads < 1 << 20 and 1 <= width < 1 << 20 and held >= 1
                and 0 <= first <= heads - held):
            return PartLayout(name, heads, width, first, held, tokens_last)
    raise KVTransferError(f"KV layout: {data!r:.80} describes no part of a layer")


# ---- what goes from whom to whom


@dataclass(frozen=True, slots=True)
class Piece:
    """Heads first … first + count - 1 (numbers of the whole model) of one part of a layer."""

    layer: int
    group: int
    part: str
    width: int
    first_head: int
    num_heads: int

    def nbytes(self, tokens: int, element_size: int) -> int:
        return tokens * self.num_heads * self.width * element_size


def check_compatible(mine: LayoutDescription, theirs: LayoutDescription, convert: bool = False) -> None:
    """Raise by name unless KV of one can become KV of the other. TP, PP, block size and device may differ."""
    if mine.dtype != theirs.dtype and _CODES in (mine.dtype, theirs.dtype):
        raise KVMismatchError("another cache dtype: one side keeps int8 codes and the other does not, and neither is "
                              "converted; use the same kv_cache_dtype", "dtype")
    if (mine.dtype, mine.scale) != (theirs.dtype, theirs.scale) and not convert:
        raise KVMismatchError(f"another cache dtype: {theirs.dtype}, here {mine.dtype}; conversion must be asked for",
                              "dtype")
    known = {layer.layer: layer for layer in mine.layers}
    for layer in theirs.layers:
        same = known.get(layer.layer)
        if same is None:
            continue
        shapes = [[(part.name, part.heads, part.width) for part in each.parts] for each in (same, layer)]
        if shapes[0] != shapes[1] or (same.group, same.window) != (layer.group, layer.window):
            raise KVMismatchError(f"another model: layer {layer.layer} keeps other KV there than here", "model")


def shares(writers: Sequence[LayoutDescription], reader: LayoutDescription) -> list[tuple[Piece, ...]]:
    """What each writer's rank sends to one reader's rank: each head of each layer once, from the first who has it.

    Both sides compute it by themselves and get the same. Heads that no writer has are an error.
    """
    sent: list[list[Piece]] = [[] for _ in writers]
    tables = [{(layer.layer, part.name): part for layer, part in writer.tensors()} for writer in writers]
    for layer, part in reader.tensors():
        head, end = part.first_head, part.first_head + part.num_heads
        while head < end:
            for rank, table in enumerate(tables):
                held = table.get((layer.layer, part.name))
                if held is not None and held.first_head <= head < held.first_head + held.num_heads:
                    stop = min(end, held.first_head + held.num_heads)
                    sent[rank].append(Piece(layer.layer, layer.group, part.name, part.width, head, stop - head))
                    head = stop
                    break
            else:
                raise KVMismatchError(f"no rank of the writer has head {head} of {part.name} in layer {layer.layer}",
                                      "model")
    return [tuple(pieces) for pieces in sent]


def written_straight(writer: LayoutDescription, reader: LayoutDescription, pieces: Sequence[Piece]) -> bool:
    """Whether a block of the writer is, byte for byte, one of the reader, in all tensors that `pieces` come from."""
    if not (writer.addressable and reader.addressable):
        return False
    if (writer.dtype, writer.scale, writer.block_size) != (reader.dtype, reader.scale, reader.block_size):
        return False
    mine = {(layer.layer, part.name): part for layer, part in writer.tensors()}
    theirs = {(layer.layer, part.name): part for layer, part in reader.tensors()}
    return all(mine[piece.layer, piece.part] == theirs[piece.layer, piece.part] for piece in pieces)


# ---- which tokens


def first_read(window: int | None, start: int, reader: int) -> int:
    """The first token from `start` on that tokens from position `reader` on will read: a window forgets the rest."""
    return start if window is None else max(start, reader - window + 1)


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens start … end-1 of a sequence, of which group g travels from `starts[g]` on."""

    start: int
    end: int
    starts: tuple[int, ...]

    def of_group(self, group: int) -> tuple[int, int]:
        """Empty (start == end) where all of it has left the group's window."""
        first = min(self.end, max(self.start, self.starts[group]))
        return first, self.end

    def nbytes(self, pieces: Sequence[Piece], element_size: int) -> int:
        lengths = [self.of_group(group) for group in range(len(self.starts))]
        return sum(piece.nbytes(lengths[piece.group][1] - lengths[piece.group][0], element_size) for piece in pieces)


def spans(start: int, end: int, starts: Sequence[int], pieces: Sequence[Piece], element_size: int,
          most_bytes: int, align: int = 1) -> list[Span]:
    """Cut start … end-1 into spans whose wire form has at most `most_bytes`, at multiples of `align` if it can be."""
    per_token = sum(piece.nbytes(1, element_size) for piece in pieces)
    tokens = max(1, most_bytes // max(1, per_token))
    if tokens >= align:
        tokens -= tokens % align
    cut: list[Span] = []
    while start < end:
        stop = min(end, start - start % align + tokens) if tokens >= align else min(end, start + tokens)
        cut.append(Span(start, stop, tuple(starts)))
        start = stop
    return cut
