"""What is fused across a layer's border changes no result: the same bits whatever a device says it fuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from quire.layers.norm import Norm
from quire.layers.spec import NormSpec
from quire.layers.stream import ResidualStream, Unnormed
from quire.models.build import build_decoder, dummy_weights
from quire.models.decoder import Decoder
from quire.models.shard import Shard
from quire.ops.interface import Fusion, Ops
from quire.ops.reference import TorchOps
from quire.parallel.place import Place
from tests.checkpoints import config_of, make_model
from tests.paged_driver import PagedDriver

TOKENS = [5, 3, 96, 0, 41, 7]


class FusingOps(TorchOps):
    """Fuses as it is told, by the forms that every device inherits, and counts them."""

    def __init__(self, fusion: Fusion) -> None:
        self._fusion = fusion
        self.sums = self.norms = 0

    def fusion(self, rows: int, width: int) -> Fusion:
        return self._fusion

    def add_rms_norm(self, *args: Any) -> Tensor:
        self.sums += 1
        return super().add_rms_norm(*args)

    def norm_linear(self, *args: Any) -> Tensor:
        self.norms += 1
        return super().norm_linear(*args)


def decoder_of(family: str, ops: Ops, **part: int) -> Decoder:
    config = config_of(make_model(family))
    return build_decoder(config, dummy_weights(config), ops, **part)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3", "gpt2", "opt"])
@pytest.mark.parametrize(
    "fusion", [Fusion.SUM_WITH_NORM, Fusion.NORM_WITH_GEMM, Fusion.NORM_WITH_ROUNDED_GEMM])
def test_logits_are_the_same_bits_whatever_is_fused(family: str, fusion: Fusion) -> None:
    ops = FusingOps(fusion)
    plain, fused = PagedDriver(decoder_of(family, TorchOps())), PagedDriver(decoder_of(family, ops))
    assert torch.equal(fused.run(0, TOKENS, [3, 1, 2]), plain.run(0, TOKENS, [3, 1, 2]))
    norms = 3 * (2 * 3 + 1)
    """Three steps through two norms in each of three layers, and the last."""
    fuses = family in ("llama", "qwen3")
    # The first norm of a step finds nothing owed.
    assert ops.sums == (norms - 3 if fuses and fusion is Fusion.SUM_WITH_NORM else 0)
    assert ops.norms == (norms if fuses and fusion is not Fusion.SUM_WITH_NORM else 0)


@pytest.mark.parametrize("fusion", list(Fusion))
def test_hidden_states_stages_and_skipped_layers_are_those_of_a_plain_stream(fusion: Fusion) -> None:
    plain, fused = decoder_of("llama", TorchOps()), decoder_of("llama", FusingOps(fusion))
    driver = PagedDriver(plain)
    ctx, ids, names = driver._context({0: TOKENS}), torch.tensor(TOKENS), ("embed", "layers.0", "layers.2")

    def caches(decoder: Decoder) -> list[Any]:
        return decoder.allocate_caches([64], 16)

    want_hidden, want = plain.forward_capturing(ids, ctx, caches(plain), names)
    hidden, got = fused.forward_capturing(ids, ctx, caches(fused), names)
    assert all(torch.equal(got[name], want[name]) for name in names)
    assert torch.equal(hidden.settled(), want_hidden.settled())
    thin, thin_want = (each.forward_some(ids, ctx, caches(each), [0, 2]) for each in (fused, plain))
    assert torch.equal(fused.logits(thin), plain.logits(thin_want))
    shards = [Shard(plain.spec, Place(0, 1, stage, 2), *run) for stage, run in enumerate(((0, 1), (1, 3)))]
    first, second = (decoder_of("llama", FusingOps(fusion), shard=shard) for shard in shards)
    handed = first.forward(ids, ctx, caches(first)).settled()
    assert torch.equal(second.logits(second.forward(handed, ctx, caches(second))), plain.logits(want_hidden))


@pytest.mark.parametrize("fusion", list(Fusion))
def test_some_rows_of_a_stream_are_a_stream(fusion: Fusion) -> None:
    decoder = decoder_of("llama", FusingOps(fusion))
    driver = PagedDriver(decoder)
    hidden = decoder.forward(torch.tensor(TOKENS), driver._context({0: TOKENS}), driver.caches)
    assert len(hidden) == len(TOKENS)
    # One row for two who draw from it, and logits into a buffer that is there already.
    some, out = hidden[torch.tensor([5, 2, 5])], torch.empty(3, decoder.spec.vocab_size)
    assert decoder.logits(some, None, out) is out
    torch.testing.assert_close(out, decoder.logits(hidden)[[5, 2, 5]])


def test_a_sum_that_is_owed_is_never_lost() -> None:
    ops = FusingOps(Fusion.SUM_WITH_NORM)
    rows, delta = torch.randn(2, 4), torch.randn(2, 4)
    stream = ResidualStream(ops, rows.clone(), True)
    assert stream.owes
    stream.owe(delta)
    stream.owe(delta)
    assert torch.equal(stream.settled(), rows + delta + delta)
    assert torch.equal(stream.copied(), stream.settled()) and torch.equal(stream.rows, rows + delta)
    stream.add(delta)
    assert torch.equal(stream.rows, rows + delta + delta + delta)


def test_rows_still_to_be_normed_can_be_normed_by_whoever_needs_them() -> None:
    ops = FusingOps(Fusion.NORM_WITH_GEMM)
    norm = Norm(ops, NormSpec("rms", 1e-5), 4)
    rows = torch.randn(2, 4)
    given = ResidualStream(ops, rows, True).normed(norm)
    assert isinstance(given, Unnormed) and torch.equal(given.normed(), norm(rows))
