"""What a weight takes on a GPU, by what it is made of at load or stored as: the same rules as `ops/device_formats.py`
and `ops/device_experts.py`, without torch. Rows that fill up the last tile of 4-bit codes are not counted."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.models.loader.stored_forms import StoredForm
    from quire.models.shard import Cut

MADE = ("none", "fp8", "int8", "int4")
"""By `quantization`: what becomes of weights that the file stores as floats."""
_UNIT, _HALF_UNIT = 32, 16
_INT4_GROUP = 128
_PLANE_COLUMNS = {4: 64, 5: 256, 6: 256, 8: 32}
"""Of a block of an expert's codes; the columns of a dense weight of 5, 6 or 8 bits come in 256."""


def made_bytes(made: str, rows: int, columns: int) -> int:
    """Of a dense weight; one whose size a kernel has no form for stays in 16 bits."""
    whole = rows % _HALF_UNIT == 0 and columns % _HALF_UNIT == 0
    if (made == "fp8" and whole) or (made == "int8" and whole and columns % _UNIT == 0):
        return rows * (columns + 4)
    if made == "int4" and columns % _INT4_GROUP == 0:
        return rows * columns // 2 + 4 * rows * (columns // _INT4_GROUP)
    return 2 * rows * columns


def made_expert_bytes(made: str, rows: int, columns: int) -> int:
    group = math.gcd(_INT4_GROUP, columns)
    if made == "none" or (made == "int4" and group % _UNIT) or (made == "int8" and columns % _UNIT):
        return 2 * rows * columns
    if made == "int4":
        return rows * (_filled(columns, 4) // 2 + 4 * columns // group)
    return rows * (_filled(columns, 8) + 4)


def part_form(form: StoredForm, cut: Cut | None, width: int) -> StoredForm | None:
    """Of a rank's part of a dense weight of so many columns; None: floats are made of it."""
    if cut is None or cut.dim == 0:
        return form
    if form.ordered:
        return None
    if form.kind != "fp8" or form.group is None:
        return form
    group = math.gcd(form.group, *(edge for edge in (cut.start, cut.stop) if edge != width))
    if group == form.group:
        return form
    return replace(form, group=None) if cut.stop - cut.start <= group else None


def stored_bytes(form: StoredForm, rows: int, columns: int) -> int:
    """Of a dense weight, or a rank's part of one, in the file's own bits."""
    group = _cut_group(form, columns)
    if form.kind == "fp8":
        scales = 1 if form.group is None else -(-columns // form.group)
        return rows * (columns + 4 * scales) if not (rows % _HALF_UNIT or columns % _HALF_UNIT) else 2 * rows * columns
    if form.kind == "mxfp4" or group is None:
        return 2 * rows * columns
    if form.int8_rows and form.group is None and not form.offsets and rows % _HALF_UNIT == 0:
        return rows * (columns + 4)
    if form.bits == 4:
        fits = columns % 64 == 0 and (group == _UNIT or group % 64 == 0)
        return rows * columns // 2 + 4 * rows * (columns // group) if fits else 2 * rows * columns
    codes = rows * -(-columns // 256) * 256 * form.bits // 8
    return codes + (4 if form.offsets else 2) * rows * (columns // group)


def stored_expert_bytes(form: StoredForm, rows: int, columns: int) -> int:
    group = _cut_group(form, columns)
    if form.kind == "fp8":
        return rows * (_filled(columns, 8) + 4 * (1 if form.group is None else -(-columns // form.group)))
    if group is None:
        return 2 * rows * columns
    if form.kind == "mxfp4":
        return rows * (_filled(columns, 4) // 2 + columns // group)
    scale = 4 if group == columns and form.bits == 8 else 2
    return rows * (_filled(columns, form.bits) * form.bits // 8 + (2 if form.offsets else 1) * scale * columns // group)


def _filled(columns: int, bits: int) -> int:
    return -(-columns // _PLANE_COLUMNS[bits]) * _PLANE_COLUMNS[bits]


def _cut_group(form: StoredForm, columns: int) -> int | None:
    """Columns that share a scale, in smaller groups where a rank's part cuts one; None: floats are made of it."""
    group = columns if form.group is None else form.group
    if columns % group:
        group = _UNIT
    usable = group % _UNIT == 0 or group == _HALF_UNIT
    return group if usable and columns % group == 0 else None
