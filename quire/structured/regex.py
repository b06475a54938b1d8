"""Reads a regular expression closely enough to refuse, by name, what the grammar compiler would not enforce.

The dialect is what JavaScript, Python and RE2 agree on. Where they do not, the pattern is rewritten so that all
of them find a match: `\\d`, `\\w` and `\\s` are those of ASCII, and their opposites leave out what is a digit, a
letter or a space anywhere; `.` does not match any line's end.
"""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import Final

MAX_GROUP_DEPTH: Final = 100
_CLASSES: Final = "dDwWsS"
_CONTROLS: Final = "tnrfv0"
_PUNCTUATION: Final = set("^$\\.*+?()[]{}|/-_@!#%&~`'\",:;<>= ")
_REPEAT: Final = re.compile(r"\{[0-9]{1,6}(,[0-9]{0,6})?\}")
_HEX: Final = {"x": 2, "u": 4}
NOT_NEWLINE: Final = r"[^\n\r\u2028\u2029]"
_SPACES: Final = r"\x1c-\x1f\x85\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000\ufeff"


@cache
def _beyond(kind: str) -> str:
    """What other dialects count to the class besides ASCII, for a place inside of brackets."""
    if kind == "s":
        return _SPACES
    if kind == "w":
        return "\x80-\U0010ffff"
    tens = [code for code in range(0x80, 0x110000) if unicodedata.decimal(chr(code), None) == 0]
    return "".join(f"{chr(code)}-{chr(code + 9)}" for code in tens)


class _Refused(Exception):
    """Why a regular expression cannot be used."""


def check_regex(pattern: str, in_json: bool = False) -> str | None:
    """What is wrong with it, or None. `in_json`: it describes the inside of a JSON string."""
    try:
        _Reader(pattern, in_json).read()
    except _Refused as refused:
        return str(refused)
    return None


def portable_regex(pattern: str, in_json: bool = False) -> str:
    """The same for every dialect, of a pattern that `check_regex` accepts.

    In ASCII: with other characters in a pattern the compiler forgets that it is about the inside of a JSON string.
    """
    found = _Reader(pattern, in_json).read()
    return "".join(char if char < "\x80" else f"\\u{{{ord(char):x}}}" for char in found)


