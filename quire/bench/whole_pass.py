"""Logits of texts by a decoder alone: one pass, in a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.types import StepContext
from quire.models.decoder import Decoder

_BLOCK = 16


def logits_of(decoder: Decoder, tokens: list[int]) -> Tensor:
    """[n, vocabulary]: of every position."""
    return last_logits(decoder, [tokens], [len(tokens)])[0]


def last_logits(decoder: Decoder, texts: Sequence[list[int]], kept: Sequence[int]) -> list[Tensor]:
    """[kept[i], vocabulary] of the last positions of each text, all texts in one pass."""
    groups, lengths = len(decoder.spec.cache_groups()), [len(text) for text in texts]
    blocks = [-(-length // _BLOCK) for length in lengths]
    caches = decoder.allocate_caches([sum(blocks)] * groups, _BLOCK)
    table = torch.zeros(len(texts), max(blocks), dtype=torch.int32)
    slots = []
    for row, (first, count, length) in enumerate(zip([0, *accumulate(blocks)], blocks, lengths, strict=False)):
        table[row, :count] = torch.arange(first, first + count)
        slots.append(torch.arange(first * _BLOCK, first * _BLOCK + length))
    ends = list(accumulate(lengths))
    ctx = StepContext(
        torch.cat([torch.arange(length) for length in lengths]), torch.tensor([0, *ends], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32), (table,) * groups, (torch.cat(slots),) * groups)
    stream = decoder.forward(torch.tensor([token for text in texts for token in text]), ctx, caches)
    wanted = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, kept, strict=True)])
    return list(decoder.logits(stream[wanted]).split(list(kept)))
