"""Builds what attention kernels read about a step: the tokens' sequences, where their keys are, which program does
what.

Also the memory that this takes for decode steps, reserved before any graph holds its address.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import FreshPrompts
from quire.attention.prefill_libraries import Verdicts
from quire.config import default_cache_dir
from quire.kernels.decode_lengths import LONG_SEQUENCES, SHORT_SEQUENCES, Lengths, long_keys
from quire.kernels.types import HeadShape, LatentShape, LayerCache, StepContext
from quire.models.decoder import Decoder
from quire.models.heads.head import DraftHead
from quire.ops.interface import Ops
from quire.worker.gpu.batches import FreshRuns, MixedBatch
from quire.worker.gpu.padded import MixedRung, MixedRungs
from quire.worker.gpu.staging import Stage
from quire.worker.gpu.table import DeviceTable

if TYPE_CHECKING:
    from quire.kernels.triton.unpacked_pages import UnpackedPages

_ROW_TILES = ("row_tile_seq", "row_tile_first")
_PAGED_TILES = ("paged_tile_seq", "paged_tile_first")
_UNPACKED = ("unpacked_seq", "unpacked_first")
View = Callable[[str], Tensor]
"""Where a staged array lies on the device, by its name."""


class StepContexts:
    """Builds the contexts of all kinds of steps. `attention` None: operations of a CPU, which know no padding."""

    def __init__(
        self, decoder: Decoder | DraftHead, ops: Ops, table: DeviceTable, windows: tuple[int | None, ...] | None,
        fuse_rope: bool,
    ) -> None:  # fmt: skip
        """`windows`: of the table's cache groups; None: they were made for this decoder's layers. `fuse_rope`: decode
        steps without drafts rotate inside their attention."""
        self.attention = ops.attention
        own = tuple(group.window for group in decoder.spec.cache_groups())
        self.windows = own if windows is None else windows
        self.tables = table.tables[: len(self.windows)]
        self._block_size = table.block_size
        self._max_model_len, self._num_rows = table.max_model_len, table.num_rows
        self._shapes = [layer.attn.shape for layer in decoder.layers]
        self._hidden = decoder.spec.hidden_size
        attentions = [layer.attention for layer in decoder.spec.layers]
        self._alike = len(set(self._shapes)) == 1
        self._plain = all(
            a.window is None and a.softcap is None and a.latent is None and not a.sinks for a in attentions
        )
        self._model_heads = {HeadShape(a.num_heads, a.num_kv_heads, a.head_dim) for a in attentions if not a.latent}
        self.fuse_rope = fuse_rope and self.attention is not None and all(
            self.attention.may_turn(shape, self._block_size, self._plain) for shape in set(self._shapes))
        self._splits: dict[int, tuple] = {}
        self._long_splits: dict[int, tuple] = {}

    @property
    def _shared(self) -> HeadShape | LatentShape:
        """The heads that the split of decode keys is made for: the same in all layers."""
        return min(self._shapes, key=lambda shape: _as_heads(shape).num_kv_heads)

    def mixed_rungs(self, decoder: Decoder | DraftHead, max_num_seqs: int, max_tokens: int) -> MixedRungs | None:
        """The shapes that small mixed steps are padded to; None: they are not."""
        if isinstance(decoder, DraftHead):
            return None
        return MixedRungs.of(self.attention, decoder, max_num_seqs, max_tokens)

    def reserve(self, counts: set[int]) -> None:
        """The kernels' scratch for batches of `counts` decoding sequences."""
        if self.attention is None or self.attention.deterministic:
            return
        self._splits = {
            count: tuple(self.attention.allocate_split(count, self._shared) for _ in self.windows) for count in counts
        }
        if self._plain and self.fuse_rope:
            self._long_splits = {
                count: tuple(self.attention.allocate_split(count, self._shared, long=True) for _ in self.windows)
                for count in counts if count <= LONG_SEQUENCES
            }  # fmt: skip
        for shape in {_as_heads(shape) for shape in self._shapes}:
            self.attention.reserve(shape, max(split[0].tasks for split in self._splits.values()), max(counts))
        if self._plain and self._alike:
            shape = _as_heads(self._shapes[0])
            self.attention.reserve_room(shape, self._block_size, self._num_rows * self._max_model_len)

    @property
    def reserved(self) -> set[int]:
        return set(self._splits)

    def pick_up_prompts(self) -> None:
        """Use another library's prefill attention for fresh prompts, if an installed one is faster."""
        shapes = {_as_heads(shape) for shape in self._shapes}
        if self.attention is not None and self._plain and len(shapes) == 1:
            self.attention.pick_up(shapes.pop(), Verdicts(default_cache_dir() / "attention.json"))

    # ---- decode steps

    def short_rungs(self, rungs: Sequence[int]) -> list[int]:
        """Those of decode steps without drafts that have a kernel for few keys."""
        if self.attention is None or not self._plain or not self.fuse_rope:
            return []
        if not self.attention.has_short(self._model_heads, self._block_size, self._hidden):
            return []
        return [rung for rung in rungs if rung <= SHORT_SEQUENCES]

    def long_rungs(self, rungs: Sequence[int]) -> list[int]:
        """Those of decode steps without drafts whose rows may have so many keys that reading them is all that
        counts."""
        return [rung for rung in rungs if rung in self._long_splits and self._max_model_len >= long_keys(1)]

    def decode(
        self,
        rows: Tensor,
        positions: Tensor,
        query_start: Tensor,
        context_len: Tensor,
        slots: tuple[Tensor, ...],
        separate_rope: bool,
        caches: Sequence[LayerCache],
        detours: Tensor | None = None,
        lengths: Lengths = Lengths.MIDDLE,
    ) -> StepContext:
        """One token of every sequence, of `context_len` keys each. `separate_rope`: see `StepLaunches.decode`.
        `detours`: of nodes of trees."""
        if self.attention is None:
            ctx = self._on_host(positions, query_start, context_len, rows, slots, caches)
            if detours is not None:
                # Nodes may lie behind the last position of any of them.
                ctx.block_tables = tuple(table[rows.clamp(min=0).long()].clamp(min=0) for table in self.tables)
                ctx.detours = detours
            return ctx
        from quire.attention.triton import MOST_DRAFTED, DeviceContext

        rung = rows.shape[0]
        chains = separate_rope and detours is None and rung <= MOST_DRAFTED and not self.attention.deterministic
        splits = self._long_splits if lengths is Lengths.LONG else self._splits
        ctx = DeviceContext(positions, query_start, context_len, (), slots, rows=rows, tables=self.tables,
                            num_decodes=rung, splits=splits.get(rung, ()), lengths=lengths,
                            fuse_rope=self.fuse_rope and not separate_rope, drafted=self.fuse_rope and chains,
                            detours=detours)
        if self.attention.deterministic:
            # One tile per sequence; padding has no keys and gives zeros.
            ctx.tile_seq = query_start[:rung]
            ctx.tile_first = torch.zeros_like(ctx.tile_seq)
        self.attention.prepare(ctx, self.windows)
        return ctx

    def _on_host(
        self, positions: Tensor, query_start: Tensor, lengths: Tensor, rows: Tensor, slots: tuple[Tensor, ...],
        caches: Sequence[LayerCache],
    ) -> StepContext:  # fmt: skip
        """For CPU operations, which have no padding: each padded row attends to one key of the spare block."""
        owner = rows.clamp(min=0).long()
        width = max(1, -(-int(lengths.max()) // self._block_size))
        # The block past the pool's, which `allocate_caches` adds for padding.
        spare = (caches[0].num_blocks - 1) * self._block_size
        return StepContext(
            positions,
            query_start,
            lengths.clamp(min=1),
            # Blocks behind a window may be nobody's (-1): the row that stands for padding may begin with one.
            tuple(table[owner, :width].clamp(min=0) for table in self.tables),
            tuple(torch.where(slot < 0, spare, slot) for slot in slots),
        )

    # ---- mixed steps

    def padded(self, rung: MixedRung, view: View, positions: Tensor, slots: tuple[Tensor, ...]) -> StepContext:
        """A mixed step of a fixed shape, all of it on fixed addresses."""
        from quire.attention.triton import DeviceContext

        ctx = DeviceContext(
            positions, view("query_start"), view("lengths"), (), slots, rows=view("rows"), tables=self.tables,
            num_decodes=rung.decodes, splits=self._splits.get(rung.decodes, ()), tile_seq=view("tile_seq"),
            tile_first=view("tile_first"),
        )  # fmt: skip
        if self.attention is not None:
            self.attention.prepare(ctx, self.windows)
        return ctx

    def add_tiles(self, stage: Stage, batch: MixedBatch) -> FreshRuns:
        """Tiles of the sequences with several queries; returns the fresh prompts that need none."""
        if self.attention is None:
            return FreshRuns()
        from quire.kernels.triton.attention_mixed import query_tiles

        first = 0 if self.attention.deterministic else batch.num_decodes
        counts = batch.counts.copy()
        starts = batch.query_start
        fresh = FreshRuns()
        own, shape = np.zeros_like(counts), _as_heads(self._shapes[0])
        for s in range(first, len(counts)):
            if self.attention.takes_fresh(int(batch.starts[s]), int(counts[s]), self._plain):
                fresh.add_dense(int(starts[s]), int(counts[s]))
                counts[s] = 0
            elif self.attention.takes_ragged(int(batch.starts[s]), int(counts[s]), self._plain):
                fresh.add_ragged(s)
                counts[s] = 0
            elif self.attention.takes_rows(int(batch.starts[s]), int(counts[s]), self._plain, shape):
                own[s], counts[s] = counts[s], 0
        none = np.zeros(0, np.int32)
        taken, paged, pages = np.zeros_like(counts), (none, none), (none, none)
        if self.attention.takes_prefill(shape, self._block_size, self._plain and self._alike):
            paged, pages, taken = self.attention.prefill_tiles(batch.starts, counts, shape, self._block_size)
        rows = self.attention.row_tiles(own[first:], shape, first)
        for name, part in zip((*_ROW_TILES, *_PAGED_TILES, *_UNPACKED), (*rows, *paged, *pages), strict=True):
            stage.add(name, part)
        seqs, firsts = query_tiles((counts - taken)[first:], self.attention.tokens_per_tile(shape), first)
        stage.add("tile_seq", seqs)
        stage.add("tile_first", (firsts + taken[seqs]).astype(np.int32))
        return fresh

    def mixed(
        self,
        view: View,
        batch: MixedBatch,
        fresh: FreshRuns,
        positions: Tensor,
        slots: tuple[Tensor, ...],
        caches: Sequence[LayerCache],
    ) -> StepContext:
        """A step of any shape, staged with `add_tiles`."""
        if self.attention is None:
            return self._on_host(positions, view("query_start"), view("lengths"), view("rows"), slots, caches)
        from quire.attention.triton import DeviceContext

        ctx = DeviceContext(
            positions, view("query_start"), view("lengths"), (), slots, rows=view("rows"), tables=self.tables,
            num_decodes=batch.num_decodes, tile_seq=view("tile_seq"), tile_first=view("tile_first"),
            row_tiles=(view(_ROW_TILES[0]), view(_ROW_TILES[1])),
            paged_tiles=(view(_PAGED_TILES[0]), view(_PAGED_TILES[1])),
            unpacked=_unpacked(view),
            fresh=tuple(fresh.dense),
            ragged=tuple(_fresh_prompts(batch.query_start, view("query_start"), *run) for run in fresh.ragged),
        )
        if batch.num_decodes and not self.attention.deterministic:
            ctx.splits = tuple(self.attention.allocate_split(batch.num_decodes, self._shared) for _ in self.windows)
            self.attention.prepare(ctx, self.windows)
        return ctx


def _unpacked(view: View) -> UnpackedPages | None:
    from quire.kernels.triton.unpacked_pages import UnpackedPages

    sequence, first = (view(name) for name in _UNPACKED)
    return UnpackedPages(sequence, first) if sequence.shape[0] else None


def _fresh_prompts(starts: np.ndarray, on_device: Tensor, first: int, last: int) -> FreshPrompts:
    """The prompts of the sequences [first, last) of a step."""
    begin, end = int(starts[first]), int(starts[last])
    longest = int(np.diff(starts[first : last + 1]).max())
    return FreshPrompts(begin, end - begin, on_device[first : last + 1] - begin, longest)


def _as_heads(shape: HeadShape | LatentShape) -> HeadShape:
    """The heads that work is split by: for latents a block of heads counts as a kv head."""
    return shape.evened if isinstance(shape, HeadShape) else shape.blocks
