"""deterministic=True on a real GPU, operation by operation: which one, if any, gives a row other bits elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.attention import triton as attention_backend
    from quire.bench.gpu import tune_fixed
    from quire.kernels.slices import Slices
    from quire.kernels.triton import (
        fixed_prefetch,
        fixed_tiles,
        hopper_prefill,
        linear_fixed,
        linear_prefetch,
        rope_cache,
    )
    from quire.kernels.triton.attention_mixed import mixed_attention, query_tiles
    from quire.kernels.types import HeadShape, HeadTurn, pair_cache
    from tests.kernels.triton import bits, cases

DTYPES = ("float32", "bfloat16")
ROWS = 700
COUNTS = (1, 2, 3, 7, 8, 9, 31, 33, 64, 65, 130, 512, 513)
SLICES = (("each", 9, 64), ("each", 32, 128), ("each", 6, 80), ("of_width", 1536), ("of_width", 3040))
HEADS = ((16, 8, 128), (9, 3, 64), (4, 1, 256), (6, 2, 16))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("hidden", "features"), [(1024, 3072), (576, 1536), (48, 97), (5120, 640)])
@torch.inference_mode()
def test_norms_gemms_and_gates(dtype: str, hidden: int, features: int) -> None:
    checks = bits.row_wise("cuda", getattr(torch, dtype), ROWS, hidden, features)
    assert [line for name, part in checks for line in bits.differences(name, part, ROWS, COUNTS)] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slices", SLICES)
@torch.inference_mode()
def test_slices_give_the_same_bits_for_any_number_of_ranks(dtype: str, slices: tuple[str, int, int]) -> None:
    make, *sizes = slices
    cases.check_linear_slices("cuda", getattr(torch, dtype), 300, 1000, getattr(Slices, make)(*sizes))


def _hopper() -> bool:
    return torch.cuda.get_device_capability()[0] == 9


def _other_rows(
    got: Callable[..., torch.Tensor], want: Callable[..., torch.Tensor], counts: Sequence[int], features: int,
    width: int, kind: torch.dtype,
) -> list[int]:  # fmt: skip
    """For which numbers of rows two GEMMs, given rows, weight, bias and residual, differ."""
    weight, bias = torch.randn(features, width, device="cuda") / 24, torch.randn(features, device="cuda")
    rows, added = torch.randn(max(counts), width, device="cuda"), torch.randn(max(counts), features, device="cuda")
    x, weight, bias, added = (each.to(kind) for each in (rows, weight, bias, added))
    given = ((x[:count], weight, bias, added[:count]) for count in counts)
    return [count for count, each in zip(counts, given) if not torch.equal(got(*each), want(*each))]


@pytest.mark.parametrize(("features", "width", "kind"), [(1000, 4096, "bfloat16"), (259, 200, "float16")])
@torch.inference_mode()
def test_large_tiles_give_the_bits_of_the_small_one(features: int, width: int, kind: str) -> None:
    """Three kernels for each weight: the number of rows compiles no other."""
    if not _hopper():
        pytest.skip("other chips have the small tile only")
    small = partial(linear_fixed.linear_fixed, sizes=linear_fixed.FixedShape())
    for tile, _ in linear_fixed.TILES:
        large = partial(linear_fixed.linear_fixed, sizes=tile)
        assert _other_rows(large, small, (1, 64, 65, 129, 1000), features, width, getattr(torch, kind)) == []


@pytest.mark.parametrize("slices", [None, ("each", 32, 128), ("of_width", 1536)])
@torch.inference_mode()
def test_gemms_that_prefetch_give_the_bits_of_those_that_do_not(slices: tuple[str, int, int] | None) -> None:
    if not _hopper() or not linear_prefetch.available(torch.device("cuda")):
        pytest.skip("needs Hopper, and the version of Triton that the kernel is written for")
    cut = None if slices is None else getattr(Slices, slices[0])(*slices[1:])
    width, counts = 4096 if cut is None else cut.width, tuple(range(1, fixed_prefetch.FEW_ROWS + 1))
    scratch = linear_prefetch.PrefetchScratch.allocate("cuda")

    def prefetching(x: torch.Tensor, weight: torch.Tensor, *added: torch.Tensor) -> torch.Tensor:
        units = fixed_prefetch.units_for(x.shape[0], weight, cut)
        assert units is not None and units.fits(x, weight, scratch)
        return fixed_prefetch.linear_fixed_prefetch(x, weight, *added, units=units, scratch=scratch, pdl=True)

    plain = partial(linear_fixed.linear_fixed, slices=cut)
    assert _other_rows(prefetching, plain, counts, 1000, width, torch.bfloat16) == []


@pytest.mark.parametrize(
    ("slices", "kind"),
    [(None, "float16"), (None, "bfloat16"), (("each", 32, 128), "bfloat16"), (("each", 16, 128), "float16"),
     (("of_width", 3072), "bfloat16")],
)  # fmt: skip
@torch.inference_mode()
def test_tiles_of_many_rows_give_the_bits_of_the_small_one(slices: tuple[str, int, int] | None, kind: str) -> None:
    """Every tile that the tuner tries. The first of the counts is one row."""
    if not _hopper() or not linear_prefetch.available(torch.device("cuda")):
        pytest.skip("needs Hopper, and the version of Triton that the kernel is written for")
    cut = None if slices is None else getattr(Slices, slices[0])(*slices[1:])
    width = 4096 if cut is None else cut.width
    scratch = linear_prefetch.PrefetchScratch.allocate("cuda")
    deep = fixed_tiles.TileScratch.for_device(torch.device("cuda", torch.cuda.current_device()))
    small = partial(linear_fixed.linear_fixed, slices=cut, sizes=linear_fixed.FixedShape() if cut is None else None)
    for sizes in tune_fixed.hopper_tiles(64, cut):
        tiles = fixed_tiles.FixedTiles.of(sizes)

        def tiled(x: torch.Tensor, weight: torch.Tensor, *added: torch.Tensor, tiles=tiles) -> torch.Tensor:
            assert fixed_tiles.fits(x, weight, cut, tiles, scratch, deep)
            return fixed_tiles.linear_fixed_tiles(
                x, weight, *added, cut, tiles=tiles, scratch=scratch, deep=deep, pdl=True)

        other = _other_rows(tiled, small, (1, 64, 65, 129, 1000), 1000, width, getattr(torch, kind))
        assert (sizes, other) == (sizes, [])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (8, 8, 128), (64, 4, 128)])
@torch.inference_mode()
def test_newer_attention_kernels_give_the_bits_of_the_first(heads: tuple[int, int, int], dtype: str) -> None:
    """Chunks of sequences by 64 rows a tile; then all keys in one loop, and both tiles of `hopper_prefill`. What lies
    behind a sequence's last key is not a number, which only the latter may read."""
    shape, kind = HeadShape(*heads), getattr(torch, dtype)
    queries, contexts = [700, 64, 1, 513, 1, 3, 128, 1], [0, 448, 900, 37, 127, 5001, 0, 0]
    lengths = [a + b for a, b in zip(queries, contexts)]
    qkv, cache, table, start, length = cases.paged_batch("cuda", kind, shape, 16, queries, lengths)
    sizes, group = attention_backend._FIXED_HOPPER, shape.num_heads // shape.num_kv_heads
    on_device = lambda parts: [torch.from_numpy(part).cuda() for part in parts]  # noqa: E731
    tiles = on_device(query_tiles(np.array(queries), sizes.tokens_of(group)))

    def mixed(**options: Any) -> torch.Tensor:
        return mixed_attention(qkv, cache, table, None, start, length, *tiles, shape, 0.2,
                               **{"sizes": sizes, "exact": True} | options)  # fmt: skip

    want = mixed()
    assert torch.equal(mixed(once=True), want) and torch.equal(mixed(once=True, pdl=True), want)
    assert torch.equal(mixed(pdl=True), want) and torch.equal(mixed(once=True, sizes=replace(sizes, stages=3)), want)
    assert not torch.equal(mixed(sizes=replace(sizes, keys=64)), want)  # the comparison would show it
    if not hopper_prefill.fits(torch.device("cuda", torch.cuda.current_device()), kind, shape, 16):
        pytest.skip("prefill needs Hopper, and the version of Triton that the kernel is written for")
    for seq, keys in enumerate(lengths):
        for part in (cache.k, cache.v):
            if keys % 16:
                part[int(table[seq, keys // 16]), :, keys % 16 :] = float("nan")
    small = [hopper_prefill.PrefillShape(128, *each)
             for each in ((3, 1, 1), (2, 1, 1), (1, 1, 2), (4, 1, 1, 2), (1, 1, 1, 2))]
    for each in small:
        for pdl in (False, True):
            out = torch.full_like(want, float("nan"))
            hopper_prefill.hopper_prefill(
                qkv, cache, table, None, start, length, *tiles, shape, 0.2, out=out, sizes=each, pdl=pdl)
            assert torch.equal(out, want), (each, pdl)
    *large, taken = hopper_prefill.split_tiles(np.array(contexts), np.array(queries), shape)
    out = want.clone()
    for seq, count in enumerate(taken.tolist()):
        out[int(start[seq]) : int(start[seq]) + count] = float("nan")
    assert taken.tolist() == [700, 64, 0, 513, 0, 3, 128, 0] and out.isnan().any()
    hopper_prefill.hopper_prefill(qkv, cache, table, None, start, length, *on_device(large), shape, 0.2, out=out)
    assert torch.equal(out, want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("heads", [(16, 8, 128), (32, 8, 128), (8, 8, 128), (64, 8, 128)])
@pytest.mark.parametrize("normed", [True, False])
@torch.inference_mode()
def test_decode_steps_that_rotate_inside_attention_have_the_bits_of_those_that_do_not(
    heads: tuple[int, int, int], dtype: str, normed: bool
) -> None:
    """Results, and keys and values in the cache; with both shapes of the kernel, launched early or not. What lies
    behind a sequence's newest key is not a number, and so are the places of that key and its value before."""
    shape, kind, page = HeadShape(*heads), getattr(torch, dtype), 16
    if not hopper_prefill.fits(torch.device("cuda", torch.cuda.current_device()), kind, shape, page):
        pytest.skip("needs Hopper, and the version of Triton that the kernel is written for")
    lengths = [1, 2, 127, 128, 129, 300, 384, 1064, 0, *range(500, 540)]
    count = len(lengths)
    qkv, cache, table, start, length = cases.paged_batch("cuda", kind, shape, page, [1] * count, lengths)
    angles = torch.rand(max(lengths), 64, device="cuda") * 6
    gains = [torch.rand(128, device="cuda") + 0.5 for _ in range(2)] if normed else [None, None]
    turn = HeadTurn(torch.cat((angles.cos(), angles.sin()), 1), *gains, eps=1e-6)
    positions = (length - 1).clamp(min=0).long()
    blocks = table.long().gather(1, positions[:, None] // page)[:, 0]
    slots = torch.where(length > 0, blocks * page + positions % page, -1)
    for slot in slots[slots >= 0].tolist():
        for part in (cache.k, cache.v):
            part[slot // page, :, slot % page :] = float("nan")
    tiles = torch.arange(count, dtype=torch.int32, device="cuda"), torch.zeros(count, dtype=torch.int32, device="cuda")
    turned, kept = qkv.clone(), pair_cache(cache.k.clone(), cache.v.clone(), page)
    rope_cache.rope_and_cache(turned, kept, slots, positions, shape, turn.rope, turn.q_norm, turn.k_norm, turn.eps,
                              pdl=True, late=True, heads_at_once=8)  # fmt: skip
    want = torch.full((count, shape.num_heads * 128), float("nan"), dtype=kind, device="cuda")
    hopper_prefill.hopper_prefill(
        turned, kept, table, None, start, length, *tiles, shape, 0.2, out=want, sizes=hopper_prefill.DECODE)
    assert not want.isnan().any() and (want[lengths.index(0)] == 0).all()
    raw = hopper_prefill.RawHeads(turn, positions, slots)
    for sizes in (hopper_prefill.DECODE, hopper_prefill.DECODE_MANY, hopper_prefill.DECODE_FEW):
        for pdl in (False, True):
            out, given = torch.full_like(want, float("nan")), qkv.clone()
            mine = pair_cache(cache.k.clone(), cache.v.clone(), page)
            hopper_prefill.hopper_prefill(
                given, mine, table, None, start, length, *tiles, shape, 0.2, out=out, sizes=sizes, pdl=pdl, raw=raw)
            assert torch.equal(out, want) and torch.equal(given, qkv), (sizes, pdl)
            for got, expected in ((mine.k, kept.k), (mine.v, kept.v)):
                assert torch.equal(got.view(torch.int16), expected.view(torch.int16)), (sizes, pdl)


@pytest.mark.parametrize("few", [False, True])
@torch.inference_mode()
def test_rows_of_no_sequence_and_sequences_of_no_key_read_nothing(few: bool) -> None:
    """As padding has them: a tile of sequence -1 writes nothing, one without keys zeros, whatever its row."""
    shape, kind = HeadShape(32, 8, 128), torch.bfloat16
    if not hopper_prefill.fits(torch.device("cuda", torch.cuda.current_device()), kind, shape, 16):
        pytest.skip("needs Hopper, and the version of Triton that the kernel is written for")
    qkv, cache, table, start, length = cases.paged_batch("cuda", kind, shape, 16, [1, 1, 1], [300, 40, 128])
    rows = torch.tensor([0, -(1 << 20), 2], dtype=torch.int32, device="cuda")
    length[1] = 0
    tiles = [torch.tensor(part, dtype=torch.int32, device="cuda") for part in ([0, 1, -1], [0, 0, 0])]
    out = torch.full((3, 32 * 128), 7.0, dtype=kind, device="cuda")
    hopper_prefill.hopper_prefill(qkv, cache, table, rows, start, length, *tiles, shape, 0.2, out=out,
                                  sizes=hopper_prefill.DECODE_FEW if few else hopper_prefill.DECODE)  # fmt: skip
    assert (out[0] != 7).any() and (out[1] == 0).all() and (out[2] == 7).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [97, 49152, 151936])
@torch.inference_mode()
def test_logits_and_log_probabilities(dtype: str, vocab: int) -> None:
    kind = getattr(torch, dtype)
    ops = bits.deterministic_ops("cuda", kind)
    head = ops.pack_linear(torch.randn(vocab, 576, device="cuda") / 24)
    hidden = torch.randn(300, 576, device="cuda").to(kind)
    counts = (1, 2, 17, 64, 65, 256)
    assert bits.differences("head", lambda a, b: [ops.linear(hidden[a:b].clone(), head)], 300, counts) == []
    checks = bits.logits("cuda", kind, 300, vocab)
    assert [line for name, part in checks for line in bits.differences(name, part, 300, counts)] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", HEADS)
@torch.inference_mode()
def test_rotations_and_the_cache(dtype: str, heads: tuple[int, int, int]) -> None:
    checks = bits.rotations("cuda", getattr(torch, dtype), ROWS, HeadShape(*heads))
    assert [line for name, part in checks for line in bits.differences(name, part, ROWS, COUNTS)] == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "window", "softcap"),
    [*((heads, None, None) for heads in HEADS), (HEADS[0], 100, None), (HEADS[3], 24, None), (HEADS[0], None, 30.0)],
)
@torch.inference_mode()
def test_attention_in_chunks(
    dtype: str, heads: tuple[int, int, int], window: int | None, softcap: float | None
) -> None:
    part = bits.attention("cuda", getattr(torch, dtype), ROWS, HeadShape(*heads), window, softcap)
    assert bits.differences(f"attention {heads} {window} {softcap}", part, ROWS, COUNTS) == []


@pytest.mark.parametrize("heads", HEADS)
@torch.inference_mode()
def test_attention_to_fp8_in_chunks(heads: tuple[int, int, int]) -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU that knows fp8")
    part = bits.attention("cuda", torch.bfloat16, ROWS, HeadShape(*heads), None, None, True)
    assert bits.differences(f"attention to fp8 {heads}", part, ROWS, COUNTS) == []


@torch.inference_mode()
def test_the_measure_would_show_a_gemm_that_depends_on_its_batch() -> None:
    """The library's own GEMM does: if no batch of any size shows it, the comparison above is blind."""
    weight, rows = torch.randn(3072, 4096, device="cuda"), torch.randn(ROWS, 4096, device="cuda")
    kind = torch.bfloat16
    part = lambda a, b: [torch.mm(rows[a:b].to(kind), weight.to(kind).t())]  # noqa: E731
    assert bits.differences("library", part, ROWS, COUNTS) != []
