"""Copies inside a CPU's KV cache: whole blocks of forked sequences, slots of an accepted branch of a draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from quire.errors import EngineError
from quire.kernels.types import LayerCache
from quire.ops.cpu_step import I64, dense


def copy_blocks(library: Any, layer: LayerCache, src: Sequence[int], dst: Sequence[int]) -> None:
    """Block src[i] -> dst[i] for every i, each read before any is written."""
    blocks = layer.num_blocks
    if len(src) != len(dst) or any(not 0 <= block < blocks for block in (*src, *dst)):
        raise EngineError(f"block copies {list(src)} -> {list(dst)} do not pair 0..{blocks - 1}")
    if not set(src).isdisjoint(dst):
        for part in layer.tensors.values():
            part[list(dst)] = part[list(src)]
        return
    sources, targets = torch.tensor(src, dtype=I64), torch.tensor(dst, dtype=I64)
    for part in layer.tensors.values():
        library.quire_copy_blocks(
            part.data_ptr(), sources.data_ptr(), targets.data_ptr(), len(src), part[0].numel()
        )


def copy_slots(library: Any, layer: LayerCache, src: Tensor, dst: Tensor) -> None:
    slots = layer.num_blocks * layer.block_size
    for part in (src, dst):
        if part.dtype is not I64 or part.shape != src.shape or not dense(part) or (
                library.quire_check_ids(part.data_ptr(), part.numel(), slots)):
            raise EngineError(f"slots to copy must pair int64 numbers in 0..{slots - 1}")
    for name, part in layer.tensors.items():
        last = name in layer.tokens_last
        library.quire_copy_slots(
            part.data_ptr(), src.data_ptr(), dst.data_ptr(), src.numel(), part.shape[1],
            part.shape[2 if last else 3], layer.block_size, last,
        )  # fmt: skip
