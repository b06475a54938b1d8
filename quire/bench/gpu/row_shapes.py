"""Which sizes the tuner tries for the kernel of one row (`quire.kernels.triton.codes_row`) on a weight.

All programs run at once, one to three on a multiprocessor, each with as many registers as that leaves, so that the
memory has work from the first to the last. Every such size also comes with a part of the weight that goes to the L2
cache while registers are full.
"""

from __future__ import annotations

from dataclasses import replace
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


def row_shapes(weight: Any, gated: bool) -> list[Any]:
    """`weight`: packed codes, or a tensor of fp8."""
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
    return [
        shape for shape in found if -(-outputs // (shape.features * shape.steps)) >= LEAST_PROGRAMS
        and shape.steps * turns(weight, shape) * (2 if gated else 1) <= _MOST_TURNS
        and (fits_bytes(weight, weight[:, 0], shape, gated) if is_bytes else fits(weight, shape, gated))
    ]  # fmt: skip


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
