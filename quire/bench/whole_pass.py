"""Logits of every position of a text, by a decoder alone: one pass, in a KV cache of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.kernels.types import StepContext
from quire.models.decoder import Decoder

_BLOCK = 16


def logits_of(decoder: Decoder, tokens: list[int]) -> Tensor:
    """[n, vocabulary]."""
    groups, blocks = len(decoder.spec.cache_groups()), -(-len(tokens) // _BLOCK)
    caches = decoder.allocate_caches([blocks] * groups, _BLOCK)
    table, places = torch.arange(blocks, dtype=torch.int32)[None], torch.arange(len(tokens))
    ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
    ctx = StepContext(places, ends, ends[1:], (table,) * groups, (places,) * groups)
    return decoder.logits(decoder.forward(torch.tensor(tokens), ctx, caches))
