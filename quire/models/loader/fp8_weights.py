"""fp8 weights of a safetensors checkpoint (compressed-tensors, ModelOpt, blocks): codes and scales make one weight.

| layout | codes | scales | of activations |
|---|---|---|---|
| blocks (Qwen3-FP8, DeepSeek) | weight [N, K] | weight_scale_inv [N/128, K/128] | none |
| compressed-tensors | weight | weight_scale: one number, [N, 1], or of blocks | input_scale, if static |
| ModelOpt | weight | weight_scale: one number | input_scale |
| transformers, without blocks | weight | weight_scale_inv: one number | activation_scale, if static |

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
from quire.kernels.quantized import Fp8Weight, StoredWeight, are_scales
from quire.kernels.unread import UnreadRows, rows_of
from quire.models.loader import safetensors
from quire.models.loader.fp8_config import Fp8Scheme, ScaleNames
from quire.models.loader.members import Axes, MemberCut, Members, read_members
from quire.models.spec import Shape
from quire.models.stored_parts import Ranges, StoredParts


def read(
    folder: Path, scheme: Fp8Scheme, parts: StoredParts | None, unread: bool = False
) -> Iterator[tuple[str, StoredWeight]]:
    """(name, weight) of a checkpoint, floats in the type they are stored in; with `parts` those parts of them.
    `unread`: large ones are left in their files."""
    found: dict[str, set[str]] = {}
    for name in safetensors.tensor_names(folder):
        module, _, member = name.rpartition(".")
        found.setdefault(module, set()).add(member)
    named = {module: names for module, held in found.items() if (names := scheme.scales_of(held)) is not None}
    members = {module: frozenset(found[module] & {"weight", names.weight, names.inputs})
               for module, names in named.items()}

    def make(module: str, have: Members, cut: MemberCut | None) -> StoredWeight:
        return _Reader(module, have, scheme, named[module]).weight()

    def cut_of(module: str, shapes: Mapping[str, Shape], shape: Shape, wanted: Ranges) -> MemberCut | None:
        axes: dict[str, Axes] = {"weight": ((0, 1), (1, 1))}
        name, block = named[module].weight, scheme.block or shape[1]
        if scheme.block is not None:
            axes[name] = ((0, block), (1, block))
        elif math.prod(shapes[name]) != 1:
            axes[name] = ((0, 1), (1, block))[: len(shapes[name])]
        return MemberCut(shape, wanted, axes, block)

    return read_members(folder, members, make, cut_of, parts, fp8=True, unread=unread)


class _Reader:
    """Makes one weight of its members; a shape that cannot be is refused with the tensor's name."""

    def __init__(self, module: str, members: Members, scheme: Fp8Scheme, names: ScaleNames) -> None:
        self._module = module
        self._members = members
        self._scheme = scheme
        self._names = names

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
        name, block = self._names.weight, self._scheme.block
        scales = self._numbers(name)
        if block is not None:
            if tuple(scales.shape) != (-(-rows // block), -(-columns // block)):
                self._refuse(name, f"a weight of {rows} x {columns} in blocks of {block} x {block}")
            return scales.repeat_interleave(block, 0)[:rows].contiguous()
        if scales.numel() not in (1, rows):
            self._refuse(name, f"a weight of {rows} rows")
        return scales.reshape(-1, 1).expand(rows, 1).contiguous()

    def _input_scale(self) -> float | None:
        name = self._names.inputs
        if not self._scheme.fixed_inputs:
            if name in self._members:
                self._refuse(name, "activations that find their own scales")
            return None
        if name not in self._members:
            self._refuse("weight", f"scales of its activations, {name}, beside it")
        scale = self._numbers(name)
        if scale.numel() != 1:
            self._refuse(name, "one number")
        return float(scale)

    def _numbers(self, member: str) -> Tensor:
        """Scales, of weights or of activations, in float32."""
        scales = self._tensor(member)
        if not scales.is_floating_point():
            self._refuse(member, "floats")
        if scales.dtype.itemsize < 2:
            raise ModelLoadError(f"tensor {self._module + '.' + member!r}: scales of type {scales.dtype} are not "
                                 "supported; known: float32, bfloat16, float16")  # fmt: skip
        scales = scales.to(torch.float32)
        if not are_scales(scales):
            raise ModelLoadError(f"tensor {self._module + '.' + member!r} has a scale that is zero, negative, infinite "
                                 "or no number")  # fmt: skip
        return scales

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
