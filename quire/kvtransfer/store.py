"""One rank's KV tensors as a sender and a receiver see them: gathered into the wire form, scattered out of it.

The tensors may be a CPU's (keys transposed inside a block) or a GPU's. All copies of a call are made in one call of a
kernel, or of torch, which holds no GIL: beside a thread that plans steps each call would have to wait for it. On a GPU
the wire form is put together on the device and crosses in one copy through pinned memory, on a stream of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import CDLL
from threading import Lock

import numpy as np
import torch
from torch import Tensor

from quire.errors import KVTransferError
from quire.kernels.cpu import library
from quire.kernels.types import LayerCache
from quire.kvtransfer.layout import LayerLayout, LayoutDescription, PartLayout, Piece, Span
from quire.kvtransfer.memory import Tables
from quire.kvtransfer.runs import TokenRun, token_runs

HeadsOf = Callable[[int, str], tuple[int, int]]
"""From a layer's number and a part's name: the model's number of heads, and the first one on this rank."""


class KVStore:
    """The caches of one rank. Content is the caller's to protect: nobody else may write what is gathered here, and
    nobody may read what is scattered here until the call returns."""

    def __init__(self, layers: Sequence[LayerCache], group_of_layer: Sequence[int], *, first_layer: int = 0,
                 heads: HeadsOf | None = None, scale: float = 1.0, staged: bool | None = None) -> None:
        """`heads` where a rank has a part of the heads only. `staged`: go through a buffer beside the caches, as a
        GPU's must; None decides by their device."""
        if not layers:
            raise KVTransferError("a rank without layers has no KV to send")
        if any(layer.scales is not None for layer in layers):
            raise KVTransferError("keys and values in fp8 with scales of the checkpoint (k_scale) cannot be sent: "
                                  "use kv_cache_dtype='auto'")
        first = next(iter(layers[0].tensors.values()))
        self.device = first.device
        self._staged = self.device.type != "cpu" if staged is None else staged
        self.dtype = first.dtype
        self._tensors: dict[tuple[int, str], Tensor] = {}
        """By layer and part: views [num_blocks, heads, block_size, width], whatever lies behind them."""
        self.raw: list[Tensor] = []
        """The tensors as they lie, in the order of the description; the block is the first dimension."""
        described = []
        for index, (layer, group) in enumerate(zip(layers, group_of_layer, strict=True)):
            number = first_layer + index
            parts = tuple(self._add(layer, number, part.name, heads) for part in layer.spec.parts)
            described.append(LayerLayout(number, group, layer.spec.window, parts))
        self.layout = LayoutDescription(str(self.dtype).removeprefix("torch."), layers[0].block_size,
                                        min(layer.num_blocks for layer in layers), tuple(described), scale,
                                        addressable=not self._staged)
        self._first_head = {(layer.layer, part.name): part.first_head for layer, part in self.layout.tensors()}
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._kernels = None if self._staged else library.load()
        self._bytes: dict[int, memoryview] = {}
        self._pinned: Tensor | None = None
        self._staging = Lock()
        """Held while the pinned memory is in use."""

    def _add(self, layer: LayerCache, number: int, name: str, heads: HeadsOf | None) -> PartLayout:
        tensor = layer.tensors[name]
        spec = next(part for part in layer.spec.parts if part.name == name)
        last = name in layer.tokens_last
        view = tensor.transpose(2, 3) if last else tensor
        if tuple(view.shape[1:]) != (spec.heads, layer.block_size, spec.width) or tensor.dtype is not self.dtype:
            raise KVTransferError(f"{name} of layer {number}, {tuple(tensor.shape)} of {tensor.dtype}, is not what its "
                                  f"spec says: {spec.heads} heads of {spec.width} in blocks of {layer.block_size}")
        if not tensor.is_contiguous():
            raise KVTransferError(f"{name} of layer {number} does not lie in one piece")
        self._tensors[number, name] = view
        self.raw.append(tensor)
        total, first = (spec.heads, 0) if heads is None else heads(number, name)
        return PartLayout(name, total, spec.width, first, spec.heads, last)

    def bytes_of(self, region: int) -> memoryview:
        """A tensor as the bytes that it is, by its number in the description; not for a GPU's."""
        if region not in self._bytes:
            raw = self.raw[region]
            if self._staged:
                raise KVTransferError("the host cannot write into these blocks")
            self._bytes[region] = memoryview(raw.view(torch.uint8).reshape(-1).numpy().data)
        return self._bytes[region]

    # ---- the wire form

    def gather(self, tables: Tables, span: Span, pieces: Sequence[Piece], out: memoryview) -> int:
        """The wire form of a span, written to the beginning of `out`; how many bytes."""
        nbytes = span.nbytes(pieces, self.layout.element_size)
        host = wire_tensor(out, nbytes, self.dtype)
        if not self._staged:
            self._copy(tables, span, pieces, host, out=True)
            return nbytes
        with self._staging, torch.inference_mode():
            wire = torch.empty(host.shape, dtype=self.dtype, device=self.device)
            pinned = self._pinned_bytes(nbytes).view(self.dtype)
            with torch.cuda.stream(self._stream):
                self._copy(tables, span, pieces, wire, out=True)
                pinned.copy_(wire, non_blocking=True)
            self._wait()
            host.copy_(pinned)
        return nbytes

    def scatter(self, tables: Tables, span: Span, pieces: Sequence[Piece], data: memoryview,
                dtype: str | None = None, scale: float = 1.0) -> None:
        """Put a span that came in the wire form into its blocks; nothing else of them is touched.

        `dtype` and `scale` are those of the sender's cache; other ones than here are converted.
        """
        name = dtype or self.layout.dtype
        theirs: torch.dtype = getattr(torch, name)
        expected = span.nbytes(pieces, theirs.itemsize)
        if len(data) != expected:
            raise KVTransferError(f"{len(data)} bytes of KV came where {expected} belong")
        wire = wire_tensor(data, expected, theirs)
        if not self._staged:
            self._copy(tables, span, pieces, self._rescaled(wire, scale), out=False)
            return
        with self._staging, torch.inference_mode(), torch.cuda.stream(self._stream):
            pinned = self._pinned_bytes(expected).view(theirs)
            there = pinned.copy_(wire).to(self.device, non_blocking=True, copy=True)
            self._copy(tables, span, pieces, self._rescaled(there, scale), out=False)
            self._wait()

    def _rescaled(self, wire: Tensor, scale: float) -> Tensor:
        """Numbers stored with another scale, as this cache stores them."""
        return wire if scale == self.layout.scale else wire.to(torch.float32) * (scale / self.layout.scale)

    def _runs(self, tables: Tables, span: Span, pieces: Sequence[Piece]) -> dict[int, list[TokenRun]]:
        """By cache group: where the span's tokens lie."""
        runs = {}
        for group in {piece.group for piece in pieces}:
            runs[group] = token_runs(tables[group], *span.of_group(group), self.layout.block_size)
            if any(run.block + run.count > self.layout.num_blocks for run in runs[group]):
                raise KVTransferError("a block table names blocks that the cache does not have")
        return runs

    def _copy(self, tables: Tables, span: Span, pieces: Sequence[Piece], wire: Tensor, out: bool) -> None:
        """Between blocks and the wire form; on a CPU our kernel does it, other devices and conversions are torch's."""
        runs = self._runs(tables, span, pieces)
        if self._kernels is not None and wire.dtype is self.dtype:
            self._copy_by_kernel(self._kernels, runs, span, pieces, wire, out)
        else:
            self._copy_by_torch(runs, span, pieces, wire, out)

    def _copy_by_kernel(self, kernels: CDLL, runs: dict[int, list[TokenRun]], span: Span, pieces: Sequence[Piece],
                        wire: Tensor, out: bool) -> None:
        size, at = self.layout.element_size, wire.data_ptr()
        first_run: dict[int, int] = {}
        rows: list[tuple[int, ...]] = []
        for group, found in runs.items():
            first_run[group] = len(rows)
            rows += [(run.block, run.count, run.offset, run.length, run.at) for run in found]
        described = []
        for piece in pieces:
            start, end = span.of_group(piece.group)
            held, tensor = self._held(piece)
            strides = [stride * size for stride in tensor.stride()]
            described.append((tensor.data_ptr() + held.start * strides[1], *strides, piece.num_heads, piece.width, at,
                              first_run[piece.group], len(runs[piece.group])))
            at += piece.nbytes(end - start, size)
        if rows:
            table, lines = np.array(described, np.int64), np.array(rows, np.int64)
            kernels.quire_kv_wire(table.ctypes.data, len(described), lines.ctypes.data, size, out)

    def _copy_by_torch(self, runs: dict[int, list[TokenRun]], span: Span, pieces: Sequence[Piece], wire: Tensor,
                       out: bool) -> None:
        blocks: list[Tensor] = []
        wires: list[Tensor] = []
        at = 0
        for piece in pieces:
            start, end = span.of_group(piece.group)
            held, tensor = self._held(piece)
            total = (end - start) * piece.num_heads * piece.width
            part = wire[at : at + total].view(end - start, piece.num_heads, piece.width)
            at += total
            for run in runs[piece.group]:
                there = tensor[run.block : run.block + run.count, held, run.offset : run.offset + run.length]
                here = part[run.at : run.at + run.count * run.length]
                blocks.append(there.transpose(1, 2))
                wires.append(here.view(run.count, run.length, piece.num_heads, piece.width))
        if not blocks:
            return
        if out:
            torch._foreach_copy_(wires, blocks, non_blocking=True)
        else:
            torch._foreach_copy_(blocks, wires, non_blocking=True)

    def _pinned_bytes(self, nbytes: int) -> Tensor:
        """Memory that a device reads and writes at full speed; the same for every call, so they come one by one."""
        if self._pinned is None or self._pinned.numel() < nbytes:
            self._pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.device.type == "cuda")
        return self._pinned[:nbytes]

    def _held(self, piece: Piece) -> tuple[slice, Tensor]:
        tensor = self._tensors.get((piece.layer, piece.part))
        if tensor is None:
            raise KVTransferError(f"{piece.part} of layer {piece.layer} is not on this rank")
        first = piece.first_head - self._first_head[piece.layer, piece.part]
        if first < 0 or first + piece.num_heads > tensor.shape[1] or piece.width != tensor.shape[3]:
            raise KVTransferError(f"heads {piece.first_head} to {piece.first_head + piece.num_heads - 1} of "
                                  f"{piece.part} in layer {piece.layer} are not on this rank")
        return slice(first, first + piece.num_heads), tensor

    def _wait(self) -> None:
        if self._stream is not None:
            done = torch.cuda.Event(blocking=True)  # sleeps while it waits, so that no core spins
            done.record(self._stream)
            done.synchronize()


def wire_tensor(memory: memoryview, nbytes: int, dtype: torch.dtype) -> Tensor:
    """Elements over the first `nbytes` of a buffer."""
    if memory.nbytes < nbytes:
        raise KVTransferError(f"{nbytes} bytes of KV do not fit in {memory.nbytes}")
    if nbytes == 0:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).view(dtype)
