"""A batch of rows that say one token each in a step, by the target's own decoder, without any Python for a token.

A row is a place with its own part of the KV cache. A step on a GPU is one captured graph that reads its tokens where
the last one left them; the host looks at what was drawn every `CHUNK` steps.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.types import HeadShape, LayerCache, StepContext
from quire.training.target import Target

if TYPE_CHECKING:
    from quire.worker.gpu.graphs import GraphCache

CHUNK = 16
"""Steps between two looks of the host."""
_BLOCK = 16
_PROMPT_TOKENS = 16384
"""Of prompts that are computed at once."""
_KV_SHARE = 0.8
"""Of a GPU's free memory, and of a process's share of it all, what the rows' KV may take."""


def rows_with_room(target: Target, length: int, share: int) -> int:
    """How many of them a GPU has memory for, which so many processes share."""
    if target.device.type != "cuda":
        return 1 << 30
    decoder = target.decoder
    each = decoder.spec.kv_bytes_per_block(_BLOCK, decoder.ops.dtype.itemsize)
    each *= -(-min(length, decoder.max_model_len) // _BLOCK)
    free, whole = torch.cuda.mem_get_info(target.device)
    return max(1, int(_KV_SHARE * min(free, whole / share) / each))


class Rows:
    """The batch on its device: `begin` gives rows new prompts, `run` lets all of them go on."""

    @torch.inference_mode()
    def __init__(self, target: Target, count: int, length: int, seed: int) -> None:
        """`length`: tokens of a row at most, prompt and answer."""
        self.count, self.length = count, min(length, target.decoder.max_model_len)
        self._decoder, self._device = target.decoder, target.device
        self._each = -(-self.length // _BLOCK)
        self._groups = len(self._decoder.spec.cache_groups())
        torch.manual_seed(seed)
        with torch.device(self._device):
            self._caches: list[LayerCache] = self._decoder.allocate_caches([count * self._each] * self._groups, _BLOCK)
            self._table = torch.arange(count * self._each, dtype=torch.int32).view(count, self._each)
            self._rows = torch.arange(count, dtype=torch.int32)
            self._starts = torch.arange(count + 1, dtype=torch.int32)
            self._first_slots = torch.arange(count) * (self._each * _BLOCK)
            self._ids = torch.zeros(count, dtype=torch.int64)
            self._positions = torch.zeros(count, dtype=torch.int64)
            self._temperatures = torch.zeros(count)
            self._drawn = torch.zeros(1 + CHUNK, count, dtype=torch.int64)
            """What was drawn before the chunk, and in each step of it."""
            self._at = torch.zeros(1, dtype=torch.int64)
        self._launch: Callable[[], None] = self._step
        self._graphs: GraphCache | None = None
        attention = self._decoder.ops.attention
        self._splits: tuple = ()
        if attention is not None:
            self._splits = tuple(attention.allocate_split(count, self._shape) for _ in range(self._groups))
            attention.reserve(self._shape, self._splits[0].tasks, count)
        if self._device.type == "cuda":
            self._capture()

    @property
    def _shape(self) -> HeadShape:
        shape = self._decoder.layers[0].attn.shape
        assert isinstance(shape, HeadShape)  # no latents: `check_target`
        return shape.evened

    def _capture(self) -> None:
        from quire.worker.gpu.graphs import GraphCache

        graphs = self._graphs = GraphCache(self._device, lambda rung, separate_rope: self._step())
        graphs.capture([self.count])
        self._launch = lambda: graphs.run(self.count)
        for tensor in (self._ids, self._positions, self._at):
            tensor.zero_()

    def close(self) -> None:
        """Give its memory back, for what is done after it."""
        if self._graphs is not None:
            self._graphs.close()
        self._graphs, self._launch, self._caches = None, _closed, []
        if self._device.type == "cuda":
            gc.collect()
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def begin(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], temperatures: Sequence[float]) -> None:
        """Their first tokens are drawn too."""
        first, total = 0, 0
        for index, prompt in enumerate(prompts):
            if index > first and total + len(prompt) > _PROMPT_TOKENS:
                self._read(rows[first:index], prompts[first:index], temperatures[first:index])
                first, total = index, 0
            total += len(prompt)
        if rows:
            self._read(rows[first:], prompts[first:], temperatures[first:])

    def _read(self, rows: Sequence[int], prompts: Sequence[Sequence[int]], temperatures: Sequence[float]) -> None:
        counts = np.array([len(prompt) for prompt in prompts])
        ends = counts.cumsum()
        positions = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        owners = np.array(rows)
        slots = np.repeat(owners * (self._each * _BLOCK), counts) + positions
        ids, where, into, last, owned = (self._sent(part.astype(np.int64)) for part in (
            np.concatenate([np.asarray(prompt) for prompt in prompts]), positions, slots, ends - 1, owners))
        starts, lengths = (self._sent(part.astype(np.int32)) for part in (np.concatenate([[0], ends]), counts))
        ctx = self._prompt_context(where, starts, lengths, into, owned, counts)
        stream = self._decoder.forward(ids, ctx, self._caches)
        self._temperatures[owned] = self._sent(np.array(temperatures, np.float32))
        self._ids[owned] = self._draw(self._decoder.logits(stream[last]), self._temperatures[owned])
        self._positions[owned] = lengths.long()

    def _prompt_context(self, positions: Tensor, starts: Tensor, lengths: Tensor, slots: Tensor, owners: Tensor,
                        counts: np.ndarray) -> StepContext:
        tables, into = (self._table,) * self._groups, (slots,) * self._groups
        attention = self._decoder.ops.attention
        if attention is None:
            return StepContext(positions, starts, lengths, tuple(table[owners] for table in tables), into)
        from quire.attention.triton import DeviceContext
        from quire.kernels.triton.attention_mixed import query_tiles

        seqs, firsts = (self._sent(part) for part in query_tiles(counts, attention.tokens_per_tile(self._shape)))
        return DeviceContext(positions, starts, lengths, (), into, rows=owners.int(), tables=tables, tile_seq=seqs,
                             tile_first=firsts)

    def _sent(self, values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._device.type == "cuda" else tensor

    @torch.inference_mode()
    def run(self) -> np.ndarray:
        """[1 + CHUNK, rows]: what was drawn last before this chunk, and in its steps."""
        self._drawn[0].copy_(self._ids)
        self._at.zero_()
        for _ in range(CHUNK):
            self._launch()
        return self._drawn.cpu().numpy()

    def _step(self) -> None:
        """All on fixed addresses, and without a wait for the device. A row that is full goes on at its last place."""
        positions = self._positions
        slots, lengths = self._first_slots + positions, (positions + 1).int()
        attention = self._decoder.ops.attention
        if attention is None:
            ctx = StepContext(positions, self._starts, lengths, (self._table,) * self._groups, (slots,) * self._groups)
        else:
            from quire.attention.triton import DeviceContext

            ctx = DeviceContext(positions, self._starts, lengths, (), (slots,) * self._groups, num_decodes=self.count,
                                rows=self._rows, tables=(self._table,) * self._groups, splits=self._splits,
                                fuse_rope=not attention.deterministic)
            attention.prepare(ctx, tuple(group.window for group in self._decoder.spec.cache_groups()))
        found = self._draw(self._decoder.logits(self._decoder.forward(self._ids, ctx, self._caches), ctx),
                           self._temperatures)
        self._ids.copy_(found)
        self._positions.add_(1).clamp_(max=self.length - 1)
        self._at.add_(1)
        self._drawn.index_copy_(0, self._at, found[None])

    def _draw(self, logits: Tensor, temperatures: Tensor) -> Tensor:
        """The largest of logits / temperature + Gumbel noise is a draw; at temperature 0 without either."""
        hot = temperatures[:, None] > 0
        noise = torch.empty(logits.shape, dtype=torch.float32, device=logits.device).exponential_().log_()
        scores = logits.float() / torch.where(hot, temperatures[:, None], 1.0)
        return torch.where(hot, scores - noise, scores).argmax(-1)


def _closed() -> None:
    raise InvariantError("these rows are closed: they say no more")
