"""The kernels give the same bits on every machine with a fused multiply-add, whatever compiler built them.

The hash was the same for gcc 12 and zig's clang on x86-64 (AVX2 and AVX-512) and for zig's clang on aarch64
(NEON, under qemu). To see it there: `python -m ziglang cc -std=gnu11 -O3 -ffp-contract=off -fno-math-errno
-target aarch64-linux-musl -static tests/kernels/fingerprint.c quire/kernels/cpu/*.c -o fingerprint`, then
`qemu-aarch64 fingerprint`.
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from quire.kernels.cpu import build, library

SOURCE = Path(__file__).parent / "fingerprint.c"
EXPECTED = "02653ee1011347fc02c9c7104ce4cd59877e8600f92c794ccede72539da305d6"


@pytest.mark.parametrize("variant", [name for name in library.supported_variants() if name != "x86-64-v2"])
def test_this_machine_gives_the_bits_of_every_other(tmp_path, variant):
    program, kernels = tmp_path / "fingerprint", build.SOURCE_DIR / build.library_name(variant)
    compiler = build.find_compiler()
    subprocess.run([*compiler, "-O1", str(SOURCE), str(kernels), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], capture_output=True, check=True).stdout
    assert b"fit" not in output
    assert hashlib.sha256(output).hexdigest() == EXPECTED, output.decode()
