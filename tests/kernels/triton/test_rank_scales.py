"""Rows in fp8 or int8 of which ranks have some columns each: by the largest number of whole rows, with the bits of one
rank. Ranks are threads that take turns: Triton's interpreter runs one kernel at a time. With a GPU the kernels are
compiled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from quire.kernels.quantized import Fp8Weight, QuantizedWeight, Rounding
from quire.kernels.slices import RankTree, Slices
from quire.kernels.triton import coded_rows, linear_fixed
from quire.layers.linear import SharedLinear
from quire.models.build import build_decoder, stored_parts
from quire.models.loader.source import resolve_model
from quire.models.registry import read_spec
from quire.models.shard import shard_of
from quire.ops.device_weights import BytesLinear
from quire.ops.triton import TritonOps
from quire.parallel.collectives import TensorGroup
from quire.parallel.place import Place
from quire.parallel.threads import ThreadGroup, thread_collectives
from tests.fp8_checkpoints import KINDS, compressed_fp8, fp8
from tests.integer_checkpoints import compressed, compressed_config, write_checkpoint
from tests.paged_driver import PagedDriver
from tests.parallel_ranks.rank_threads import side_by_side

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HALF = torch.float16
"""The interpreter rounds to it as torch does; of bfloat16 it cuts off what does not fit."""
FP8_AT_LOAD, INT8_AT_LOAD = Rounding(None, fp8=True), Rounding(8, 0)


class TurnGroup(TensorGroup):
    """A thread's side of a group: who waits for the others lets them run."""

    def __init__(self, inner: ThreadGroup, turn: threading.Lock) -> None:
        super().__init__(inner.rank, inner.size)
        self._inner, self._turn = inner, turn
        self.agreed = 0
        """Exchanges of largest numbers so far."""

    def exchange(self, mine: Tensor, counts: Sequence[int] | None = None) -> list[Tensor]:
        self._turn.release()
        try:
            return self._inner.exchange(mine, counts)
        finally:
            self._turn.acquire()

    def maximum(self, mine: Tensor) -> Tensor:
        self.agreed += 1
        return super().maximum(mine)


def over_ranks(size: int, call: Callable[[TurnGroup], Any]) -> list[Any]:
    turn, everybody = threading.Lock(), [each.group for each in thread_collectives(size, 1)]
    groups = [TurnGroup(group, turn) for group in everybody if isinstance(group, ThreadGroup)]

    def run(group: TurnGroup) -> Any:
        with turn, torch.inference_mode():
            return call(group)

    return side_by_side([lambda group=group: run(group) for group in groups],
                        lambda: [group.close() for group in everybody if group is not None] and None)


def numbers(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, HALF)


def rows_of(count: int, width: int) -> Tensor:
    """The largest number of a row is now here, now there."""
    x = numbers(count, width, seed=count)
    x[torch.arange(count, device=DEVICE), torch.arange(count, device=DEVICE) * 37 % width] *= 9
    return x


def test_the_largest_numbers_of_parts_make_the_codes_of_the_whole() -> None:
    x = rows_of(5, 96)
    x[3] = 0
    for dtype in (coded_rows.FP8, torch.int8):
        want = coded_rows.quantize_rows(x, dtype=dtype)
        parts = [part.contiguous() for part in x.split([32, 64], 1)]
        peaks = torch.stack([coded_rows.row_peaks(part) for part in parts]).amax(0)
        assert torch.equal(peaks, x.float().abs().amax(1))
        found = [coded_rows.quantize_rows(part, peaks=peaks, dtype=dtype) for part in parts]
        assert torch.equal(torch.cat([each.codes.view(torch.uint8) for each in found], 1), want.codes.view(torch.uint8))
        assert all(torch.equal(each.scales, want.scales) for each in found)
        assert torch.equal(coded_rows.row_peaks(x, torch.empty(5, device=DEVICE)), peaks)


