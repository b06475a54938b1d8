"""One step on the device: stage its numbers, gather inputs, run the model, draw; the host never waits in it.

A decode step (one token per sequence) is padded to a rung of the ladder and runs the same launches every time, so it
can be captured as a graph and replayed; so is a small mixed one (`padded`). Any other step runs eagerly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from quire.attention.backend import FreshPrompts
from quire.attention.prompts import Verdicts
from quire.config import default_cache_dir
from quire.kernels.types import LayerCache, StepContext
from quire.layers.stream import ResidualStream
from quire.models.decoder import Decoder
from quire.ops.interface import Ops
from quire.sampling.sampler import token_logprobs
from quire.sampling.sending import send
from quire.scheduler.plan import PlanEntry, StepPlan
from quire.worker.gpu.backend import StepKernels, step_kernels
from quire.worker.gpu.batches import (
    FreshRuns,
    LogitRows,
    MixedBatch,
    drafts_as_decodes,
    end_of,
    is_decode,
    ladder,
    rung_for,
)
from quire.worker.gpu.drafted import Drafted, DraftSource
from quire.worker.gpu.graphs import GraphCache
from quire.worker.gpu.memory import explain_request, ran_out
from quire.worker.gpu.padded import MixedRung, MixedRungs, PaddedSteps
from quire.worker.gpu.rejection import JudgedEntry, judge_drafts
from quire.worker.gpu.results import PendingStep
from quire.worker.gpu.sampling import SpecialRow, rank_candidates, sample_special
from quire.worker.gpu.staging import Stage
from quire.worker.gpu.table import NOTHING, DeviceTable

RING = 32
"""Slots for drawn tokens: more than steps can be in flight, so that none is overwritten before it is copied."""
_PROMPT_LOGITS_ROWS = 256
_STAGE_ENTRIES = 1 << 16
_ROW_TILES = ("row_tile_seq", "row_tile_first")


@dataclass(slots=True)
class DecodeBuffers:
    """Fixed places that a captured graph reads and writes; a rung uses the first of them."""

    rows: Tensor
    positions: Tensor
    ring: Tensor
    ids: Tensor
    wide_positions: Tensor
    lengths: Tensor
    query_start: Tensor
    slots: tuple[Tensor, ...]
    logits: Tensor


class DeviceRunner:
    """Executes plans on one device and decides nothing."""

    def __init__(
        self,
        decoder: Decoder,
        ops: Ops,
        table: DeviceTable,
        device: torch.device,
        *,
        max_num_seqs: int,
        use_graphs: bool,
        fuse_rope: bool = False,
        windows: tuple[int | None, ...] | None = None,
        mixed_tokens: int = 0,
    ) -> None:
        """`fuse_rope`: decode steps without drafts rotate inside their attention. `windows`: of the table's cache
        groups, where the decoder's layers are not all that these were made for. `mixed_tokens`: mixed steps of up to
        so many tokens (of prompts) are padded to fixed shapes; 0: none are."""
        self._device = device
        self._decoder = decoder
        self._ops = ops
        self._table = table
        self._kernels: StepKernels = step_kernels(device)
        own = tuple(group.window for group in decoder.spec.cache_groups())
        self._windows = own if windows is None else windows
        self._tables = table.tables[: len(self._windows)]
        self._plain = all(a.attention.window is None and a.attention.softcap is None for a in decoder.spec.layers)
        self._attention = ops.attention
        self._fuse_rope = fuse_rope and self._attention is not None and not self._attention.deterministic
        self.rungs = ladder(max_num_seqs)
        # Row -1 is padding: before the first step the whole batch is.
        self._stage = torch.full((_STAGE_ENTRIES + 2 * max_num_seqs + 64,), -1, dtype=torch.int32, device=device)
        self._stage[:16] = 0
        self._stage[16 + _round(max_num_seqs) :] = 0
        self._buffers = self._allocate(max_num_seqs)
        self._scratch = self._kernels.draw_scratch(max_num_seqs, decoder.spec.vocab_size)
        self.drawn = torch.zeros(RING, max_num_seqs, 2, dtype=torch.int32, device=device)
        # Steps with drafts are never padded to these, so rows that are there for drafts need no shapes.
        rungs = MixedRungs.of(self._attention, decoder, min(max_num_seqs, table.num_rows), mixed_tokens)
        self._splits = self._reserve(max_num_seqs, [] if rungs is None else rungs.decode_counts)
        self.caches: list[LayerCache] = []
        self.graphs = GraphCache(device, self._decode) if use_graphs and device.type == "cuda" else None
        self._replays = False
        self.padded = None if rungs is None or self._attention is None else PaddedSteps(
            rungs, self._launch_padded, device, None if self.graphs is None else self.graphs.pool)
        self.drafter: DraftSource | None = None
        self.rejection = False
        """Judge drafts by rejection; else a draft is kept if it is what the target draws."""

    # ---- memory

    def _allocate(self, size: int) -> DecodeBuffers:
        def ints(count: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(count, dtype=dtype, device=self._device)

        spec = self._decoder.spec
        stage = self._stage
        return DecodeBuffers(
            rows=stage[16 : 16 + size],
            positions=stage[16 + _round(size) : 16 + _round(size) + size],
            ring=stage[:1],
            ids=ints(size, torch.int64),
            wide_positions=ints(size, torch.int64),
            lengths=ints(size, torch.int32),
            query_start=torch.arange(size + 1, dtype=torch.int32, device=self._device),
            slots=tuple(ints(size, torch.int64) for _ in self._windows),
            logits=torch.empty(size, spec.vocab_size, dtype=self._decoder.logits_dtype, device=self._device),
        )

    def _reserve(self, size: int, others: Sequence[int]) -> dict[int, tuple]:
        """The kernels' scratch for the largest batch, before any graph holds its address."""
        if self._attention is None or self._attention.deterministic:
            return {}
        shapes = {layer.attn.shape for layer in self._decoder.layers}
        heads = min(shape.num_kv_heads for shape in shapes)
        counts = {*self.rungs, *others}
        splits = {
            rung: tuple(self._attention.allocate_split(rung, heads) for _ in self._windows) for rung in counts
        }
        for shape in shapes:
            self._attention.reserve(shape, max(split[0].tasks for split in splits.values()), max(size, *counts))
        return splits

    def pick_up_prompts(self) -> None:
        """Let somebody else's library attend for fresh prompts, if one is here that does it faster."""
        shapes = {layer.attn.shape for layer in self._decoder.layers}
        if self._attention is not None and self._plain and len(shapes) == 1:
            self._attention.pick_up(shapes.pop(), Verdicts(default_cache_dir() / "attention.json"))

    def close(self) -> None:
        """Let go of graphs and caches: the graphs' launches hold the runner, which holds all the memory."""
        for graphs in (self.graphs, self.padded):
            if graphs is not None:
                graphs.close()
        self.graphs = self.padded = None
        self.caches = []

    def capture(self, max_num_seqs: int) -> None:
        """Graphs of all steps, over the caches as they are now: rungs beyond `max_num_seqs` are there for drafts. From
        here on steps are replayed."""
        self._replays = True
        if self.padded is not None:
            self.padded.capture()
        if self.graphs is None:
            return
        if self._fuse_rope and self.rungs[-1] > max_num_seqs:
            self.graphs.capture(self.rungs, drafts=True)
        last = rung_for(self.rungs, max_num_seqs) if self._fuse_rope else self.rungs[-1]
        self.graphs.capture([rung for rung in self.rungs if rung <= last])

    # ---- a step

    def run(self, plan: StepPlan) -> PendingStep:
        """Launch everything; the tokens will be in the returned tensors once the device gets there."""
        places, values = self._table.apply(plan)
        if self.drafter is not None:
            self.drafter.follow(plan)
        if not plan.entries:
            self._scatter(places, values)
            return PendingStep(plan.step, 0, [], self.drawn[0, :0])
        if not any(entry.num_drafts for entry in plan.entries):
            return self._run(plan, places, values)
        entries: Sequence[PlanEntry] = plan.entries
        if self.drafter is not None and any(entry.device_drafts for entry in entries):
            self._scatter(places, values)
            places = values = NOTHING
            entries, drafted = self.drafter.propose(entries, self._table)
        else:
            drafted = Drafted.known(entries)
        pending = self._run(replace(plan, entries=drafts_as_decodes(entries)), places, values, drafted)
        pending.drafts = drafted
        return pending

    def launch(self, entries: list[PlanEntry]) -> None:
        """A step of entries alone, whose tokens go to the table and to nobody else."""
        self._run(StepPlan(0, entries=entries), NOTHING, NOTHING)

    def _run(
        self, plan: StepPlan, places: np.ndarray, values: np.ndarray, drafted: Drafted | None = None
    ) -> PendingStep:
        return (self._run_decode if is_decode(plan.entries) else self._run_mixed)(plan, places, values, drafted)

    def _scatter(self, places: np.ndarray, values: np.ndarray) -> None:
        if len(places):
            stage = Stage()
            stage.add("places", places)
            stage.add("values", values)
            sent = stage.send(self._device)
            self._kernels.scatter(self._table.arena, stage.view(sent, "places"), stage.view(sent, "values"))

    def _run_decode(
        self, plan: StepPlan, places: np.ndarray, values: np.ndarray, drafted: Drafted | None
    ) -> PendingStep:
        entries, slot = plan.entries, plan.step % RING
        count = len(entries)
        size = self._buffers.rows.shape[0]
        head = np.full(16 + 2 * _round(size), -1, np.int32)
        head[0] = slot
        head[16 : 16 + count] = [entry.row for entry in entries]
        positions = head[16 + _round(size) :]
        positions[:count] = [entry.start for entry in entries]
        positions[count:] = 0
        stage = Stage()
        stage.add("head", head)
        if 0 < len(places) <= _STAGE_ENTRIES // 2 - 32:
            stage.add("places", places)
            stage.add("values", values)
            sent = stage.send(self._device, self._stage)
            self._kernels.scatter(self._table.arena, stage.view(sent, "places"), stage.view(sent, "values"))
        else:
            stage.send(self._device, self._stage)
            self._scatter(places, values)
        return self._launch_decode(entries, plan.step, drafted)

    def _launch_decode(self, entries: Sequence[PlanEntry], step: int, drafted: Drafted | None) -> PendingStep:
        """The step whose rows and positions are staged."""
        count, slot = len(entries), step % RING
        rung = rung_for(self.rungs, count)
        # Keys that another row of the step must see are written before anybody attends.
        apart = self._fuse_rope and drafted is not None
        if self.graphs is not None and self._replays:
            self.graphs.run(rung, apart)
        else:
            self._decode(rung, apart)
        pending = PendingStep(step, count, range(count), self.drawn[slot, :count])
        self._draw_special(pending, entries, list(range(count)), self._buffers.logits, slot, drafted)
        return pending

    def _decode(self, rung: int, apart: bool) -> None:
        """The launches of a decode step of `rung` rows, all on fixed addresses. `apart`: it may hold drafts, so keys
        are written by a kernel of their own even where attention could do that."""
        b = self._buffers
        rows, lengths = b.rows[:rung], b.lengths[:rung]
        slots = tuple(slot[:rung] for slot in b.slots)
        ids, positions = b.ids[:rung], b.wide_positions[:rung]
        self._kernels.gather_inputs(self._table.tokens, self._tables, self._table.block_size, rows, b.positions[:rung],
                                    ids, positions, slots, lengths)
        ctx = self._decode_context(rung, rows, positions, lengths, slots, apart)
        hidden = self._decoder.forward(ids, ctx, self.caches)
        logits = self._decoder.logits(hidden, ctx, b.logits[:rung])
        self._kernels.draw(
            logits, self._table.state, rows, lengths, self._table.tokens, self.drawn, b.ring, self._scratch
        )

    def _decode_context(
        self, rung: int, rows: Tensor, positions: Tensor, lengths: Tensor, slots: tuple[Tensor, ...], apart: bool
    ) -> StepContext:
        query_start = self._buffers.query_start[: rung + 1]
        if self._attention is None:
            return self._host_context(positions, query_start, lengths, rows, slots)
        from quire.attention.triton import DeviceContext

        ctx = DeviceContext(positions, query_start, lengths, (), slots, rows=rows, tables=self._tables,
                            num_decodes=rung, splits=self._splits.get(rung, ()), alone=self._fuse_rope and not apart)
        if self._attention.deterministic:
            # One tile per sequence; padding has no keys and gives zeros.
            ctx.tile_seq = self._buffers.query_start[:rung]
            ctx.tile_first = torch.zeros_like(ctx.tile_seq)
        self._attention.prepare(ctx, self._windows)
        return ctx

    def _host_context(
        self, positions: Tensor, query_start: Tensor, lengths: Tensor, rows: Tensor, slots: tuple[Tensor, ...]
    ) -> StepContext:
        """For the operations of a CPU, which know no padding: it is a sequence of one key in a block of nobody."""
        owner = rows.clamp(min=0).long()
        width = max(1, -(-int(lengths.max()) // self._table.block_size))
        return StepContext(
            positions,
            query_start,
            lengths.clamp(min=1),
            # Blocks behind a window may be nobody's (-1): the row that stands for padding may begin with one.
            tuple(table[owner, :width].clamp(min=0) for table in self._tables),
            tuple(torch.where(slot < 0, self._spare_slot, slot) for slot in slots),
        )

    @property
    def _spare_slot(self) -> int:
        """First slot of the block past the pool's, which `allocate_caches` adds for padding."""
        return (self.caches[0].num_blocks - 1) * self._table.block_size

    # ---- steps of any shape

    def _run_mixed(
        self, plan: StepPlan, places: np.ndarray, values: np.ndarray, drafted: Drafted | None
    ) -> PendingStep:
        entries, slot = plan.entries, plan.step % RING
        batch = MixedBatch.of(entries)
        ends = batch.query_start[1:]
        reads = LogitRows.of(entries, batch)
        rung = None if self.padded is None or drafted is not None else self.padded.rung_of(entries, batch, reads)
        if rung is not None and self.padded is not None:
            self._scatter(places, values)
            self.padded.run(rung, batch, reads, entries, slot)
            pending = PendingStep(plan.step, len(entries), reads.drawing, self.drawn[slot, : len(reads.drawing)])
            self._draw_special(pending, entries, reads.drawing, self._buffers.logits, slot)
            return pending
        stage = Stage()
        stage.add("ring", np.array([slot], np.int32))
        stage.add("token_rows", batch.token_rows())
        stage.add("positions", batch.positions())
        stage.add("query_start", batch.query_start)
        stage.add("lengths", batch.starts + batch.counts)
        stage.add("rows", batch.rows)
        stage.add("last", reads.last)
        stage.add("draw_rows", np.array([entries[i].row for i in reads.drawing], np.int32))
        stage.add("draw_positions", np.array([end_of(entries[i]) for i in reads.drawing], np.int32))
        stage.add("places", places)
        stage.add("values", values)
        fresh = self._add_tiles(stage, batch)
        sent = stage.send(self._device)
        if len(places):
            self._kernels.scatter(self._table.arena, stage.view(sent, "places"), stage.view(sent, "values"))
        hidden = self._forward_mixed(stage, sent, batch, fresh)
        pending = PendingStep(plan.step, len(entries), reads.drawing, self.drawn[slot, : len(reads.drawing)])
        for place, i in enumerate(batch.order):
            if entries[i].prompt_logprobs_from is not None:
                try:
                    self._prompt_logprobs(pending, i, entries[i], hidden, int(ends[place]) - entries[i].num_tokens)
                except RuntimeError as error:
                    pending.errors[i] = _too_much(error)
        if len(reads.last):
            everyone = np.array_equal(reads.last, np.arange(ends[-1]))
            logits = self._decoder.logits(hidden if everyone else hidden[stage.view(sent, "last")])
            self._draw_mixed(pending, entries, reads, logits, stage, sent, slot, drafted)
        return pending

    def _launch_padded(self, rung: MixedRung, view: Callable[[str], Tensor], draws: int) -> None:
        """A mixed step of a fixed shape, all of it on fixed addresses."""
        from quire.attention.triton import DeviceContext

        ids, positions, slots = self._gathered(view("token_rows"), view("positions"))
        ctx = DeviceContext(
            positions, view("query_start"), view("lengths"), (), slots, rows=view("rows"), tables=self._tables,
            num_decodes=rung.decodes, splits=self._splits.get(rung.decodes, ()), tile_seq=view("tile_seq"),
            tile_first=view("tile_first"),
        )  # fmt: skip
        if self._attention is not None:
            self._attention.prepare(ctx, self._windows)
        hidden = self._decoder.forward(ids, ctx, self.caches)
        logits = self._decoder.logits(hidden[view("last")], ctx, self._buffers.logits[:draws])
        self._kernels.draw(
            logits, self._table.state, view("draw_rows"), view("draw_positions"), self._table.tokens, self.drawn,
            view("ring"), self._scratch,
        )  # fmt: skip

    def _gathered(self, rows: Tensor, places: Tensor) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Ids, positions and cache slots of tokens, in memory of their own."""
        # Rows at aligned addresses whatever the number of tokens, or kernels are compiled again for an odd one.
        tokens = len(rows)
        numbers = torch.empty(2 + len(self._windows), _round(tokens), dtype=torch.int64, device=self._device)
        ids, positions, *slots = numbers[:, :tokens]
        self._kernels.gather_inputs(self._table.tokens, self._tables, self._table.block_size, rows, places, ids,
                                    positions, tuple(slots), None)
        return ids, positions, tuple(slots)

    def _draw_mixed(
        self,
        pending: PendingStep,
        entries: Sequence[PlanEntry],
        reads: LogitRows,
        logits: Tensor,
        stage: Stage,
        sent: Tensor,
        slot: int,
        drafted: Drafted | None,
    ) -> None:
        """Tokens from the first of the logits, candidates of beams from the others."""
        if reads.drawing:
            self._kernels.draw(
                logits[: len(reads.drawing)],
                self._table.state,
                stage.view(sent, "draw_rows"),
                stage.view(sent, "draw_positions"),
                self._table.tokens,
                self.drawn,
                stage.view(sent, "ring"),
                self._scratch,
            )
            self._draw_special(pending, entries, reads.drawing, logits, slot, drafted)
        if reads.ranking:
            infos = [self._table.info(entries[i].row) for i in reads.ranking]
            pending.candidates = rank_candidates(
                logits[len(reads.drawing) :], reads.ranking, [entries[i].candidates for i in reads.ranking],
                [info.params.temperature or 1.0 for info in infos],
            )

    def _add_tiles(self, stage: Stage, batch: MixedBatch) -> FreshRuns:
        """Tiles of the sequences with several queries; returns the fresh prompts that need none."""
        if self._attention is None:
            return FreshRuns()
        from quire.kernels.triton.attention_mixed import query_tiles

        first = 0 if self._attention.deterministic else batch.num_decodes
        counts = batch.counts.copy()
        starts = batch.query_start
        fresh = FreshRuns()
        own, shape = np.zeros_like(counts), self._decoder.layers[0].attn.shape
        for s in range(first, len(counts)):
            if self._attention.takes_fresh(int(batch.starts[s]), int(counts[s]), self._plain):
                fresh.add_dense(int(starts[s]), int(counts[s]))
                counts[s] = 0
            elif self._attention.takes_ragged(int(batch.starts[s]), int(counts[s]), self._plain):
                fresh.add_ragged(s)
                counts[s] = 0
            elif self._attention.takes_rows(int(batch.starts[s]), int(counts[s]), self._plain, shape):
                own[s], counts[s] = counts[s], 0
        for name, part in zip(_ROW_TILES, self._attention.row_tiles(own[first:], shape, first), strict=True):
            stage.add(name, part)
        seqs, firsts = query_tiles(counts[first:], self._attention.tokens_per_tile(shape), first)
        stage.add("tile_seq", seqs)
        stage.add("tile_first", firsts)
        return fresh

    def _forward_mixed(self, stage: Stage, sent: Tensor, batch: MixedBatch, fresh: FreshRuns) -> ResidualStream:
        def view(name: str) -> Tensor:
            return stage.view(sent, name)

        ids, positions, slots = self._gathered(view("token_rows"), view("positions"))
        if self._attention is None:
            ctx = self._host_context(positions, view("query_start"), view("lengths"), view("rows"), slots)
            return self._decoder.forward(ids, ctx, self.caches)
        from quire.attention.triton import DeviceContext

        ctx = DeviceContext(
            positions, view("query_start"), view("lengths"), (), slots, rows=view("rows"), tables=self._tables,
            num_decodes=batch.num_decodes, tile_seq=view("tile_seq"), tile_first=view("tile_first"),
            row_tiles=(view(_ROW_TILES[0]), view(_ROW_TILES[1])),
            fresh=tuple(fresh.dense),
            ragged=tuple(_fresh_prompts(batch.query_start, view("query_start"), *run) for run in fresh.ragged),
        )
        if batch.num_decodes and not self._attention.deterministic:
            heads = min(layer.attn.shape.num_kv_heads for layer in self._decoder.layers)
            ctx.splits = tuple(self._attention.allocate_split(batch.num_decodes, heads) for _ in self._windows)
            self._attention.prepare(ctx, self._windows)
        if not fresh.dense:
            return self._decoder.forward(ids, ctx, self.caches)
        from quire.attention.triton import dense_attention

        with dense_attention():
            return self._decoder.forward(ids, ctx, self.caches)

    # ---- what the drawing kernel does not do

    def _draw_special(
        self,
        pending: PendingStep,
        entries: Sequence[PlanEntry],
        drawing: Sequence[int],
        logits: Tensor,
        slot: int,
        drafted: Drafted | None = None,
    ) -> None:
        """Draw again, with the full sampler, for rows that ask for more; their tokens replace the first draw's."""
        table = self._table
        rows = [
            SpecialRow(place, entries[i].row, end_of(entries[i]), entries[i].masks)
            for place, i in enumerate(drawing)
            if table.info(entries[i].row).special
        ]
        if drafted is not None:
            drafted.put_back(table, range(len(drafted.counts)))
        if rows:
            self._draw_all_again(pending, rows, drawing, logits, slot)
        if drafted is not None and self.rejection:
            self._judge(pending, entries, drawing, logits, slot, drafted)

    def _draw_all_again(
        self, pending: PendingStep, rows: Sequence[SpecialRow], drawing: Sequence[int], logits: Tensor, slot: int
    ) -> None:
        try:
            self._draw_again(pending, rows, drawing, logits, slot)
            return
        except RuntimeError as error:
            _too_much(error)
        # One of them asks for too much: whoever can be served alone is, the others are told. Not inside the handler,
        # where the error still holds what the attempt had allocated.
        for row in rows:
            try:
                self._draw_again(pending, [row], drawing, logits, slot)
            except RuntimeError as error:
                pending.errors[drawing[row.place]] = _too_much(error)

    def _draw_again(
        self, pending: PendingStep, rows: Sequence[SpecialRow], drawing: Sequence[int], logits: Tensor, slot: int
    ) -> None:
        table = self._table
        output = sample_special(logits, rows, table)
        numbers = send([[row.place, row.row, row.position] for row in rows], torch.int64, self._device)
        places, owners, positions = numbers.unbind(1)
        tokens = output.token_ids.to(torch.int32)
        self.drawn[slot, places] = torch.stack((tokens, output.status.to(torch.int32)), 1)
        # A position past the end has no place in the row; the last one takes it, which nobody will read.
        table.tokens[owners, positions.clamp(max=table.max_model_len - 1)] = tokens
        if output.logprobs is not None:
            pending.logprobs.append(([drawing[rows[r].place] for r in output.logprobs.rows], output.logprobs))

    def _judge(
        self,
        pending: PendingStep,
        entries: Sequence[PlanEntry],
        drawing: Sequence[int],
        logits: Tensor,
        slot: int,
        drafted: Drafted,
    ) -> None:
        """By rejection, for sequences that draw at random; what was drawn for them so far is replaced."""
        places = {i: place for place, i in enumerate(drawing)}
        judged, first = [], 0
        for index, (count, (row, position)) in enumerate(zip(drafted.counts, drafted.starts, strict=True)):
            if count and not self._table.info(row).params.greedy:
                mine = range(first, first + 1 + count)
                rows = [SpecialRow(places[i], row, position + i - first, entries[i].masks) for i in mine]
                judged.append(JudgedEntry(index, rows))
            first += 1 + count
        # Judging looks at the text of the drafts, which the draws before it may have overwritten.
        drafted.put_back(self._table, [one.index for one in judged])
        for found_at, found in judge_drafts(logits, judged, drafted, self._table, self.drawn[slot]):
            pending.logprobs.append(([drawing[place] for place in found_at], found))
        # A vocabulary wide for every draft: not to be held until the host has seen the step's tokens.
        drafted.passes.clear()

    def _prompt_logprobs(
        self, pending: PendingStep, index: int, entry: PlanEntry, hidden: ResidualStream, first: int
    ) -> None:
        """Of the prompt tokens that follow the positions of this chunk."""
        info = self._table.info(entry.row)
        begin = entry.prompt_logprobs_from or 0
        end = min(entry.start + entry.num_tokens, info.num_prompt - 1)
        for at in range(begin, end, _PROMPT_LOGITS_ROWS):
            stop = min(at + _PROMPT_LOGITS_ROWS, end)
            chunk = torch.arange(first + at - entry.start, first + stop - entry.start, device=self._device)
            logits = self._decoder.logits(hidden[chunk]).float()
            targets = self._table.tokens[entry.row, at + 1 : stop + 1].long()
            pending.prompt_logprobs.append((index, token_logprobs(logits, targets, info.params.prompt_logprobs or 0)))


def _fresh_prompts(starts: np.ndarray, on_device: Tensor, first: int, last: int) -> FreshPrompts:
    """The prompts of the sequences [first, last) of a step."""
    begin, end = int(starts[first]), int(starts[last])
    longest = int(np.diff(starts[first : last + 1]).max())
    return FreshPrompts(begin, end - begin, on_device[first : last + 1] - begin, longest)


def _too_much(error: RuntimeError) -> str:
    """What a request is told whose wishes did not fit the memory; any other error is raised again."""
    if not ran_out(error):
        raise error
    return explain_request(error)


def _round(size: int) -> int:
    return -(-size // 16) * 16
