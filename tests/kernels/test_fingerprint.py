"""The kernels give the same bits on every machine with a fused multiply-add, whatever compiler built them.

The hash was the same for gcc 12 on x86-64 (AVX2 and AVX-512) and on aarch64 (NEON, under qemu). To see it there:
`aarch64-linux-gnu-gcc -std=gnu11 -O3 -ffp-contract=off -fno-math-errno -static tests/kernels/fingerprint.c
quire/kernels/cpu/*.c -o fingerprint -lpthread -lm`, then `qemu-aarch64 fingerprint`; or, without a cross compiler, with
`python -m ziglang cc -target aarch64-linux-musl` in its place. fingerprint_integer.c goes the same way; there
`qemu-aarch64 -cpu max` runs plain C, dotprod and i8mm, and here plain C, AVX2, AVX-VNNI and AVX-512 VNNI gave one hash,
on Intel and on AMD (EPYC, Zen 5).
"""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from quire.kernels.cpu import build, library

SOURCE = Path(__file__).parent / "fingerprint.c"
INTEGER_SOURCE = SOURCE.with_name("fingerprint_integer.c")
INTEGER_EXPECTED = "4b43ada7fed416366a693c83d1ab5c63d20025fef53ba283d2d342a093d7de60"
EXPECTED = "d5676c85490095f44d02bde893fad8d8408f30a8fcf1ef6a9ce28f27be110066"


@pytest.mark.parametrize("variant", [name for name in library.supported_variants() if name != "x86-64-v2"])
def test_this_machine_gives_the_bits_of_every_other(tmp_path, variant):
    program, kernels = tmp_path / "fingerprint", build.SOURCE_DIR / build.library_name(variant)
    compiler = build.find_compiler()
    subprocess.run([*compiler, "-O1", str(SOURCE), str(kernels), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], capture_output=True, check=True).stdout
    assert b"fit" not in output
    assert hashlib.sha256(output).hexdigest() == EXPECTED, output.decode()


@pytest.mark.parametrize("variant", library.supported_variants())
def test_integer_products_have_the_bits_of_every_other_machine(tmp_path, variant):
    """Every kernel of this processor is tried; even where there is no fused multiply-add, sums round once."""
    program, kernels = tmp_path / "fingerprint", build.SOURCE_DIR / build.library_name(variant)
    subprocess.run([*build.find_compiler(), "-O1", str(INTEGER_SOURCE), str(kernels), "-o", str(program)], check=True)
    output = subprocess.run([str(program)], capture_output=True, check=True).stdout
    assert b"fit" not in output, output.decode()
    assert hashlib.sha256(output).hexdigest() == INTEGER_EXPECTED, output.decode()
