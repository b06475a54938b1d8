"""The table of products: the nearest measured weight decides, and every entry names a kernel that exists."""

from __future__ import annotations

import torch

from quire.bench.gpu_cases import MODELS
from quire.bench.gpu_tune import weights_of
from quire.kernels.triton.choices import GATED, NORM, PLAIN, Choice, Timed, choose, product, table
from quire.kernels.triton.linear_few import StripShape
from quire.kernels.triton.linear_row import RowShape

KERNELS = {"row": RowShape, "strip": StripShape, "vector": tuple, "library": tuple}


def test_every_entry_names_a_kernel_with_sizes_it_takes() -> None:
    for entry in table():
        sizes = entry.choice.sizes
        assert sizes == () if KERNELS[entry.choice.kernel] is tuple else KERNELS[entry.choice.kernel](*sizes)
        assert entry.choice.kernel != "row" or entry.rows == 1
        assert entry.choice.kernel != "vector" or entry.rows in (2, 4)


def test_every_product_of_the_benchmarked_models_was_measured_at_one_row() -> None:
    known = {(entry.form, entry.features, entry.width) for entry in table() if entry.rows == 1}
    assert {weight for model in MODELS for weight in weights_of(model)} <= known


def test_an_unknown_weight_takes_the_choice_of_the_nearest_and_of_enough_rows() -> None:
    small, large = Choice("strip", (16, 256, 4, 4)), Choice("strip", (32, 128, 4, 5))
    known = [Timed(2, 1000, 1000, PLAIN, small), Timed(2, 8000, 8000, PLAIN, large), Timed(4, 1000, 1000, PLAIN, large)]
    assert choose(known, 2, 1200, 900, PLAIN) == small
    assert choose(known, 2, 6000, 9000, PLAIN) == large
    assert choose(known, 3, 1000, 1000, PLAIN) == large
    assert choose(known, 5, 1000, 1000, PLAIN) == Choice()
    assert choose(known, 1, 1000, 1000, GATED) == Choice()


def test_many_rows_are_the_librarys_and_float32_never_meets_a_tensor_core() -> None:
    assert product(65, 4096, 4096, torch.bfloat16) == Choice()
    assert {product(rows, 4096, 4096, torch.float32, NORM).kernel for rows in (1, 2, 9)} == {"row", "vector", "library"}
