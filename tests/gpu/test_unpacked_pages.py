"""Chunks over a context in fp8 on a chip: unpacked pages under the kernel of prompts, beside the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="needs a Hopper GPU"
)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("heads", "page"), [((32, 8), 16), ((16, 8), 32), ((8, 1), 64)])
@torch.inference_mode()
def test_chunks_attend_to_unpacked_contexts_without_a_sync(dtype: str, heads: tuple[int, int], page: int) -> None:
    from quire.kernels.triton import hopper_prefill, unpacked_pages
    from quire.kernels.triton.attention_mixed import attention_reference
    from quire.kernels.types import HeadShape, pair_cache
    from tests.kernels.triton import cases

    torch.manual_seed(page)
    kind, shape = getattr(torch, dtype), HeadShape(*heads, 128)
    starts, counts = np.array([0, 3000, 500, 130]), np.array([700, 300, 20, 129])
    lengths = (starts + counts).tolist()
    qkv, cache, table, start, length = cases.paged_batch("cuda", kind, shape, page, counts.tolist(), lengths)
    narrow = pair_cache(cache.k.to(torch.float8_e4m3fn), cache.v.to(torch.float8_e4m3fn), page)
    narrow.scales = torch.linspace(0.5, 1.5, 2 * heads[1], device="cuda").view(2, -1)
    room = unpacked_pages.PageRoom.allocate(shape, page, sum(lengths) + 4 * page, kind, "cuda")
    chosen = unpacked_pages.choose_pages(starts, counts, page, room.pages)
    pages = unpacked_pages.UnpackedPages(*(torch.from_numpy(part).cuda() for part in chosen))
    taken = np.where(counts >= unpacked_pages.LEAST_QUERIES, counts, 0)
    seqs, firsts, _ = hopper_prefill.split_tiles(starts, taken, shape)
    tile_seq, tile_first = torch.from_numpy(seqs).cuda(), torch.from_numpy(firsts).cuda()
    out = torch.full((len(qkv), heads[0] * 128), float("nan"), dtype=kind, device="cuda")

    def attend() -> None:
        wide = unpacked_pages.unpack_pages(narrow, table, None, pages, room)
        hopper_prefill.hopper_prefill(qkv, wide, room.table(), pages.first, start, length, tile_seq, tile_first, shape,
                                      0.1, out=out)  # fmt: skip

    attend()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attend()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    want = attention_reference(qkv, narrow, table, start, length, shape, 0.1)
    for seq, count in enumerate(taken.tolist()):
        mine = slice(int(start[seq]), int(start[seq]) + count)
        assert torch.allclose(out[mine].float(), want[mine].float(), atol=0.02, rtol=0.02)
        assert out[mine.stop : int(start[seq + 1])].isnan().all()
