"""Shapes as pixels and pixels as a PNG file, so that a picture needs nothing that the engine does not need anyway."""

from __future__ import annotations

import struct
import zlib
from typing import Any

_FINER = 3
"""Pixels are averages of so many squared."""
_UNIT = 0.12
"""Of the size of a text: one step of the grid below, on which capitals are 6 high."""
_GAP, _SPACE = 1.7, 2.6
"""Between two letters, and the width of a space, in those steps."""
_STROKE, _BOLD_STROKE = 0.095, 0.15
_SPELLED = {"×": "x", "–": "-", "—": "-", "…": "...", "≤": "<=", "≥": ">=", "µ": "u", "·": ".", "→": "->", "’": "'"}

# A letter is a few strokes, a stroke is a row of points, a point is two digits: x, and y upwards with the line at 2.
_LETTERS = {
    "A": "022842 1434", "B": "02083847463505 3544433202", "C": "4738180703123243", "D": "02082846442202",
    "E": "48080242 0535", "F": "480802 0535", "G": "47381807031232434525", "H": "0802 4842 0545", "I": "0802",
    "J": "3833221203", "K": "0802 4804 1542", "L": "080242", "M": "0208254842", "N": "02084248",
    "O": "180703123243473818", "P": "02083847463505", "Q": "180703123243473818 2442", "R": "02083847463505 2542",
    "S": "473818070615354443321203", "T": "0848 2822", "U": "080312324348", "V": "082248", "W": "0812253248",
    "X": "0842 4802", "Y": "082548 2522", "Z": "08480242",
    "a": "3526160503122233 3632", "b": "0802 0516263533221203", "c": "3526160503122233",
    "d": "3832 3526160503122233", "e": "04343526160503122233", "f": "281712 0626", "g": "3631201001 3526160503122233",
    "h": "0802 0516263532", "i": "0602 0808", "j": "161100 1818", "k": "0802 3604 1532", "l": "0802",
    "m": "0602 05162522 25364542", "n": "0602 0516263532", "o": "160503122233352616", "p": "0600 0516263533221203",
    "q": "3630 3526160503122233", "r": "0602 051626", "s": "35261605142433221203", "t": "181322 0626",
    "u": "0603122233 3632", "v": "062246", "w": "0612253246", "x": "0632 3602", "y": "0622 4610", "z": "06360232",
    "0": "180703122233372818", "1": "071812 0222", "2": "07182837360232", "3": "071828373625 15253433221203",
    "4": "22280434", "5": "380805253433221203", "6": "2818060312223334251504", "7": "083812",
    "8": "180706152536372818 1504031222333425", "9": "1222343728180706152536",
    ".": "0202", ",": "0201", ":": "0202 0505", ";": "0505 0201", "!": "0804 0202", "?": "07182837361514 1212",
    "-": "0525", "_": "0141", "+": "0545 2327", "=": "0444 0646", "*": "1436 3416 0545", "/": "0248", "\\": "0842",
    "(": "18070312", ")": "08171302", "[": "18080212", "]": "08181202", "{": "28171605141322", "}": "08171625141302",
    "<": "370533", ">": "073503", "|": "0801", "%": "0248 0818170708 3343423233", "&": "42071728361403122244",
    "#": "1218 3238 0444 0646", "$": "473818070615354443321203 2921", "@": "43321203071838474434", "'": "0807",
    '"': "0807 1817", "`": "0817", "^": "062846", "~": "04152435",
}
_UNKNOWN = "0208383202"


def _strokes(letter: str) -> list[list[tuple[int, int]]]:
    return [[(int(stroke[i]), int(stroke[i + 1]) - 2) for i in range(0, len(stroke), 2)]
            for stroke in _LETTERS.get(letter, _UNKNOWN).split()]


def _advance(letter: str) -> float:
    if letter == " ":
        return _SPACE
    return max(x for stroke in _strokes(letter) for x, _ in stroke) + _GAP


def _rgb(color: str) -> tuple[int, int, int]:
    """Of "#rrggbb"."""
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:7], 16)


class Raster:
    """A white sheet of width times height pixels, y downwards."""

    def __init__(self, width: float, height: float) -> None:
        import numpy as np

        self._np: Any = np
        self.width, self.height = round(width), round(height)
        self._sheet = np.full((self.height * _FINER, self.width * _FINER, 3), 255, dtype=np.uint8)

    def rect(self, x: float, y: float, width: float, height: float, color: str) -> None:
        left, right = (max(0, round(_FINER * edge)) for edge in (x, x + width))
        top, bottom = (max(0, round(_FINER * edge)) for edge in (y, y + height))
        self._sheet[top:bottom, left:right] = _rgb(color)

    def line(self, x1: float, y1: float, x2: float, y2: float, color: str, width: float = 1.0) -> None:
        """With round ends; a line without length is a dot."""
        np = self._np
        reach = _FINER * width / 2
        ax, ay, bx, by = (_FINER * value for value in (x1, y1, x2, y2))
        left, right = max(0, int(min(ax, bx) - reach)), int(max(ax, bx) + reach) + 2
        top, bottom = max(0, int(min(ay, by) - reach)), int(max(ay, by) + reach) + 2
        sheet = self._sheet[top:bottom, left:right]
        x = left + np.arange(sheet.shape[1])[None, :] + 0.5 - ax
        y = top + np.arange(sheet.shape[0])[:, None] + 0.5 - ay
        dx, dy = bx - ax, by - ay
        along = np.clip((x * dx + y * dy) / max(dx * dx + dy * dy, 1e-9), 0.0, 1.0)
        sheet[(x - along * dx) ** 2 + (y - along * dy) ** 2 <= reach * reach] = _rgb(color)

    def text(self, x: float, y: float, words: str, size: float, color: str, anchor: str, bold: bool) -> None:
        words = "".join(_SPELLED.get(letter, letter) for letter in words)
        unit = _UNIT * size
        whole = unit * (sum(map(_advance, words)) - _GAP)
        x -= {"start": 0.0, "middle": whole / 2, "end": whole}[anchor]
        stroke_width = size * (_BOLD_STROKE if bold else _STROKE)
        for letter in words:
            for stroke in _strokes(letter) if letter != " " else ():
                for (x1, y1), (x2, y2) in zip(stroke, stroke[1:] or stroke, strict=False):
                    self.line(x + unit * x1, y - unit * y1, x + unit * x2, y - unit * y2, color, stroke_width)
            x += unit * _advance(letter)

    def png(self) -> bytes:
        shape = (self.height, _FINER, self.width, _FINER, 3)
        pixels = self._sheet.reshape(shape).mean((1, 3)).round().astype("uint8")
        rows = b"".join(b"\0" + row.tobytes() for row in pixels)
        header = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 9)), (b"IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in parts)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
