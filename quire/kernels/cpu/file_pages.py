"""Lets go of pages of loaded libraries that nothing but their import has read.

Importing torch runs the initialisers of most of its code: 75 MB of it stay in the memory of the process, of which a CPU
engine touches a third again. The rest is in the file cache of the system anyway, and comes back from there when wanted.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

_DONTNEED = 4
_LEAST = 1 << 20


def forget_file_pages() -> None:
    """Drop them. What the process has changed of a file's pages (relocated addresses, say) is its own, and stays."""
    if sys.platform != "linux":
        return
    with contextlib.suppress(OSError):  # no /proc: a sandbox may hide it
        library = ctypes.CDLL(None, use_errno=True)
        for start, stop in unchanged(Path("/proc/self/smaps").read_text(encoding="utf-8", errors="replace")):
            library.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _DONTNEED)


def unchanged(smaps: str) -> Iterator[tuple[int, int]]:
    """Address ranges of read-only private mappings of files in which every page is still the file's."""
    place: tuple[int, int] | None = None
    for line in smaps.splitlines():
        word, _, rest = line.partition(" ")
        if not word.endswith(":"):
            rights, _, _, _, path = (*rest.split(maxsplit=4), "")[:5]
            low, _, high = word.partition("-")
            of_file = rights in ("r-xp", "r--p") and path.startswith("/")
            place = (int(low, 16), int(high, 16)) if of_file else None
        elif word == "Anonymous:" and place is not None:
            if rest.split()[0] == "0" and place[1] - place[0] >= _LEAST:
                yield place
            place = None
