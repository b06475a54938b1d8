"""Runs short pieces of PTX of 32-bit words on tensors, so that what kernels have of it is tested without a GPU."""

from __future__ import annotations

import re

import torch
from torch import Tensor

_WHOLE = (1 << 32) - 1


def _lop3(a: Tensor, b: Tensor, c: Tensor, table: Tensor) -> Tensor:
    """Bit by bit: the bit of the table at the place that the bits of a, b and c make."""
    found = torch.zeros_like(a | b | c)
    for place in range(8):
        bits = [each if place >> shift & 1 else ~each & _WHOLE for each, shift in ((a, 2), (b, 1), (c, 0))]
        found |= bits[0] & bits[1] & bits[2] if int(table) >> place & 1 else torch.zeros_like(found)
    return found


def _prmt(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """Four bytes of the eight of a and b, by the selector's hexadecimal digits, the lowest byte by the lowest digit."""
    whole = a | b << 32
    picked = [int(selector) >> 4 * place & 7 for place in range(4)]
    found = torch.zeros_like(a)
    for place, byte in enumerate(picked):
        found |= (whole >> 8 * byte & 255) << 8 * place
    return found


def _max_of_halves(a: Tensor, b: Tensor) -> Tensor:
    """max.u16x2, the only one here."""
    return torch.maximum(a >> 16, b >> 16) << 16 | torch.maximum(a & 0xFFFF, b & 0xFFFF)


_OPERATIONS = {
    "mov": lambda a: a, "shl": lambda a, b: a << b & _WHOLE, "xor": lambda a, b: a ^ b, "and": lambda a, b: a & b,
    "max": _max_of_halves, "lop3": _lop3, "prmt": _prmt,
}  # fmt: skip


def run(text: str, outputs: int, words: list[Tensor]) -> list[Tensor]:
    """The words that a piece of assembler makes of others: $0 and on are outputs, then inputs; int64 of 32 bits."""
    held = {f"${outputs + place}": word & _WHOLE for place, word in enumerate(words)}
    for line in re.sub(r"[{}]", "", text).split(";"):
        if not line.strip() or line.split()[0] == ".reg":
            continue
        name, _, rest = line.strip().partition(" ")
        target, *sources = [each.strip() for each in rest.split(",")]
        operands = [held[each] if each in held else torch.tensor(int(each, 0)) for each in sources]
        held[target] = _OPERATIONS[name.split(".")[0]](*operands)
    return [held[f"${place}"] for place in range(outputs)]
