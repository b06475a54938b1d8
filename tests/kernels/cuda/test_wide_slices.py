"""The tree of sums in CUDA C (`wide_slices.cu`), compiled for this machine: one thread, with numbers for products."""

from __future__ import annotations

import shutil
import subprocess
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from quire.kernels.slices import add_in_tree

ROUNDS = 3
HARNESS = """
#include <cstdio>
#define __device__
#define __forceinline__ inline
#define SLICES {slices}
#define PARTS {parts}
#define KEPT 0
#define ROW_BLOCKS 1
typedef unsigned int u32;
struct alignas(16) float4 {{ float x, y, z, w; }};
static float4 make_float4(float x, float y, float z, float w) {{ return {{x, y, z, w}}; }}
static struct {{ int x; }} threadIdx = {{ 77 }};
constexpr int SUMS = {sums}, TILE_SUMS = SUMS, GROUPS = 2, GROUP_THREADS = 128, PLACE_BYTES = 1024;
{text}
struct Numbers {{
    FILE* file;
    void sum_slice(float (&sums)[ROW_BLOCKS][SUMS]) {{
        if (fread(sums, sizeof(float), SUMS, file) != SUMS) throw "too few numbers";
    }}
}};
alignas(16) static float deep[DEEP_SUMS + 4];
int main() {{
    Numbers numbers = {{ stdin }};
    Waiting waiting = {{ 0, deep }};
    for (int round = 0; round < {rounds}; ++round) {{
        float sums[ROW_BLOCKS][SUMS];
        sum_slices(sums, numbers, waiting);
        fwrite(sums, sizeof(float), SUMS, stdout);
    }}
}}
"""


@pytest.mark.parametrize(
    ("slices", "parts", "sums"),
    [(32, 1, 64), (32, 2, 64), (40, 1, 64), (28, 1, 64), (8, 1, 64), (8, 1, 96), (6, 1, 96), (8, 1, 128), (7, 1, 128),
     (8, 2, 72), (2, 1, 32)],
)  # fmt: skip
def test_slices_are_added_in_the_tree_of_their_number(tmp_path: Path, slices: int, parts: int, sums: int) -> None:
    """Four, two or one of them in registers, whole nodes in a counter; a second tile begins with an empty one."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("needs g++")
    text = resources.files("quire.kernels.cuda").joinpath("wide_slices.cu").read_text(encoding="utf-8")
    source, program = tmp_path / "tree.cpp", tmp_path / "tree"
    source.write_text(HARNESS.format(slices=slices, parts=parts, sums=sums, text=text, rounds=ROUNDS))
    command = [compiler, "-std=c++17", "-O1", "-ffp-contract=off", "-o", str(program), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count = slices // parts
    numbers = np.random.default_rng(slices).standard_normal((ROUNDS, count, sums)).astype(np.float32)
    numbers *= np.exp2(np.arange(count) % 9).astype(np.float32)[:, None]
    found = subprocess.run([program], input=numbers.tobytes(), capture_output=True, check=True).stdout
    want = np.stack([add_in_tree(list(each)) for each in numbers])
    assert np.array_equal(np.frombuffer(found, np.float32).reshape(ROUNDS, sums), want)
    in_a_row = np.stack([np.add.accumulate(each)[-1] for each in numbers])
    assert count < 4 or not np.array_equal(in_a_row, want)  # another order would show
