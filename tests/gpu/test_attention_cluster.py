"""Decode attention in clusters on a real GPU: right, the same each time, never too early."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.attention.triton import DeviceContext, TritonAttention
    from quire.kernels.cuda import attention_cluster
    from quire.kernels.cuda.attention_cluster import ClusterSizes, cluster_decode_attention, fits
    from quire.kernels.decode_lengths import Lengths
    from quire.kernels.triton import attention_split
    from quire.kernels.triton.attention_few import few_decode_attention
    from quire.kernels.types import HeadShape, HeadTurn, pair_cache
    from tests.kernels.triton.cases import check_rope_decode

QWEN = (16, 8, 128)
SIZES = ((8, 4), (8, 8), (4, 4), (2, 4), (1, 4))


def turn_of(positions: int, norms: bool = True) -> HeadTurn:
    angles = torch.rand(positions, 64, device="cuda") * 6
    gains = [torch.rand(128, device="cuda") + 0.5 if norms else None for _ in range(2)]
    return HeadTurn(torch.cat((angles.cos(), angles.sin()), 1), *gains, 1e-6)


@pytest.fixture(autouse=True)
def needs_hopper() -> None:
    pages = torch.zeros(2, 8, 16, 128, device="cuda", dtype=torch.bfloat16)
    if not fits(pages.device, pages.dtype, HeadShape(*QWEN), turn_of(4), pair_cache(pages, pages, 16)):
        pytest.skip("needs Hopper and NVRTC")


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize(
    ("shape", "block_size", "lengths", "more"),
    [
        (QWEN, 16, [384], {}),
        ((32, 8, 128), 16, [1, 16, 17, 0], {"rows": True}),
        ((40, 8, 128), 32, [512, 513, 2000, 37, 0, 640, 5, 129], {}),
        ((28, 4, 128), 64, [1300, 1024], {"norms": False, "rows": True}),
        ((8, 8, 128), 16, [700, 300], {"window": 256}),
        ((4, 2, 128), 16, [9000], {}),
    ],
)
@torch.inference_mode()
def test_steps_are_those_of_the_references(
    sizes: tuple[int, int], shape: tuple[int, int, int], block_size: int, lengths: list[int], more: dict[str, int]
) -> None:
    torch.manual_seed(len(lengths))
    given = ClusterSizes(*sizes)
    for pdl in (False, True):
        check_rope_decode("cuda", torch.bfloat16, HeadShape(*shape), block_size, lengths, few=True, clusters=given,
                          pdl=pdl, repeat=3, extra=16, **more)  # fmt: skip


@pytest.mark.parametrize("count", [1, 2])
@torch.inference_mode()
def test_layers_of_a_graph_see_what_the_ones_before_wrote(count: int) -> None:
    """Each layer's q, k and v are made of what the one before attended to, with early launches all the way."""
    torch.manual_seed(count)
    shape, page, layers = HeadShape(*QWEN), 16, 12
    pages = 40 * count
    made = [[torch.randn(pages, 8, page, 128, device="cuda").bfloat16() for _ in range(2)] for _ in range(layers)]
    table = torch.randperm(pages, device="cuda").int().view(count, 40)
    lengths = torch.randint(1, 630, (count,), device="cuda", dtype=torch.int32)
    weights = [(torch.randn(shape.width, 2048, device="cuda") / 45).bfloat16() for _ in range(layers)]
    split = attention_split.DecodeSplit.allocate(count, 16, "cuda")
    attention_split.split_decode(split, lengths, None)
    attention = TritonAttention(table.device, torch.bfloat16, pdl=True, same_type=True)
    scratch = attention.reserve(shape, split.tasks, count)
    turn, start = turn_of(640), torch.randn(count, 2048, device="cuda").bfloat16()

    def run(clusters: bool, pdl: bool) -> tuple[torch.Tensor, list[torch.Tensor]]:
        x, caches = start, [pair_cache(k.clone(), v.clone(), page) for k, v in made]
        for weight, cache in zip(weights, caches, strict=True):
            qkv = x @ weight.t()
            if clusters:
                found = cluster_decode_attention(qkv, cache, table, None, lengths, shape, 0.088, turn, pdl=pdl)
                assert found is not None
                x = found
            else:
                x = few_decode_attention(qkv, cache, table, None, lengths, split, scratch, shape, 0.088, turn)
        return x, [cache.k for cache in caches]

    want, kept = run(False, False)
    alone, _ = run(True, False)
    torch.testing.assert_close(alone.float(), want.float(), rtol=0.05, atol=0.05)
    run(True, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, keys = run(True, True)
    for _ in range(10):
        graph.replay()
        assert torch.equal(found, alone)
    for mine, other in zip(keys, kept, strict=True):
        torch.testing.assert_close(mine.float(), other.float(), rtol=0.05, atol=0.1)


@torch.inference_mode()
def test_attention_takes_it_in_short_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    shape, pages = HeadShape(*QWEN), torch.randn(8, 8, 16, 128, device="cuda").bfloat16()
    cache, turn = pair_cache(pages, pages.clone(), 16), turn_of(130)
    lengths = torch.tensor([100], dtype=torch.int32, device="cuda")
    table = torch.arange(8, dtype=torch.int32, device="cuda").view(1, 8)
    start = torch.tensor([0, 1], dtype=torch.int32, device="cuda")
    qkv = torch.randn(1, shape.width, device="cuda").bfloat16()
    found = []
    real = attention_cluster.cluster_decode_attention
    taken = []
    monkeypatch.setattr(attention_cluster, "cluster_decode_attention",
                        lambda *given, **more: taken.append(True) or real(*given, **more))
    for step in (Lengths.SHORT, Lengths.MIDDLE):
        attention = TritonAttention(table.device, torch.bfloat16, pdl=True, same_type=True)
        assert attention.has_short({shape}, 16, 2560) and not attention.has_short({shape}, 16, 4096)
        split = attention.allocate_split(1, shape)
        ctx = DeviceContext(lengths, start, lengths, (table,), (lengths,), num_decodes=1, splits=(split,),
                            fuse_rope=True, lengths=step)  # fmt: skip
        attention.prepare(ctx, (None,))
        attention.reserve(shape, split.tasks, 1)
        found.append(attention(qkv, cache, ctx, 0, shape, 0.088, None, None, turn))
        assert len(taken) == 1
    torch.testing.assert_close(found[0].float(), found[1].float(), rtol=0.02, atol=0.02)
