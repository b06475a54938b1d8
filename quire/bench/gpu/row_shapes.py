"""Which sizes the tuner tries for the kernel of one row (`quire.kernels.triton.codes_row`) on a weight.

All programs run at once, one to three on a multiprocessor, each with as many registers as that leaves, so that the
memory has work from the first to the last. Every such size also comes with a part of the weight that goes to the L2
cache while registers are full. Of a wide weight without a norm programs also share the columns of a tile: then tiles
can be of more features, so the row becomes digits fewer times, and multiprocessors have more equal shares.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

LEAST_PROGRAMS = 120
"""Fewer leave multiprocessors idle."""
_MULTIPROCESSORS = 132
_UNIT, _WARPS = 16, 8
_HELD = {True: 16, False: 12}
"""Registers of a thread for a turn of 16 features: of fp8, and of 4-bit codes with their scales."""
_ROOM = {2: 96, 3: 48}
"""Registers for weights where so many programs have room on a multiprocessor: 128 and 80 less what else is needed."""
_FETCHED = 16 << 20
"""Bytes of all programs in the L2 cache."""
_MOST_TURNS = 50
"""Of a program, of both halves: each is compiled by itself."""
_TRIED = {False: ((16, 8, 1, 4, 0), (32, 8, 1, 2, 2), (16, 8, 3, 3, 2), (32, 16, 1, 2, 0)), True: ((16, 8, 1, 2, 2),)}
"""Other sizes: those that won for 4-bit codes on some weight, and many programs of fp8."""
_WIDE = 8192
"""Columns from which on tiles are shared by programs."""
_ELSE = 44
"""Registers of a thread of such a program for other than weights."""
_LEAST_BALANCE = 0.85
_DIGITS_COST = 0.7
"""Instructions for the digits of a run of columns, over those for its products with 16 features."""
_LEAST_WARPS = 16
"""Of a multiprocessor, which has four that can have an instruction at a time."""
_MOST_SHARED = 5


def row_shapes(weight: Any, gated: bool, plain: bool = False) -> list[Any]:
    """`weight`: packed codes, or a tensor of fp8. `plain`: neither norm nor gate."""
    from quire.kernels.triton.codes_row import CodesRowShape, fits, fits_bytes, turns

    is_bytes = not hasattr(weight, "words")
    outputs = (weight.shape[0] if is_bytes else weight.features) // (2 if gated else 1)
    found: list[CodesRowShape] = []
    for sizes in _TRIED[is_bytes][: 3 if gated else None]:
        _add(found, weight, CodesRowShape(*sizes), gated)
    for unit in (_UNIT, 2 * _UNIT):
        tiles, held = -(-outputs // unit), _HELD[is_bytes] * (unit // _UNIT) * (2 if gated else 1)
        for programs in (1, 2, 3):
            steps = -(-tiles // (_MULTIPROCESSORS * programs))
            room = max(programs, 2)  # the next kernel begins beside a single one
            ahead = _ROOM[room] // held - 1
            if ahead > 0 and -(-tiles // steps) > _MULTIPROCESSORS * (programs - 1):
                shape = CodesRowShape(unit, _WARPS, steps, ahead, room)
                _add(found, weight, shape, gated)
                _add(found, weight, replace(shape, fetched=_fetched(weight, shape, gated)), gated)
    shared = _shared_shapes(weight) if plain and not is_bytes and weight.width >= _WIDE else []
    return shared + [
        shape for shape in found if -(-outputs // (shape.features * shape.steps)) >= LEAST_PROGRAMS
        and shape.steps * turns(weight, shape) * (2 if gated else 1) <= _MOST_TURNS
        and (fits_bytes(weight, weight[:, 0], shape, gated) if is_bytes else fits(weight, shape, gated))
    ]  # fmt: skip


def _shared_shapes(weight: Any) -> list[Any]:
    """For codes. All programs run at once, all multiprocessors have about as much to do, and weights stay in
    registers. Those of the fewest instructions on the busiest multiprocessor."""
    from quire.kernels.triton.codes_row import CodesRowShape, most_registers, turns

    found = []
    for unit, warps, programs in product((_UNIT, 2 * _UNIT, 4 * _UNIT), (_WARPS // 2, _WARPS), range(2, 9)):
        tiles, places = -(-weight.features // unit), _MULTIPROCESSORS * programs
        held = _HELD[False] * (unit // _UNIT)
        ahead = ((most_registers(programs, warps) or 0) - _ELSE) // held
        shape = CodesRowShape(unit, warps, 1, ahead, programs, 0, places // tiles)
        if ahead < 1 or shape.parts < 2 or programs * warps < _LEAST_WARPS:
            continue
        every = turns(weight, replace(shape, parts=1))
        balance = tiles * shape.parts / places * every / (shape.parts * turns(weight, shape))
        if shape.parts <= every and balance >= _LEAST_BALANCE:
            shape = replace(shape, ahead=min(ahead, turns(weight, shape)))
            found.append((balance / (1 + _DIGITS_COST * _UNIT / unit), shape))
    return [shape for _, shape in sorted(found, key=lambda each: -each[0])[:_MOST_SHARED]]


def _add(found: list[Any], weight: Any, shape: Any, gated: bool) -> None:
    """Less what it would load that there is not: that would be the same kernel."""
    from quire.kernels.triton.codes_row import turns

    units = shape.steps * turns(weight, shape)
    ahead = min(shape.ahead, units)
    shape = replace(shape, ahead=ahead, fetched=min(shape.fetched, units - ahead))
    if shape not in found:
        found.append(shape)


def _fetched(weight: Any, shape: Any, gated: bool) -> int:
    """Turns of all programs that are so many bytes."""
    from quire.kernels.triton.codes_row import run_of

    is_bytes = not hasattr(weight, "words")
    outputs = (weight.shape[0] if is_bytes else weight.features) // shape.steps
    return _FETCHED // (outputs * shape.warps * run_of(weight) // (1 if is_bytes else 2))
