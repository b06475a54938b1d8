"""What the compiler makes of the kernels for an H200, seen without one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.bench.gpu import tile_shapes
from quire.config import default_cache_dir
from quire.kernels.triton import linear_fixed, linear_prefetch
from quire.kernels.triton.codes_row import CodesRowShape
from quire.kernels.triton.codes_tiles import CodesTilesShape

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")


MOST_KERNELS = 3000
"""Compiled kernels that are kept: some twenty versions of all of them."""


def kept_kernels() -> Path:
    """Where Triton keeps what it has compiled, each kernel under a hash of its source, its constants and the compiler:
    a run of the tests compiles what has changed since the last one."""
    folder = default_cache_dir() / "tests" / "hopper"
    folder.mkdir(parents=True, exist_ok=True)
    if len(list(folder.iterdir())) > MOST_KERNELS:
        shutil.rmtree(folder, ignore_errors=True)
    return folder


@pytest.fixture(scope="module")
def compiled() -> dict[str, Any]:
    """Compiled in a process of its own, since in this one the interpreter runs kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(kept_kernels())
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=900, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_compiles_and_none_spills_registers(compiled: dict[str, Any]) -> None:
    kernels = {name: kernel["resources"] for name, kernel in compiled.items() if "resources" in kernel}
    kernels |= compiled["families"]
    stacks = {name: int(resources.split("STACK:")[1].split()[0]) for name, resources in kernels.items()}
    assert {name: size for name, size in stacks.items() if size > 64} == {}


def test_no_barrier_has_the_place_of_something_else(compiled: dict[str, Any]) -> None:
    """The compiler reuses the place of a barrier that is never waited for, and hardware may write its state there
    later."""
    places = {name: kernel["shared_with_barriers"] for name, kernel in compiled.items() if "resources" in kernel}
    assert any("turned" in name for name in places) and any("hopper whole" in name for name in places)
    assert {name: found for name, found in places.items() if found} == {}


def fused_of(rows: int, keys: int, loops: int, threads: int = 4) -> int:
    """Multiply-adds of a thread, of 128, that the source asks for: one a score in every loop, and one a row for the sum
    of weights, which so many threads have."""
    return loops * (rows * keys + rows * threads) // 128


def test_only_multiply_adds_of_the_source_are_fused_in_the_attention_of_deterministic_mode(
    compiled: dict[str, Any]
) -> None:
    """A fused one rounds once: left to the compiler they were in the loop without a mask only, and bits depended on
    where a chunk began."""
    assert compiled["exact bfloat16"]["fused"] == fused_of(64, 64, 2)
    # In float32 the multiply-adds of the dots themselves are fused, the same in both loops: 64 features of each score,
    # 32 keys of each sum.
    dots = (32 * 32 * 64 + 32 * 64 * 32) // 128
    assert compiled["exact float32"]["fused"] == 2 * dots + fused_of(32, 32, 2, threads=16)
    assert compiled["mixed bfloat16"]["fused"] >= compiled["exact bfloat16"]["fused"]


def test_the_linear_of_one_row_meets_shared_memory_only_in_its_final_sums(compiled: dict[str, Any]) -> None:
    # Three sums (two halves of the gate, the norm's squares) of two barriers each, with some to spare.
    assert compiled["row bfloat16"]["barriers"] <= 10


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_keys_and_values_of_one_sequence_are_read_before_the_wait(compiled: dict[str, Any], dtype: str) -> None:
    """128 of each by 256 threads, 16 bytes at a time; then both halves of cosines, sines and gains of q and k."""
    kernel = compiled[f"few decode {dtype}"]
    assert kernel["early_loads"] == 8 + 8 + 6 * 4 and "STACK:0" in kernel["resources"]


