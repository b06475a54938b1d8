"""Every kernel agrees with its torch reference on small shapes (interpreted on a CPU, compiled on a GPU)."""

from __future__ import annotations

import random

import pytest
import torch

from quire.errors import EngineError
from quire.kernels.slices import Slices
from quire.kernels.triton import linear_fixed
from quire.kernels.triton.attention_mixed import MixedShape
from quire.kernels.triton.attention_split import DecodeShape, decode_shape, extra_pieces
from quire.kernels.triton.linear_row import RowShape
from quire.kernels.types import HeadShape
from tests.kernels.triton import cases

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(1)
    random.seed(1)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "hidden"), [(1, 48), (3, 64), (5, 130)])
def test_norms_agree_and_the_fused_one_is_the_norm_of_the_sum(dtype: torch.dtype, rows: int, hidden: int) -> None:
    cases.check_norms(DEVICE, dtype, rows, hidden)


CAREFUL = DecodeShape(64, stages=2, carried=False)
WHOLE = DecodeShape(32, stages=6)


@pytest.mark.parametrize(
    ("kib", "one", "whole", "many"),
    [
        (227, DecodeShape(128), WHOLE, DecodeShape(64)),
        (163, DecodeShape(64), WHOLE, DecodeShape(64)),
        (99, CAREFUL, CAREFUL, CAREFUL),
    ],
)
def test_keys_on_their_way_fit_the_shared_memory_of_the_chip(
    kib: int, one: DecodeShape, whole: DecodeShape, many: DecodeShape
) -> None:
    for sequences, shape in ((1, one), (16, many), (32, whole), (64, many)):
        assert decode_shape(sequences, 96, 2, kib << 10) == shape


def test_only_whole_sequences_of_wide_heads_that_were_timed_take_fewer_keys_at_once() -> None:
    assert decode_shape(32, 128, 2) == WHOLE
    assert decode_shape(32, 64, 2) == decode_shape(32, 128, 2, timed=False) == DecodeShape(64)
    assert decode_shape(16, 128, 2, long=True) == DecodeShape(128)


@pytest.mark.parametrize("dtype", FLOATS)
def test_activations_agree(dtype: torch.dtype) -> None:
    cases.check_activations(DEVICE, dtype, 3, 70)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "rotary"),
    [
        (HeadShape(4, 2, 16), 16),
        (HeadShape(3, 1, 16), 8),
        (HeadShape(2, 2, 8), None),
        (HeadShape(6, 2, 20), 20),
    ],
)
@pytest.mark.parametrize("norms", [False, True])
def test_rope_norm_and_cache_write_agree(dtype: torch.dtype, shape: HeadShape, rotary: int | None, norms: bool) -> None:
    cases.check_rope_cache(DEVICE, dtype, shape, 5, 4, rotary=rotary, norms=norms)


@pytest.mark.parametrize(
    ("lengths", "extra", "window"),
    [
        ([1], 1, None),
        ([700, 0, 3, 64, 65], 7, None),
        ([500, 90, 1], 5, 100),
        ([64 * 40], 33, None),
    ],
)
def test_decode_work_is_shared_out_as_the_reference_does(lengths: list[int], extra: int, window: int | None) -> None:
    cases.check_split(DEVICE, lengths, extra, window)


