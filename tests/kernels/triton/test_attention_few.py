"""Decode attention of one or two sequences, run by our interpreter beside the kernels and references it stands for."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from quire.kernels.triton import attention_few, attention_few_kernel
from quire.kernels.types import HeadShape, HeadTurn, pair_cache
from tests.kernels.triton import cases, drafted
from tests.kernels.triton.gluon_interpreter import interpreting
from tests.kernels.triton.gluon_memory import Value
from tests.kernels.triton.test_linear_codes import reversed_range

FP8 = {"kv_dtype": torch.float8_e4m3fn}
EARLY = (
    "k_cache", "v_cache", "tables", "rows", "context_len", "task_seq", "task_piece", "piece_count", "piece_length",
    "k_words", "rope", "q_norm", "k_norm", "kv_scales",
)  # fmt: skip
"""What no kernel of the step has written before this one: of the cache, what is read before it has waited."""


def _floats(words: Value) -> tuple[Value, ...]:
    """The four numbers of a word."""
    return tuple(map(Value, words.data.view(torch.float8_e4m3fn).unflatten(-1, (-1, 4)).half().unbind(-1)))


def _word(*numbers: Value) -> Value:
    return Value(torch.stack([each.data for each in numbers], -1).to(torch.float8_e4m3fn).view(torch.int32)[..., 0])


ASSEMBLY = {"_floats": _floats, "_word": _word}


@pytest.mark.parametrize(
    ("shape", "lengths", "options"),
    [
        (HeadShape(4, 1, 128), [1], {}),
        (HeadShape(4, 2, 128), [128], {"norms": False}),
        (HeadShape(5, 1, 128), [129], {"rows": True}),
        (HeadShape(8, 1, 128), [300, 77], {"extra": 3}),
        (HeadShape(2, 1, 128), [700], {"extra": 2}),
        (HeadShape(2, 2, 128), [513, 0], {"extra": 1, "rows": True}),
        (HeadShape(2, 1, 128), [129, 5, 0, 300, 64], {"extra": 2, "rows": True}),
        (HeadShape(2, 1, 128), [500], {"window": 150}),
        (HeadShape(4, 2, 128), [128], FP8),
        (HeadShape(5, 1, 128), [129, 0], {**FP8, "rows": True, "kv_scale": 0.5}),
        (HeadShape(4, 2, 128), [700, 300], {**FP8, "extra": 2, "kv_scale": 0.5}),
        (HeadShape(2, 1, 128), [500], {**FP8, "window": 150, "norms": False}),
        (HeadShape(4, 2, 128), [200], {**FP8, "dtype": torch.float16, "kv_scale": 0.5}),
    ],
)
@pytest.mark.parametrize("order", [range, reversed_range])
def test_it_attends_as_rotation_and_attention_apart(
    shape: HeadShape, lengths: list[int], options: dict[str, Any], order: Any
) -> None:
    """Pieces of one tile and of several, joined by whoever is last."""
    torch.manual_seed(len(lengths) + lengths[0])
    with interpreting(order, None, EARLY, ASSEMBLY):
        given = {"dtype": torch.bfloat16, **options}
        cases.check_rope_decode("cpu", given.pop("dtype"), shape, 16, lengths, few=True, pdl=True, **given)


@pytest.mark.parametrize(
    ("shape", "sequences", "options"),
    [
        (HeadShape(4, 1, 128), [(5, 5)], {}),
        (HeadShape(4, 2, 128), [(131, 5)], {}),
        (HeadShape(8, 1, 128), [(300, 3), (77, 1), (140, 4)], {"extra": 6}),
        (HeadShape(2, 1, 128), [(258, 4)], {"extra": 8, "norms": False}),
        (HeadShape(2, 1, 128), [(500, 5)], {"window": 3}),
        (HeadShape(2, 1, 128), [(1, 1), (2, 2), (0, 1)], {"extra": 4}),
        (HeadShape(4, 2, 128), [(131, 5)], FP8),
        (HeadShape(4, 2, 128), [(300, 3), (77, 1), (140, 4)], {**FP8, "extra": 6, "scaled": True}),
    ],
)
@pytest.mark.parametrize("order", [range, reversed_range])
def test_drafts_read_the_keys_of_rows_before_them(
    shape: HeadShape, sequences: list[tuple[int, int]], options: dict[str, Any], order: Any
) -> None:
    """Of sequences with so many keys in the end, and so many rows: also where new keys lie in several pieces."""
    torch.manual_seed(len(sequences) + sequences[0][0])
    with interpreting(order, None, EARLY, ASSEMBLY):
        drafted.check_drafted_rows("cpu", torch.bfloat16, shape, sequences, **options)


def test_a_row_looks_back_as_far_as_a_step_with_drafts_has_rows() -> None:
    assert attention_few_kernel._LOOKED_AT.value == attention_few.MOST_DRAFTED


def test_what_it_does_not_know_is_left_to_the_other_kernel() -> None:
    dtype, turn = torch.bfloat16, HeadTurn(torch.empty(8, 128))

    def cache(kind: torch.dtype, dim: int = 128) -> Any:
        return pair_cache(*(torch.empty(2, 1, 16, dim).to(kind) for _ in range(2)), 16)

    takes = attention_few.takes
    assert takes(dtype, HeadShape(8, 1, 128), turn, cache(dtype))
    assert not takes(dtype, HeadShape(9, 1, 128), turn, cache(dtype))
    assert not takes(torch.float32, HeadShape(8, 1, 128), turn, cache(torch.float32))
    assert takes(dtype, HeadShape(8, 1, 128), turn, cache(torch.float8_e4m3fn))
    assert not takes(dtype, HeadShape(8, 1, 128), turn, cache(torch.float8_e5m2))
    assert not takes(dtype, HeadShape(8, 1, 64), HeadTurn(torch.empty(8, 64)), cache(dtype, 64))
    assert not takes(dtype, HeadShape(8, 1, 128), HeadTurn(torch.empty(8, 128), sinks=torch.empty(8)), cache(dtype))
