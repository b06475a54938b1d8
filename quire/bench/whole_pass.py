"""Logits of texts by a decoder alone: one pass, in a KV cache of its own."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from quire.kernels.types import StepContext
from quire.models.decoder import Decoder

_BLOCK = 1
"""Tokens of a block of that cache: with one, texts share their beginnings to the token."""


def logits_of(decoder: Decoder, tokens: list[int]) -> Tensor:
    """[n, vocabulary]: of every position."""
    return last_logits(decoder, [tokens], [len(tokens)])[0]


def last_logits(decoder: Decoder, texts: Sequence[list[int]], kept: Sequence[int]) -> list[Tensor]:
    """[kept[i], vocabulary] of the last positions of each text, all texts in one pass.

    What a text has in common with the one before it is computed once: a layer writes all keys and values before it
    reads any.
    """
    groups = len(decoder.spec.cache_groups())
    shared = [0] + [min(_common(a, b), len(b) - keep) for a, b, keep in zip(texts, texts[1:], kept[1:], strict=False)]
    lengths, new = [len(text) for text in texts], [len(text) - own for text, own in zip(texts, shared, strict=True)]
    caches = decoder.allocate_caches([sum(new)] * groups, _BLOCK)
    table = torch.zeros(len(texts), max(lengths), dtype=torch.int32)
    ends = list(accumulate(new))
    for row, (begin, length, end) in enumerate(zip(shared, lengths, ends, strict=True)):
        table[row, :begin] = table[row - 1, :begin]
        table[row, begin:length] = torch.arange(end - (length - begin), end)
    positions = torch.cat([torch.arange(begin, length) for begin, length in zip(shared, lengths, strict=True)])
    ctx = StepContext(
        positions, torch.tensor([0, *ends], dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32), (table,) * groups, (torch.arange(sum(new)),) * groups)
    tokens = [token for text, begin in zip(texts, shared, strict=True) for token in text[begin:]]
    stream = decoder.forward(torch.tensor(tokens), ctx, caches)
    wanted = torch.cat([torch.arange(end - count, end) for end, count in zip(ends, kept, strict=True)])
    return list(decoder.logits(stream[wanted]).float().split(list(kept)))


def _common(one: list[int], other: list[int]) -> int:
    """Tokens with which both begin."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