class _Reader:
    """One pass over a pattern; collects the rewritten one."""

    def __init__(self, pattern: str, in_json: bool) -> None:
        self._pattern = pattern
        self._in_json = in_json
        self._at = 0
        self._depth = 0
        self._out: list[str] = []

    def read(self) -> str:
        pattern = self._pattern
        while self._at < len(pattern):
            char = pattern[self._at]
            if char == "\\":
                escape = self._escape()
                if escape in ("\\D", "\\W", "\\S"):
                    kind = escape[1].lower()
                    escape = f"[^\\{kind}{_beyond(kind)}]"
                self._out.append(escape)
            elif char == "[":
                self._class()
            elif char == "(":
                self._open_group()
            elif char in "^$":
                self._anchor(char)
            else:
                self._plain(char)
        if self._depth:
            raise _Refused("has a '(' that is never closed")
        return "".join(self._out)

    def _plain(self, char: str) -> None:
        self._literal(char)
        if char == ")":
            self._depth -= 1
            if self._depth < 0:
                raise _Refused(f"has a ')' at character {self._at} that closes nothing")
        if char == "{" and not _REPEAT.match(self._pattern, self._at):
            raise _Refused(f"has a '{{' at character {self._at} that is no repetition like {{2}}, {{2,}} or {{2,5}}: "
                           "write \\{ for the character")
        self._out.append(NOT_NEWLINE if char == "." else char)
        self._at += 1

    def _literal(self, char: str) -> None:
        """Inside a JSON string these are written as escapes, which a pattern over the text does not know."""
        if self._in_json and (char in '"\\' or ord(char) < 0x20):
            raise _Refused(f"holds the character {char!r}, which a JSON string can only hold escaped; patterns "
                           "over escaped characters are not supported")

    def _anchor(self, char: str) -> None:
        """At the ends of an alternative it says nothing new, since all of the output is matched; it is left out."""
        before, after = self._pattern[self._at - 1 : self._at], self._pattern[self._at + 1 : self._at + 2]
        outermost = self._depth == 0 and (before in ("", "|", "^") if char == "^" else after in ("", "|", "$"))
        if not outermost:
            raise _Refused(f"has {char!r} at character {self._at}: anchors are supported only at the two ends of a "
                           "whole alternative (all of the output is matched in any case)")
        self._at += 1

    def _open_group(self) -> None:
        self._depth += 1
        if self._depth > MAX_GROUP_DEPTH:
            raise _Refused(f"nests groups deeper than {MAX_GROUP_DEPTH}")
        rest = self._pattern[self._at : self._at + 4]
        for mark, name in (("(?=", "lookahead"), ("(?!", "lookahead"), ("(?<=", "lookbehind"), ("(?<!", "lookbehind"),
                           ("(?P=", "a backreference"), ("(?P<", "named groups"), ("(?<", "named groups"),
                           ("(?>", "atomic groups"), ("(?#", "comments")):
            if rest.startswith(mark):
                raise _Refused(f"uses {name} ({mark}…) at character {self._at}, which is not supported")
        if rest.startswith("(?") and not rest.startswith("(?:"):
            raise _Refused(f"uses flags ({rest[:3]}…) at character {self._at}, which are not supported")
        length = 3 if rest.startswith("(?:") else 1
        self._out.append(rest[:length])
        self._at += length

    def _class(self) -> None:
        """A character class, taken over as it is once all of it is known to be understood."""
        start = self._at
        self._at += 1
        negated = self._pattern[self._at : self._at + 1] == "^"
        self._at += negated
        beyond = ""
        while True:
            char = self._pattern[self._at : self._at + 1]
            if not char:
                raise _Refused(f"has a '[' at character {start} that is never closed")
            if char == "]":
                self._at += 1
                break
            if self._pattern.startswith(("[:", "[.", "[="), self._at):
                raise _Refused(f"uses a POSIX class at character {self._at}, which is not supported: spell it out")
            if char == "\\":
                escape = self._escape(may_hold_quotes=negated)
                if escape in ("\\D", "\\W", "\\S"):
                    raise _Refused(f"has {escape} inside of brackets at character {start}, which is not supported: "
                                   "use it outside, or spell it out")
                if negated and escape in ("\\d", "\\w", "\\s"):
                    beyond += _beyond(escape[1])
            else:
                if not negated:
                    self._literal(char)
                self._at += 1
        self._out.append(self._pattern[start : self._at - 1] + beyond + "]")

    def _escape(self, may_hold_quotes: bool = False) -> str:
        start, char = self._at, self._pattern[self._at + 1 : self._at + 2]
        self._at += 2
        if not char:
            raise _Refused("ends in the middle of an escape")
        if char in _HEX:
            digits = self._pattern[self._at : self._at + _HEX[char]]
            if len(digits) < _HEX[char] or not all(digit in "0123456789abcdefABCDEF" for digit in digits):
                raise _Refused(f"has \\{char} at character {start} without {_HEX[char]} hexadecimal digits")
            self._at += _HEX[char]
            value = chr(int(digits, 16))
        elif char in _CONTROLS and not (char == "0" and self._pattern[self._at : self._at + 1].isdigit()):
            value = {"t": "\t", "n": "\n", "r": "\r", "f": "\f", "v": "\v", "0": "\0"}[char]
        elif char in _CLASSES:
            value = "a"
        elif char in _PUNCTUATION:
            value = char
        elif char in "bB":
            raise _Refused(f"uses \\{char} at character {start}, which is not supported")
        elif char.isdigit() or char == "k":
            raise _Refused(f"uses a backreference (\\{char}) at character {start}, which is not supported")
        elif char in "pP":
            raise _Refused(f"uses a Unicode property (\\{char}) at character {start}, which is not supported")
        else:
            raise _Refused(f"has the escape \\{char} at character {start}, which is not supported")
        if not may_hold_quotes:
            self._literal(value)
        return self._pattern[start : self._at]