def test_any_number_of_sequences_has_its_share_of_pieces() -> None:
    pieces = [extra_pieces(count, 8, 132) for count in (1, 200, 2048, 2049, 4608)]
    assert pieces == [16, 264, 264, 264, 264]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "block_size", "lengths", "options"),
    [
        (HeadShape(4, 2, 16), 16, [1, 200, 0, 77], {}),
        (HeadShape(4, 2, 16), 16, [300, 70], {"extra": 40, "keys": 64, "rows": True}),
        (HeadShape(6, 2, 8), 4, [33, 129], {"window": 40}),
        (HeadShape(6, 2, 32), 4, [33, 129, 0, 200, 7], {"tree": True, "halves": True, "carried": True}),
        (HeadShape(5, 1, 20), 1, [90], {"softcap": 3.0, "extra": 2}),
        (HeadShape(6, 2, 32), 4, [33, 129, 300], {"window": 200, "halves": True, "carried": True}),
        (HeadShape(6, 2, 32), 4, [300, 33, 172], {"window": 130, "keys": 32, "extra": 2}),
        (HeadShape(6, 2, 16), 16, [1, 200, 0, 77], {"sinks": True, "window": 150}),
        (HeadShape(8, 1, 32), 8, [300], {"sinks": True, "halves": True, "carried": True, "keys": 64}),
    ],
)
def test_decode_attention_agrees(
    dtype: torch.dtype, shape: HeadShape, block_size: int, lengths: list[int], options: dict
) -> None:
    cases.check_decode(DEVICE, dtype, shape, block_size, lengths, **options)


TURNED: list[tuple[HeadShape, int, list[int], dict]] = [
    (HeadShape(4, 2, 32), 16, [1, 200, 0, 77, 128, 129], {}),
    (HeadShape(4, 2, 32), 16, [300, 70, 0], {"extra": 40, "keys": 64, "rows": True}),
    (HeadShape(4, 2, 32), 16, [300, 70], {"extra": 1, "keys": 64, "window": 130, "carried": True}),
    (HeadShape(6, 2, 32), 4, [33, 129, 257], {"window": 40}),
    (HeadShape(5, 1, 32), 1, [90, 1], {"softcap": 3.0, "extra": 2, "norms": False}),
    (HeadShape(2, 2, 64), 8, [130, 64, 65], {"kv_dtype": torch.float8_e4m3fn, "kv_scale": 0.5, "extra": 3}),
    (HeadShape(16, 1, 32), 16, [200], {"window": 150, "softcap": 2.0, "rows": True}),
    (HeadShape(8, 2, 32), 16, [200, 1, 0, 129], {"kv_dtype": torch.float8_e4m3fn, "extra": 4, "carried": True}),
    (HeadShape(8, 2, 128), 16, [300], {"kv_dtype": torch.float8_e4m3fn, "kv_scale": 0.5, "extra": 1, "keys": 64}),
    (HeadShape(8, 2, 32), 16, [1, 300, 0], {"sinks": True, "norms": False, "keys": 64, "carried": True}),
    (HeadShape(8, 2, 32), 16, [90, 1, 0, 333, 32], {"extra": 1, "keys": 32, "carried": True}),
    (HeadShape(8, 2, 32), 16, [300, 70, 172, 159], {"extra": 1, "keys": 32, "carried": True, "window": 130}),
]


@pytest.mark.parametrize(  # every dtype with several shapes, every shape with one dtype
    ("shape", "block_size", "lengths", "options", "dtype"),
    [(*given, FLOATS[place % len(FLOATS)]) for place, given in enumerate(TURNED)],
)
def test_rotation_inside_the_decode_attention_is_rotation_before_it(
    dtype: torch.dtype, shape: HeadShape, block_size: int, lengths: list[int], options: dict
) -> None:
    cases.check_rope_decode(DEVICE, dtype, shape, block_size, lengths, **options)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "block_size", "queries", "contexts", "options"),
    [
        (HeadShape(4, 2, 16), 16, [5, 1, 40], [0, 50, 13], {}),
        (HeadShape(6, 2, 8), 4, [30, 3], [20, 90], {"window": 17}),
        (HeadShape(3, 1, 20), 16, [9], [60], {"softcap": 3.0}),
        (HeadShape(4, 4, 16), 8, [1, 1, 1, 1], [40, 0, 63, 70], {"tree": True, "window": 50}),
        (HeadShape(5, 1, 16), 16, [33], [0], {"window": 200}),
        (HeadShape(40, 1, 16), 16, [3, 2], [0, 50], {"sizes": MixedShape(32, 32, 4, 2)}),
        (HeadShape(6, 2, 16), 16, [30, 3, 1], [20, 90, 0], {"sinks": True, "window": 17}),
        (HeadShape(3, 1, 16), 8, [9], [60], {"sinks": True}),
        (HeadShape(4, 2, 16), 8, [9, 3], [30, 0], {"fp8": True}),
    ],
)
def test_mixed_attention_agrees(
    dtype: torch.dtype,
    shape: HeadShape,
    block_size: int,
    queries: list[int],
    contexts: list[int],
    options: dict,
) -> None:
    cases.check_mixed(DEVICE, dtype, shape, block_size, queries, contexts, **options)


