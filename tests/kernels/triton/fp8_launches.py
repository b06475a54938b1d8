"""Launches of attention over keys and values in fp8, for `compile_for_hopper`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from quire.kernels.triton import (
    attention_decode,
    attention_few,
    attention_rope,
    attention_split,
    hopper_prefill,
    unpacked_pages,
)
from quire.kernels.types import HeadShape, HeadTurn, pair_cache


def over_fp8(dtype: torch.dtype) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Decode steps, with scales and without; chunks of prompts, whose context is unpacked."""
    heads, gain = HeadShape(16, 8, 128), torch.empty(128)
    ints, table = torch.zeros(4, dtype=torch.int32), torch.zeros(4, 8, dtype=torch.int32)
    split = attention_split.DecodeSplit.allocate(4, 8, "cpu")
    parts = attention_decode.DecodeScratch.allocate(split.tasks, 4, heads, "cpu")
    turn, half = HeadTurn(torch.empty(64, 128), gain, gain, 1e-6), partial(torch.empty, dtype=dtype)
    narrow = pair_cache(*(torch.empty(4, 8, 16, 128, dtype=torch.float8_e4m3fn) for _ in range(2)), 16)
    scaled = replace(narrow, scales=torch.ones(2, 8))
    step = table, ints, ints, split, parts, heads, 0.1, turn
    yield "few decode over fp8", lambda: attention_few.few_decode_attention(
        half(2, heads.width), narrow, *step, pdl=True)
    yield "few decode over scaled fp8", lambda: attention_few.few_decode_attention(
        half(2, heads.width), scaled, *step, pdl=True)
    yield "drafted decode over fp8", lambda: attention_few.few_decode_attention(
        half(8, heads.width), scaled, *step, drafts=True, pdl=True)
    yield "turned decode over fp8", lambda: attention_rope.rope_decode_attention(
        half(2, heads.width), scaled, *step, num_stages=3, carried=True, prefetch=True, pdl=True)
    room = unpacked_pages.PageRoom.allocate(heads, 16, 64, dtype, "cpu")
    chosen = unpacked_pages.UnpackedPages(ints, ints)
    yield "unpacked pages", lambda: unpacked_pages.unpack_pages(narrow, table, ints, chosen, room)
    hopper_prefill.multiprocessors = lambda device: 132
    cache = replace(pair_cache(room.k, room.v, 16), scales=scaled.scales)
    yield "hopper prefill of unpacked pages", lambda: hopper_prefill.hopper_prefill(
        half(4, heads.width), cache, room.table(), ints, ints, ints, ints, ints, heads, 0.1, out=half(4, 16 * 128))
