"""KV is what its spec says: sizes, block copies and transfers go by the spec's parts, whatever they are called."""

from __future__ import annotations

from dataclasses import replace
from queue import SimpleQueue

import pytest
import torch
from torch import Tensor

from quire.errors import EngineError, InvariantError
from quire.kernels.kv_spec import KVPart, KVSpec
from quire.kernels.types import HeadShape, LatentShape, LayerCache, pair_cache
from quire.ops.cpu import CpuOps
from quire.ops.interface import Ops
from quire.ops.reference import TorchOps
from quire.scheduler.plan import BlockMove, TransferReport, TransferStart
from quire.worker.transfer import HostTransfer
from tests.kernels.triton.interpreter import prepare

interpreted = prepare() and not torch.cuda.is_available()
BLOCKS, SIZE = 6, 4
ODD = replace(KVSpec.pair(1, 1), parts=(KVPart("latent", 1, 5), KVPart("rope", 1, 2), KVPart("gate", 3, 2)))
"""Three parts of unlike sizes, as no model has them yet."""


def cache_of(spec: KVSpec) -> LayerCache:
    shapes = {part.name: (BLOCKS, part.heads, SIZE, part.width) for part in spec.parts}
    return LayerCache(spec, SIZE, {name: torch.randn(shape) for name, shape in shapes.items()})


def content(cache: LayerCache) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in cache.tensors.items()}


def test_a_pair_is_a_key_and_a_value_of_every_kv_head() -> None:
    spec = KVSpec.pair(3, 8, window=16)
    assert [(part.name, part.elements_per_token) for part in spec.parts] == [("k", 24), ("v", 24)]
    assert (spec.elements_per_token, spec.bytes_per_token(), spec.bytes_per_block(16, 2)) == (48, 192, 1536)
    assert spec.heads_of_pair() == (3, 8) and HeadShape(6, 3, 8).kv == replace(spec, window=None)


def test_a_latent_is_one_vector_for_all_heads() -> None:
    spec = LatentShape(128, 512, 64).kv
    assert (spec.kind, spec.elements_per_token, spec.bytes_per_token()) == ("latent", 576, 2304)
    for ops in (CpuOps(num_threads=1), TorchOps()):
        cache = ops.allocate_cache(spec, BLOCKS, SIZE)
        assert list(cache.tensors) == ["latent"] and cache.nbytes == BLOCKS * spec.bytes_per_block(SIZE)


@pytest.mark.parametrize("ops", [CpuOps(num_threads=1), TorchOps()], ids=["cpu", "reference"])
def test_a_cache_is_as_large_as_its_spec_says(ops: Ops) -> None:
    spec = KVSpec.pair(3, 8)
    cache = ops.allocate_cache(spec, BLOCKS, SIZE)
    assert cache.spec is spec and list(cache.tensors) == ["k", "v"]
    assert (cache.num_blocks, cache.nbytes) == (BLOCKS, BLOCKS * spec.bytes_per_block(SIZE))


def test_a_kind_that_a_backend_does_not_know_is_refused() -> None:
    other = replace(ODD, kind="state")  # type: ignore[arg-type]
    for ops in (CpuOps(num_threads=1), TorchOps()):
        with pytest.raises(InvariantError, match="'state'"):
            ops.allocate_cache(other, BLOCKS, SIZE)


@pytest.mark.parametrize("name", ["cpu", "reference", "triton"])
def test_a_block_is_copied_in_every_part(name: str) -> None:
    if name == "triton":
        if not interpreted:
            pytest.skip("Triton's interpreter is for machines without a GPU, where Triton is installed")
        from quire.kernels.triton import copy

        def run(cache: LayerCache, source: list[int], target: list[int]) -> None:
            copy.copy_blocks(cache, *(torch.tensor(part, dtype=torch.int32) for part in (source, target)))
    else:
        run = (CpuOps(num_threads=1) if name == "cpu" else TorchOps()).copy_blocks  # type: ignore[assignment]
    for spec in (ODD, KVSpec.pair(2, 3)):
        cache = cache_of(spec)
        want = content(cache)
        for part in want.values():
            part[[3, 5]] = part[[0, 1]].clone()
        run(cache, [0, 1], [3, 5])
        assert all(torch.equal(cache.tensors[part], want[part]) for part in want)


def move(transfer: HostTransfer, pairs: list[tuple[int, int]], out: bool) -> None:
    reports: SimpleQueue[TransferReport] = SimpleQueue()
    transfer.start(TransferStart(1, "host", out, [BlockMove(0, *pair) for pair in pairs]), reports.put)
    assert reports.get(timeout=10) == TransferReport(1, len(pairs), finished=True)


def test_a_block_goes_to_the_host_and_back_in_every_part() -> None:
    cache = cache_of(ODD)
    before = content(cache)
    transfer = HostTransfer(2)
    transfer.register([cache], [0])
    move(transfer, [(1, 0), (4, 1)], out=True)
    for part in cache.tensors.values():
        part.zero_()
    move(transfer, [(2, 1), (3, 0)], out=False)
    transfer.close()
    for name, part in cache.tensors.items():
        assert torch.equal(part[[2, 3]], before[name][[4, 1]]) and not part[[0, 1, 4, 5]].any()


def test_heads_that_a_cache_was_not_made_for_are_refused() -> None:
    cache = CpuOps(num_threads=1).allocate_cache(KVSpec.pair(2, 8), BLOCKS, SIZE)
    described = pair_cache(cache.k, cache.v, SIZE)
    assert described.spec == KVSpec.pair(2, 8)
    broken = LayerCache(KVSpec.pair(3, 8), SIZE, cache.tensors)
    heads = HeadShape(6, 3, 8)
    with pytest.raises(EngineError, match="3 kv heads of 8"):
        CpuOps(num_threads=1).attend(torch.zeros(1, heads.width), broken, None, 0, heads, 1.0, None, None)  # type: ignore[arg-type]