@pytest.mark.parametrize(
    ("shape", "queries", "keys"),
    [
        (HeadShape(4, 2, 16), [33, 40, 65], 32),
        (HeadShape(3, 1, 32), [16, 17, 70], 16),
        (HeadShape(36, 1, 16), [16, 18, 17], 16),
    ],
)
def test_prompts_without_context_are_attended_to_where_the_projection_left_them(
    shape: HeadShape, queries: list[int], keys: int
) -> None:
    cases.check_fresh(DEVICE, torch.float16, shape, queries, MixedShape(32, keys, 4, 2))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "features", "width"), [(1, 18, 48), (2, 7, 130), (3, 34, 64), (4, 20, 96)])
def test_few_row_gemms_agree(dtype: torch.dtype, rows: int, features: int, width: int) -> None:
    cases.check_linear_few(DEVICE, dtype, rows, features, width)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("features", "width", "sizes"), [(18, 48, (1, 32, 1)), (7, 130, (4, 64, 2)), (34, 64, (2, 128, 4))]
)
def test_the_linear_of_one_row_agrees(
    dtype: torch.dtype, features: int, width: int, sizes: tuple[int, int, int]
) -> None:
    cases.check_linear_row(DEVICE, dtype, features, width, RowShape(*sizes))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_row_of_the_fixed_order_gemm_has_the_same_bits_alone(dtype: torch.dtype) -> None:
    cases.check_linear_fixed(DEVICE, dtype, 70, 50, 72)


@pytest.mark.parametrize(
    ("slices", "dtype"),
    [
        *((Slices.each(heads, 20), dtype) for heads, dtype in ((6, torch.float32), (6, torch.bfloat16))),
        (Slices.each(9, 64), torch.float16),
        (Slices.of_width(480), torch.float32),
        (Slices.of_width(500), torch.bfloat16),
    ],
    ids=["heads of 20 in float32", "heads of 20", "heads of 64", "uneven ranges", "a short last range"],
)
def test_slices_of_the_fixed_order_gemm_give_the_same_bits_for_any_ranks(dtype: torch.dtype, slices: Slices) -> None:
    """Every kind of slices and every dtype; a GPU runs all pairs of them (tests/gpu/test_bits.py)."""
    cases.check_linear_slices(DEVICE, dtype, 18, 40, slices)


def test_a_gemm_without_its_sums_other_slices_is_refused() -> None:
    part = Slices.each(4, 16).part(0, 2)
    with pytest.raises(EngineError, match="only some slices"):
        linear_fixed.linear_fixed(torch.zeros(2, 32), torch.zeros(8, 32), slices=part)
    with pytest.raises(EngineError, match="256 slices"):
        linear_fixed.linear_fixed(torch.zeros(2, 256), torch.zeros(8, 256), slices=Slices.each(256, 1))


@pytest.mark.parametrize("dtype", FLOATS)
def test_block_and_slot_copies_agree(dtype: torch.dtype) -> None:
    cases.check_copies(DEVICE, dtype, HeadShape(4, 2, 16), 4)


@pytest.mark.parametrize(("rows", "vocab"), [(1, 50), (7, 5000), (9, 4096)])
def test_drawn_tokens_and_statuses_are_those_of_the_sampler(rows: int, vocab: int) -> None:
    cases.check_draw(DEVICE, torch.float32, rows, vocab)


def test_table_diffs_and_gathered_inputs_agree() -> None:
    cases.check_inputs(DEVICE)
