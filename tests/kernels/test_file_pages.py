"""Pages of libraries' files are let go of, and those that the process has changed are not."""

from __future__ import annotations

import sys

import pytest
import torch

from quire.kernels.cpu.file_pages import forget_file_pages, unchanged

SMAPS = """\
7f0000000000-7f0000200000 r-xp 00000000 08:01 123 /lib/libone.so (deleted)
Rss:                 100 kB
Anonymous:             0 kB
7f0000200000-7f0000400000 r--p 00000000 08:01 123 /lib/libone.so
Anonymous:             4 kB
7f0000400000-7f0000600000 rw-p 00000000 08:01 123 /lib/libone.so
Anonymous:             0 kB
7f0000600000-7f0000800000 r--p 00000000 00:00 0
Anonymous:             0 kB
7f0000800000-7f0000801000 r-xp 00000000 08:01 124 /lib/small.so
Anonymous:             0 kB
7f0000900000-7f0000b00000 r--p 00000000 00:00 0 [vvar]
Anonymous:             0 kB
7f0000c00000-7f0000e00000 r--p 00000000 08:01 125 /lib/libtwo.so
Anonymous:             0 kB
"""


def test_only_large_unchanged_read_only_mappings_of_files_count() -> None:
    assert list(unchanged(SMAPS)) == [(0x7F0000000000, 0x7F0000200000), (0x7F0000C00000, 0x7F0000E00000)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_holds_less_and_computes_as_before() -> None:
    def of_files() -> int:
        with open("/proc/self/status", encoding="utf-8") as status:
            return next(int(line.split()[1]) for line in status if line.startswith("RssFile:"))

    x = torch.arange(12.0).view(3, 4)
    expected, before = (x @ x.t()).tolist(), of_files()
    forget_file_pages()
    assert of_files() < before - 10_000
    assert (x @ x.t()).tolist() == expected