@pytest.mark.parametrize("name", ["few decode over fp8", "few decode over scaled fp8"])
def test_keys_in_fp8_of_one_sequence_cost_no_more_than_those_in_bf16(compiled: dict[str, Any], name: str) -> None:
    """Keys and values come 8 bytes at a time; cosines, sines and gains as always. Two numbers become fp16 by one
    instruction: values before the wait and once more in the loop, keys in the loop, and the step's own value."""
    kernel, plain = compiled[f"{name} bfloat16"], compiled["few decode bfloat16"]
    assert kernel["early_loads"] == 6 * 4 and "STACK:0" in kernel["resources"]
    assert 3 * 32 <= kernel["from_fp8"] <= 3 * 32 + 2 and kernel["instructions"] <= plain["instructions"]


def test_decode_attention_turns_values_in_fp8_without_loads_of_bytes(compiled: dict[str, Any]) -> None:
    """128 keys of 128 features by 128 threads: two numbers become fp16 by one instruction, keys and values once each.
    Shared memory turns 16 bytes at a time: as many loads of keys and half as many of values as in bf16."""
    kernel, plain = (compiled[f"turned decode{kind} bfloat16"] for kind in (" over fp8", ""))
    assert kernel["byte_loads"] == 0 and kernel["from_fp8"] == 128
    assert 0 < kernel["matrix_loads"] < plain["matrix_loads"]
    assert "STACK:0" in kernel["resources"]


@pytest.mark.parametrize(("name", "loads", "products", "most"), [
    ("code row bfloat16", 8, 16, 2.0), ("code row float16", 8, 16, 2.0), ("code row gated bfloat16", 16, 48, 1.8),
])
def test_a_row_of_codes_is_read_before_the_wait_and_multiplied_in_few_instructions(
    compiled: dict[str, Any], name: str, loads: int, products: int, most: float
) -> None:
    """All codes of a tile in four turns: two loads of 16 bytes and four products for each 16 features, and with offsets
    four products more. A barrier each for the digits and the sums."""
    kernel = compiled[name]
    assert (kernel["early_loads"], kernel["byte_products"], kernel["barriers"]) == (loads, products, 2)
    found = dict(each.split(":") for each in kernel["resources"].split())
    assert int(found["STACK"]) <= 64 and int(found["REG"]) <= 128
    assert kernel["instructions"] <= most * 32 * loads  # of a thread: a load of 16 bytes has 32 weights