def file_int8(features: int, width: int) -> QuantizedWeight:
    codes = torch.randint(1, 256, (features, width), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    scales = torch.rand(features, 1, generator=torch.Generator().manual_seed(5)) / 50 + 0.01
    return QuantizedWeight(codes.to(DEVICE), scales.to(DEVICE), None, 128, 8, width, int8_rows=True)


def file_fp8(features: int, width: int, group: int | None = None, fixed: float | None = None) -> Fp8Weight:
    group = group or width
    scales = torch.rand(features, -(-width // group), generator=torch.Generator().manual_seed(4)) + 0.5
    return Fp8Weight(numbers(features, width, seed=6).to(coded_rows.FP8), scales.to(DEVICE), group, fixed)


FEATURES = 40
HEADS_OF_48, WIDTH_OF_272, HEADS_OF_64 = Slices.of_heads(9, 48), Slices.of_width(272), Slices.of_heads(6, 64)
HEADS_OF_32 = Slices.of_heads(9, 32)
CASES: dict[str, tuple[Slices, Rounding | None, Callable[[int], Any], bool]] = {
    "fp8 at load, uneven heads": (HEADS_OF_48, FP8_AT_LOAD, lambda width: numbers(FEATURES, width), True),
    "fp8 at load, uneven slices": (WIDTH_OF_272, FP8_AT_LOAD, lambda width: numbers(FEATURES, width), True),
    "int8 at load, uneven heads": (HEADS_OF_32, INT8_AT_LOAD, lambda width: numbers(FEATURES, width), True),
    "int8 at load, uneven slices": (Slices.of_width(288), INT8_AT_LOAD, lambda width: numbers(FEATURES, width), True),
    "int8 of a file": (HEADS_OF_32, Rounding(None), lambda width: file_int8(FEATURES, width), True),
    "fp8 of a file": (HEADS_OF_48, Rounding(None), lambda width: file_fp8(FEATURES, width), True),
    "fp8 with a fixed scale": (HEADS_OF_48, Rounding(None), lambda width: file_fp8(FEATURES, width, None, 0.08), False),
    "blocks that hold two heads": (HEADS_OF_64, Rounding(None), lambda width: file_fp8(FEATURES, width, 128), True),
    "blocks that heads cut": (HEADS_OF_48, Rounding(None), lambda width: file_fp8(FEATURES, width, 128), True),
    "blocks that slices cut": (Slices.of_width(1120), Rounding(None), lambda width: file_fp8(FEATURES, width, 128),
                               True),
}  # fmt: skip


def part_of(weight: Any, first: int, last: int) -> Any:
    """A rank's columns, as loaders cut them."""
    if isinstance(weight, Tensor):
        return weight[:, first:last].contiguous()
    return (weight.finer([(first, last)]) if isinstance(weight, Fp8Weight) else weight).columns(first, last)


@pytest.mark.parametrize("kind", CASES)
@torch.inference_mode()
def test_ranks_have_the_bits_of_one(kind: str) -> None:
    slices, rounding, make, exchanges = CASES[kind]
    weight, bias = make(slices.sum_width), numbers(FEATURES, seed=9)
    x, residual = rows_of(7, slices.sum_width), numbers(7, FEATURES, seed=1)
    ops = TritonOps(DEVICE, HALF, deterministic=True, rounding=rounding)
    kept = ops.quantized(weight, slices)
    assert kept is not None
    whole = ops.pack_quantized([kept], bias, slices)
    assert isinstance(whole, BytesLinear)
    want = ops.linear(x, whole, residual)
    exact = x.double() @ kept.dequantized().double().t() + bias.double() + residual.double()
    assert (want.double() - exact).norm() < 0.05 * exact.norm()
    for size in (2, 3, min(8, slices.total)):
        tree = RankTree.even(slices.total, size)

        def run(group: TurnGroup, tree: RankTree = tree) -> Tensor:
            run = slices.part(*tree.runs[group.rank])
            first, last = (slices.border(index) for index in tree.runs[group.rank])
            linear = SharedLinear(ops, "down", True, None, run, tree, group)
            linear.receive("down", "weight", part_of(weight, first, last))
            linear.receive("down", "bias", bias)
            assert isinstance(linear.packed, BytesLinear)
            found = linear._summed(x[:, first:last].contiguous(), residual)
            assert group.agreed == exchanges
            return found

        for rank, found in enumerate(over_ranks(size, run)):
            assert torch.equal(found, want), (size, rank)


@pytest.mark.parametrize("kind", ["fp8 at load, uneven slices", "int8 of a file", "blocks that heads cut"])
@torch.inference_mode()
def test_programs_that_sum_all_slices_have_the_bits_of_those_that_share_them(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a row those that it has in another batch."""
    slices, rounding, make, _ = CASES[kind]
    ops = TritonOps(DEVICE, HALF, deterministic=True, rounding=rounding)
    kept = ops.quantized(make(slices.sum_width), slices)
    assert kept is not None
    packed = ops.pack_quantized([kept], numbers(FEATURES, seed=9), slices)
    x, residual = rows_of(67, slices.sum_width), numbers(67, FEATURES, seed=1)
    shared = ops.linear(x, packed, residual)
    assert torch.equal(ops.linear(x[60:66].contiguous(), packed, residual[60:66].contiguous()), shared[60:66])
    monkeypatch.setattr(linear_fixed, "_PROGRAMS", 1)
    assert torch.equal(ops.linear(x, packed, residual), shared)


def test_what_cannot_be_cut_alike_is_floats_at_every_size() -> None:
    """int8 in slices of 48 columns: a rank's part could not have a scale for whole units of 32."""
    for rounding, make in ((INT8_AT_LOAD, lambda width: numbers(FEATURES, width)),
                           (Rounding(None), lambda width: file_int8(FEATURES, width))):
        ops = TritonOps(DEVICE, HALF, deterministic=True, rounding=rounding)
        for run in (HEADS_OF_48.part(0, 2), HEADS_OF_48.part(0, 8)):
            assert ops.quantized(make(run.width), run) is None
        assert TritonOps(DEVICE, HALF, rounding=rounding).quantized(make(96 * 4), None) is None  # 40 features
        assert ops.quantized(make(96 * 4), None) is not None


SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 288, "num_attention_heads": 3,
                         "num_key_value_heads": 1, "head_dim": 32, "num_hidden_layers": 1}
W8A8 = (compressed(8, -1, plain=True), compressed_config(8, -1, plain=True))
PLAIN = (lambda weight: ({"weight": weight}, weight), None)
MODELS: dict[str, tuple[Any, Rounding, tuple[int, ...]]] = {
    "fp8": (PLAIN, FP8_AT_LOAD, (2, 3)), "int8": (PLAIN, INT8_AT_LOAD, (3,)),
    "W8A8": (W8A8, Rounding(None), (2,)), "fp8 dynamic": ((fp8(), compressed_fp8()), Rounding(None), (2,)),
    "fp8 static": (KINDS["compressed, static"], Rounding(None), (2,)),
    "blocks": (KINDS["blocks"], Rounding(None), (2,)),
}  # fmt: skip


class Rank:
    """A decoder for a `PagedDriver`: its logits are those of the rank that draws, zeros elsewhere."""

    def __init__(self, folder: Path, rounding: Rounding, rank: int, size: int, group: TensorGroup | None) -> None:
        source = resolve_model(str(folder))
        shard = None if group is None else shard_of(read_spec(source.config), Place(rank, size, 0, 1))
        parts = None if shard is None else stored_parts(source.config, shard)
        ops = TritonOps(DEVICE, HALF, deterministic=True, rounding=rounding)
        self.decoder = build_decoder(source.config, source.stored_weights(parts), ops, max_model_len=64, shard=shard,
                                     ranks=group, dtype=HALF)
        self.spec, self.forward = self.decoder.spec, self.decoder.forward
        self.allocate_caches = self.decoder.allocate_caches

    def logits(self, hidden: Any, ctx: Any = None) -> Tensor:
        rows = len(hidden.rows)
        found = self.decoder.gathered_logits(hidden, ctx)
        return torch.zeros(rows, self.spec.vocab_size) if found is None else found

    def run(self) -> Tensor:
        return PagedDriver(self, num_blocks=8).run(0, [5, 3, 96], [2, 1])  # type: ignore[arg-type]


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu/test_quantized_ranks.py has engines")
@pytest.mark.parametrize("kind", MODELS)
def test_a_decoder_over_ranks_has_the_bits_of_one(kind: str, tmp_path: Path) -> None:
    (pack, config), rounding, sizes = MODELS[kind]
    write_checkpoint(tmp_path, pack, config, **SIZES)
    with torch.inference_mode():
        one = Rank(tmp_path, rounding, 0, 1, None)
        layer = one.decoder.layers[0]
        assert isinstance(layer.attn.out.packed, BytesLinear) and isinstance(layer.mlp.down.packed, BytesLinear)
        want = one.run()
    for size in sizes:
        def run(group: TurnGroup, size: int = size) -> tuple[Tensor, int]:
            return Rank(tmp_path, rounding, group.rank, size, group).run(), group.agreed

        (found, agreed), *_ = over_ranks(size, run)
        assert torch.equal(found, want), size
        assert agreed == (0 if "static" in kind else 2 * 2)  # of heads and of the MLP, in two steps
