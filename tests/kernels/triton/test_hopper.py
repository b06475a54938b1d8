"""What the compiler makes of the kernels for an H200, seen without one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("compile_for_hopper.py")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Compiled in a process of its own, since in this one the interpreter runs kernels."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("kernels"))
    done = subprocess.run(
        [sys.executable, str(SCRIPT)], capture_output=True, text=True, env=environment, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_every_kernel_compiles_and_none_spills_registers(compiled: dict[str, Any]) -> None:
    kernels = {name: kernel for name, kernel in compiled.items() if name != "variants"}
    stacks = {name: int(kernel["resources"].split("STACK:")[1].split()[0]) for name, kernel in kernels.items()}
    assert {name: size for name, size in stacks.items() if size > 64} == {}


def test_no_product_and_sum_is_fused_in_the_attention_of_deterministic_mode(compiled: dict[str, Any]) -> None:
    """A fused one rounds once: with it in the loop without a mask only, bits depended on where a chunk began."""
    assert compiled["mixed bfloat16"]["fused"] > 0 == compiled["exact bfloat16"]["fused"]
    # In float32 the products of the matrices themselves are fused, the same in both loops; nothing else may be.
    assert compiled["exact float32"]["fused"] % 256 == 0 != compiled["mixed float32"]["fused"] % 256


def test_the_product_of_one_row_meets_shared_memory_only_in_its_final_sums(compiled: dict[str, Any]) -> None:
    # Three sums (two halves of the gate, the norm's squares) of two barriers each, with some to spare.
    assert compiled["row bfloat16"]["barriers"] <= 10


def test_a_prefetch_is_a_bulk_request_to_the_second_cache(compiled: dict[str, Any]) -> None:
    assert compiled["prefetch bfloat16"]["prefetches"] >= 1


def test_every_batch_of_deterministic_mode_runs_the_same_machine_code(compiled: dict[str, Any]) -> None:
    """Another kernel for another number of rows may round otherwise, whatever its source says."""
    several = {f"{dtype} {name}": count for dtype, counts in compiled["variants"].items()
               for name, count in counts.items() if count != 1}
    assert several == {}


def test_a_decode_step_writes_its_new_key_before_it_asks_for_any(compiled: dict[str, Any]) -> None:
    """The pipelined loop reads the key back: no copy may be hoisted over the stores (two halves of key and value)."""
    assert compiled["turned decode bfloat16"]["stores_before_copies"] == 4
    assert compiled["decode bfloat16"]["stores_before_copies"] == 0


def test_rotation_leaves_the_loop_over_the_keys_as_fast(compiled: dict[str, Any]) -> None:
    # 128 keys and values of 128 features by 4 warps: 16 + 32 loads of matrices; joined halves had 8 of the former.
    assert compiled["turned decode bfloat16"]["matrix_loads"] >= 48


AHEAD = {"few": 8, "many": 4, "wide": 5, "narrow": 6, "single": 4}
"""Turns of the ring."""


@pytest.mark.parametrize("name", AHEAD)
def test_a_product_asks_for_a_ring_of_weights_before_the_kernel_ahead_has_ended(
    compiled: dict[str, Any], name: str
) -> None:
    kernel, stages = compiled[f"ahead {name} bfloat16"], AHEAD[name]
    copies = [each for each in kernel["bulk_copies"] if each not in ("bar.sync", "wgmma.wait_group")]
    weights, rows = ["copy 0"] * stages, ["copy 1"] * stages
    assert copies == [*weights, "griddepcontrol.wait", *rows, "copy 0", "copy 1"]
    # The assembler has left them where they were: PTX has no say in that.
    assert kernel["machine_copies"] == "c" * stages + "w" + "c" * (stages + 2)


@pytest.mark.parametrize("name", AHEAD)
def test_a_place_of_the_ring_is_filled_again_when_all_warps_have_read_it(compiled: dict[str, Any], name: str) -> None:
    """A warpgroup waits for its own products only: the compiler must set a barrier for the others."""
    steps = compiled[f"ahead {name} bfloat16"]["bulk_copies"]
    waited = steps.index("wgmma.wait_group")
    refilled = waited + steps[waited:].index("copy 0")
    assert "bar.sync" in steps[waited:refilled]