def test_programs_that_share_a_tile_have_room_for_its_codes(compiled: dict[str, Any]) -> None:
    """All that the tuner tries of a wide weight. Codes are read before the wait, two loads of 16 bytes for each turn
    and 16 features. Barriers: for the digits, the sums, the parts, and for what the atomic says."""
    shared = [name for name in compiled if name.startswith("code row in parts ")]
    assert len(shared) >= 3
    for name in shared:
        kernel, sizes = compiled[name], CodesRowShape(*map(int, name.split()[4:-1]))
        found = dict(each.split(":") for each in kernel["resources"].split())
        assert int(found["STACK"]) <= 16 and int(found["REG"]) == sizes.registers, name
        units = sizes.features // 16 * -(-17408 // (sizes.warps * 128) // sizes.parts)
        assert (kernel["early_loads"], kernel["barriers"]) == (2 * sizes.ahead * sizes.features // 16, 4), name
        assert kernel["byte_products"] == 4 * units and kernel["instructions"] <= 96 * units, name


@pytest.mark.parametrize("name", ["byte row bfloat16", "byte row float16", "byte row gated bfloat16"])
def test_a_row_of_fp8_is_read_before_the_wait_and_made_fp16_two_numbers_at_a_time(
    compiled: dict[str, Any], name: str
) -> None:
    kernel = compiled[name]
    found = dict(each.split(":") for each in kernel["resources"].split())
    assert int(found["STACK"]) == 0 and int(found["REG"]) <= 128
    assert kernel["early_loads"] >= 16 and kernel["asked"] >= 1
    # Eight instructions for the 16 bytes of a load, and few others.
    assert kernel["from_fp8"] % 128 == 0 and kernel["instructions"] <= 3.0 * kernel["from_fp8"]


def test_every_batch_of_deterministic_mode_runs_the_same_machine_code(compiled: dict[str, Any]) -> None:
    """Another kernel for another number of rows may round otherwise, whatever its source says. A GEMM in slices is two
    kernels (sums, then their tree), a wide one in 16 bits has three tiles; tests/gpu/test_bits.py compares the bits of
    all tiles and of all ways to share out slices."""
    several = {f"{dtype} {name}": count for dtype, counts in compiled["variants"].items()
               for name, count in counts.items() if count != (2 if name.endswith("slices") else 1)}
    assert several == {"bfloat16 wide GEMM": 1 + len(linear_fixed.TILES)}


@pytest.mark.parametrize("tile", [linear_fixed.FixedShape(), *(tile for tile, _ in linear_fixed.TILES)])
def test_tiles_of_deterministic_mode_fit_a_multiprocessor_and_add_16_columns_at_a_time(
    compiled: dict[str, Any], tile: linear_fixed.FixedShape
) -> None:
    """Whatever the tile, a block of columns is so many MMA instructions of 16 columns, one after another for an
    element: their rows and features differ, and nothing along k does."""
    name, ring = f"tile {tile.rows} x {tile.features}", tile.stages * (tile.rows + tile.features) * tile.columns * 2
    kernels = [kernel for key, kernel in compiled.items() if key.startswith(name) and key.endswith(" bfloat16")]
    assert len(kernels) == (1 if tile.features == 256 else 2)  # with a residual that one would spill
    for kernel in kernels:
        assert ring <= kernel["shared"] <= 227 << 10
        found = dict(each.split(":") for each in kernel["resources"].split())
        assert int(found["STACK"]) == 0 and int(found["REG"]) <= 192
        assert kernel["multiplications"] == [f"m64n{tile.features}k16"] * (tile.columns // 16)


def test_tiles_to_be_tried_for_sums_in_slices_hold_their_sums_in_registers(compiled: dict[str, Any]) -> None:
    tried = {name: kernel for name, kernel in compiled.items() if name.startswith(("heads by", "ranges by"))}
    assert len(tried) == 6
    stacks = {name: int(kernel["resources"].split("STACK:")[1].split()[0]) for name, kernel in tried.items()}
    assert {name: size for name, size in stacks.items() if size} == {}
    assert all(kernel["shared"] <= 227 << 10 for kernel in tried.values())


def test_a_decode_step_writes_its_new_key_before_it_asks_for_any(compiled: dict[str, Any]) -> None:
    """The pipelined loop reads the key back: no copy may be hoisted over the stores (two halves of key and value)."""
    assert compiled["turned decode bfloat16"]["stores_before_copies"] == 4
    assert compiled["decode bfloat16"]["stores_before_copies"] == 0


def test_rotation_leaves_the_loop_over_the_keys_as_fast(compiled: dict[str, Any]) -> None:
    # 128 keys and values of 128 features by 4 warps: 16 + 32 loads of matrices; joined halves had 8 of the former.
    assert compiled["turned decode bfloat16"]["matrix_loads"] >= 48


@pytest.mark.parametrize("tile", tile_shapes.TILES)
def test_codes_in_tiles_are_multiplied_without_a_stop(compiled: dict[str, Any], tile: tuple[int, ...]) -> None:
    """Of a turn each warp group waits once. Where the assembler finds an operand in use it would wait after every MMA
    instruction. What the shape says of shared memory holds: the ring, the sums to be stored, and barriers."""
    kernel, shape = compiled[f"code tiles {' '.join(map(str, tile))} bfloat16"], CodesTilesShape(*tile)
    found = dict(each.split(":") for each in kernel["resources"].split())
    assert kernel["drains"] == shape.groups and int(found["STACK"]) <= 16 and int(found["REG"]) == shape.launched
    per_group = 2 * 4 * shape.features // 64
    assert kernel["multiplications"] == [f"m64n{shape.rows}k16"] * (shape.groups * per_group)
    assert shape.shared(128) <= kernel["shared"] <= shape.shared(128) + 1024


PREFETCH = {"few": (4, 4), "tiles": (6, 2), "shared": (2, 6), "many": (3, 7), "thirds": (3, 9), "fifths": (5, 5)}
"""Copies of a turn: of weights (a tile of a slab each) and of rows (a box of a slab each)."""


@pytest.mark.parametrize("name", PREFETCH)
def test_a_gemm_prefetches_weights_before_the_previous_kernel_has_ended_and_loads_rows_after(
    compiled: dict[str, Any], name: str
) -> None:
    kernel, (tiles, boxes) = compiled[f"prefetch {name} bfloat16"], PREFETCH[name]
    steps, waits = kernel["bulk_copies"], "griddepcontrol.wait"
    loads = [each for each in steps[steps.index("copy 0") :] if each == waits or each.startswith("copy")]
    weights, rows = ["copy 0"] * tiles, ["copy 1"] * boxes
    first = [*weights, waits, *rows]
    assert loads[: len(first)] == first
    assert [each for each in loads[len(first) :] if each != waits] == [*weights, *rows]
    # The assembler has left them where they were: PTX has no say in that.
    machine = kernel["machine_copies"]
    assert machine.startswith("c" * tiles + "w" + "c" * boxes) and machine.count("c") == 2 * (tiles + boxes)


@pytest.mark.parametrize("name", PREFETCH)
def test_a_place_of_the_ring_is_said_to_be_free_when_all_warps_have_read_it(
    compiled: dict[str, Any], name: str
) -> None:
    """A warp waits for its own MMAs, and one thread speaks for all: the compiler must set a barrier between."""
    steps = compiled[f"prefetch {name} bfloat16"]["bulk_copies"]
    arrivals = [place for place, step in enumerate(steps) if step == "mbarrier.arrive"]
    waits = [place for place, step in enumerate(steps) if step == "wgmma.wait_group"]
    assert len(arrivals) == len(waits) == 2  # after a turn, after a tile
    assert all("bar.sync" in steps[wait:arrival] for wait, arrival in zip(waits, arrivals))


@pytest.mark.parametrize("name", PREFETCH)
def test_a_prefetching_gemm_leaves_registers_to_the_next_kernel(compiled: dict[str, Any], name: str) -> None:
    """And needs no stack, though those who load give most of theirs away."""
    found = dict(each.split(":") for each in compiled[f"prefetch {name} bfloat16"]["resources"].split())
    assert int(found["REG"]) <= 168 and int(found["STACK"]) == 0


@pytest.mark.parametrize("name", ["whole", "heads", "ranges"])
def test_a_gemm_of_deterministic_mode_holds_its_slices_in_registers(compiled: dict[str, Any], name: str) -> None:
    """And waits, before it says that a place is free, as the others do: after a turn and after a slice."""
    kernel = compiled[f"fixed {name} bfloat16"]
    found = dict(each.split(":") for each in kernel["resources"].split())
    assert int(found["REG"]) <= 168 and int(found["STACK"]) == 0
    steps = kernel["bulk_copies"]
    arrivals = [place for place, step in enumerate(steps) if step == "mbarrier.arrive"]
    waits = [place for place, step in enumerate(steps) if step == "wgmma.wait_group"]
    assert len(arrivals) == len(waits) > 1
    assert all("bar.sync" in steps[wait:arrival] for wait, arrival in zip(waits, arrivals))


@pytest.mark.parametrize(("name", "rows", "shape"), [("shared", 48, (1, 6, 2, 1)), ("many", 112, (3, 4, 1, 0))])
def test_a_gemm_that_adds_a_bias_or_residual_needs_the_shared_memory_that_is_asked_of_its_shape(
    compiled: dict[str, Any], name: str, rows: int, shape: tuple[int, ...]
) -> None:
    """The ring, what sums pass through to where they are stored, and barriers."""
    claimed = linear_prefetch.PrefetchShape(*shape).shared(rows)
    assert claimed <= compiled[f"prefetch {name} bfloat16"]["shared"] <= claimed + 1024


HOPPER_TILES = {"whole 128 6 1 0": (1, 2), "whole 256 4 1 0": (1, 2), "heads 128 5 1 0": (4, 2),
                "heads 128 5 1 1": (4, 1), "heads 128 5 2 0": (4, 2), "heads 128 5 4 0": (4, 2),
                "ranges 128 5 1 0": (4, 2), "ranges 128 6 2 0": (4, 2), "ranges 128 6 4 0": (2, 2)}  # fmt: skip
"""Slices that add up in registers, and waits of a slice: after every turn and at its end, or only there."""


@pytest.mark.parametrize("name", HOPPER_TILES)
def test_tiles_of_many_rows_hold_their_sums_in_registers_and_multiply_without_a_stop(
    compiled: dict[str, Any], name: str
) -> None:
    """Where the assembler finds something between two MMA instructions it makes each wait for the one before: then
    there are as many waits as instructions."""
    kernel, (slices, waits) = compiled[f"hopper {name} bfloat16"], HOPPER_TILES[name]
    found = dict(each.split(":") for each in kernel["resources"].split())
    assert int(found["REG"]) <= 168 and int(found["STACK"]) <= 16
    assert kernel["drains"] == 2 * slices * waits  # of two warp groups
    assert set(kernel["multiplications"]) == {f"m64n{name.split()[1]}k16"} and kernel["shared"] <= 227 << 10


def test_tiles_of_many_rows_say_that_a_place_is_free_when_all_warps_have_read_it(compiled: dict[str, Any]) -> None:
    for name, kernel in compiled.items():
        if name.startswith("hopper "):
            steps = kernel["bulk_copies"]
            waits = [place for place, step in enumerate(steps) if step == "wgmma.wait_group"]
            freed = [steps.index("mbarrier.arrive", wait) for wait in waits]
            assert waits and all("bar.sync" in steps[wait:place] for wait, place in zip(waits, freed))


@pytest.mark.parametrize(
    ("name", "loops"),
    [("heads of 128", 2), ("heads of 128 once", 1), ("heads of 128 in trees", 2), ("hopper decode", 2),
     ("hopper many", 2), ("hopper prefill", 4)],
)
def test_every_attention_kernel_of_deterministic_mode_fuses_the_same_multiply_adds(
    compiled: dict[str, Any], name: str, loops: int
) -> None:
    """And multiplies by the same steps along k: 128 features of scores, 128 keys of values, 16 at a time. Warp groups
    have a loop each, and their first turn before it."""
    kernel = compiled[f"{name} bfloat16"]
    assert kernel["fused"] == fused_of(64, 128, loops)
    wide, narrow = (kernel["multiplications"].count(f"m64n{columns}k16") for columns in (128, 64))
    assert len(kernel["multiplications"]) == wide + narrow and wide + narrow / 2 == loops * 2 * 8


@pytest.mark.parametrize(("name", "norms"), [("turned decode", 2), ("turned many", 2), ("turned without norms", 0)])
def test_attention_that_rotates_fuses_the_multiply_adds_of_rotations_besides(
    compiled: dict[str, Any], name: str, norms: int
) -> None:
    """Of 16 query heads and of the key, which every row of threads has: both halves of eight features a thread; and one
    a norm. Keys are copied without a wait for the kernel before, for which only who reads its rows waits."""
    kernel = compiled[f"hopper {name} bfloat16"]
    assert kernel["fused"] == fused_of(64, 128, 2) + 2 * 2 * 8 + norms
    waits = kernel["machine_copies"].count("w")
    assert compiled["hopper decode bfloat16"]["machine_copies"].count("w") == waits + 1 == 3
    found = dict(each.split(":") for each in kernel["resources"].split())
    assert int(found["REG"]) == 128 and (name != "turned many" or 2 * (kernel["shared"] + 1024) <= 228 << 10)


@pytest.mark.parametrize(("name", "groups"), [
    ("hopper decode", 1), ("hopper many", 1), ("hopper prefill", 2), ("hopper turned decode", 1),
    ("hopper turned many", 1), ("hopper turned without norms", 1),
])  # fmt: skip
def test_attention_by_warp_groups_multiplies_without_a_stop(compiled: dict[str, Any], name: str, groups: int) -> None:
    """Two sums of scores and two of values in a turn, waited for together; the first scores and the last values
    alone."""
    kernel = compiled[f"{name} bfloat16"]
    assert kernel["drains"] == groups * 3 and kernel["shared"] <= 227 << 10
