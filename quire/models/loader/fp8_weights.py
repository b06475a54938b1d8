"""fp8 weights of a safetensors checkpoint (compressed-tensors, ModelOpt, blocks): codes and scales make one weight.

| layout | codes | scales | of activations |
|---|---|---|---|
| blocks (Qwen3-FP8, DeepSeek) | weight [N, K] | weight_scale_inv [N/128, K/128] | none |
| compressed-tensors | weight | weight_scale: one number, [N, 1], or of blocks | input_scale, if static |
| ModelOpt | weight | weight_scale: one number | input_scale |

A weight is code * scale. What has no scales beside it is stored as floats, whatever the config leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor

from quire.errors import ModelLoadError
from quire.kernels.quantized import Fp8Weight, StoredWeight
from quire.kernels.unread import UnreadRows, rows_of
from quire.models.loader import safetensors
from quire.models.loader.fp8_config import Fp8Scheme
from quire.models.loader.members import Axes, MemberCut, Members, read_members
from quire.models.spec import Shape
from quire.models.stored_parts import Ranges, StoredParts


def read(
    folder: Path, scheme: Fp8Scheme, parts: StoredParts | None, unread: bool = False
) -> Iterator[tuple[str, StoredWeight]]:
    """(name, weight) of a checkpoint, floats in the type they are stored in; with `parts` those parts of them.
    `unread`: large ones are left in their files."""
    known = ("weight", scheme.scale, "input_scale")
    found: dict[str, set[str]] = {}
    for name in safetensors.tensor_names(folder):
        module, _, member = name.rpartition(".")
        if member in known:
            found.setdefault(module, set()).add(member)
    members = {module: frozenset(held) for module, held in found.items() if {"weight", scheme.scale} <= held}

    def make(module: str, have: Members, cut: MemberCut | None) -> StoredWeight:
        return _Reader(module, have, scheme).weight()

    def cut_of(module: str, shapes: Mapping[str, Shape], shape: Shape, wanted: Ranges) -> MemberCut | None:
        axes: dict[str, Axes] = {"weight": ((0, 1), (1, 1))}
        block, scales = scheme.block or shape[1], shapes[scheme.scale]
        if scheme.block is not None:
            axes[scheme.scale] = ((0, block), (1, block))
        elif math.prod(scales) != 1:
            axes[scheme.scale] = ((0, 1), (1, block))[: len(scales)]
        return MemberCut(shape, wanted, axes, block)

    return read_members(folder, members, make, cut_of, parts, fp8=True, unread=unread)


class _Reader:
    """Makes one weight of its members; a shape that cannot be is refused with the tensor's name."""

    def __init__(self, module: str, members: Members, scheme: Fp8Scheme) -> None:
        self._module = module
        self._members = members
        self._scheme = scheme

    def weight(self) -> StoredWeight:
        codes = self._members["weight"]
        if codes.dim() != 2 or rows_of(codes, 0, 0).dtype is not torch.float8_e4m3fn:
            self._refuse("weight", "fp8 (e4m3) of two dimensions")
        rows, columns = codes.shape
        block, scales, input_scale = self._scheme.block or columns, self._scales(rows, columns), self._input_scale()

        def some(start: int, stop: int) -> Fp8Weight:
            return Fp8Weight(rows_of(codes, start, stop), scales[start:stop], block, input_scale)

        return some(0, rows) if isinstance(codes, Tensor) else UnreadRows(0, (rows, columns), some, coded=True)

    def _scales(self, rows: int, columns: int) -> Tensor:
        """float32 [rows, 1], or [rows, columns / block]."""
        name, block = self._scheme.scale, self._scheme.block
        scales = self._tensor(name)
        if not scales.is_floating_point() or scales.dtype.itemsize < 2:
            self._refuse(name, "floats")
        scales = scales.to(torch.float32)
        if block is not None:
            if tuple(scales.shape) != (-(-rows // block), -(-columns // block)):
                self._refuse(name, f"a weight of {rows} x {columns} in blocks of {block} x {block}")
            return scales.repeat_interleave(block, 0)[:rows].contiguous()
        if scales.numel() not in (1, rows):
            self._refuse(name, f"a weight of {rows} rows")
        return scales.reshape(-1, 1).expand(rows, 1).contiguous()

    def _input_scale(self) -> float | None:
        held = self._tensor("input_scale") if "input_scale" in self._members else None
        if not self._scheme.fixed_inputs:
            if held is not None:
                self._refuse("input_scale", "activations that find their own scales")
            return None
        if held is None:
            self._refuse("weight", "an input_scale beside it")
        if held.numel() != 1 or not held.is_floating_point():
            self._refuse("input_scale", "one number")
        return float(held)

    def _tensor(self, member: str) -> Tensor:
        """All of it."""
        held = self._members[member]
        return held if isinstance(held, Tensor) else held.dequantized()

    def _refuse(self, member: str, wanted: str) -> NoReturn:
        tensor = self._tensor(member)
        raise ModelLoadError(
            f"tensor {self._module + '.' + member!r} is {tensor.dtype} of shape {tuple(tensor.shape)}, which does not "
            f"go with {wanted}: quantization_config and the weights are not of the same model"
        )
