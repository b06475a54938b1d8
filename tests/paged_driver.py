"""Drives a decoder by hand over a paged cache: tests choose batches, chunks, block sizes and placement."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from quire.kernels.types import StepContext
from quire.layers.stream import ResidualStream
from quire.models.decoder import Decoder
from quire.ops.interface import Recorder


class PagedDriver:
    """Sequences by number, their blocks handed out in shuffled order; works with any `Ops`.

    Blocks wholly behind every layer's window are given back and reused, and the table then names block 0,
    which belongs to nobody: a decoder that read behind its window would read another sequence's keys.
    """

    def __init__(
        self, decoder: Decoder, *, block_size: int = 16, num_blocks: int = 64, seed: int = 0,
        recorder: Recorder | None = None,
    ) -> None:
        self.decoder = decoder
        self.recorder = recorder
        self.block_size = block_size
        self._groups = decoder.spec.cache_groups()
        self.caches = decoder.allocate_caches([num_blocks] * len(self._groups), block_size)
        shuffle = random.Random(seed).shuffle
        self._free: list[list[int]] = []
        for _ in self._groups:
            blocks = list(range(1, num_blocks))
            shuffle(blocks)
            self._free.append(blocks)
        self._tables: dict[int, list[list[int]]] = {}
        self._lengths: dict[int, int] = {}

    def step(self, tokens: Mapping[int, Sequence[int]]) -> dict[int, Tensor]:
        """Compute the next tokens of some sequences in one step; logits [n, vocab] of each."""
        ctx = self._context(tokens)
        ids = torch.tensor([token for chunk in tokens.values() for token in chunk])
        logits = self.decoder.logits(self._forward(ids, ctx), ctx)
        for seq in tokens:
            self._give_back_behind_window(seq)
        parts = logits.split([len(chunk) for chunk in tokens.values()])
        return dict(zip(tokens, parts, strict=True))

    def _forward(self, ids: Tensor, ctx: StepContext) -> ResidualStream:
        if self.recorder is None:
            return self.decoder.forward(ids, ctx, self.caches)
        return self.decoder.resumed(self.recorder.run(
            None, ids, ctx, self.caches, lambda: self.decoder.forward(ids, ctx, self.caches).settled()))

    def run(self, seq: int, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Compute one sequence in chunks of these sizes; logits of all its tokens."""
        rows, start = [], 0
        for size in chunks:
            rows.append(self.step({seq: tokens[start : start + size]})[seq])
            start += size
        if start != len(tokens):
            raise ValueError(f"chunks cover {start} of {len(tokens)} tokens")
        return torch.cat(rows)

    def release(self, seq: int) -> None:
        for free, table in zip(self._free, self._tables.pop(seq), strict=True):
            free.extend(block for block in table if block)
        del self._lengths[seq]

    def _context(self, tokens: Mapping[int, Sequence[int]]) -> StepContext:
        positions: list[int] = []
        starts, lengths = [0], []
        slots: list[list[int]] = [[] for _ in self._groups]
        for seq, chunk in tokens.items():
            begin = self._lengths.get(seq, 0)
            end = begin + len(chunk)
            self._grow(seq, end)
            positions += range(begin, end)
            starts.append(len(positions))
            lengths.append(end)
            for group, table in enumerate(self._tables[seq]):
                slots[group] += [self._slot(table, p) for p in range(begin, end)]
            self._lengths[seq] = end
        tables = [[self._tables[seq][group] for seq in tokens] for group in range(len(self._groups))]
        return StepContext(
            positions=torch.tensor(positions),
            query_start=torch.tensor(starts, dtype=torch.int32),
            context_len=torch.tensor(lengths, dtype=torch.int32),
            block_tables=tuple(_padded(rows) for rows in tables),
            slots=tuple(torch.tensor(s) for s in slots),
        )

    def _slot(self, table: list[int], position: int) -> int:
        return table[position // self.block_size] * self.block_size + position % self.block_size

    def _grow(self, seq: int, length: int) -> None:
        tables = self._tables.setdefault(seq, [[] for _ in self._groups])
        for free, table in zip(self._free, tables, strict=True):
            while len(table) * self.block_size < length:
                table.append(free.pop())

    def _give_back_behind_window(self, seq: int) -> None:
        for group, free, table in zip(self._groups, self._free, self._tables[seq], strict=True):
            if group.window is None:
                continue
            first_seen = self._lengths[seq] + 1 - group.window
            for index in range(max(0, first_seen // self.block_size)):
                if table[index]:
                    free.insert(0, table[index])
                    table[index] = 0


def _padded(rows: list[list[int]]) -> Tensor:
    width = max(len(row) for row in rows)
    return torch.tensor([row + [0] * (width - len(row)) for row in rows], dtype=torch.int32)
