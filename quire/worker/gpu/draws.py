"""Draws beyond the drawing kernel: rows that ask for more, drafts judged by rejection, candidates of beams."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.kernels.sampled_row import Wants
from quire.sampling.logprobs import rank_candidates
from quire.sampling.sending import send
from quire.scheduler.plan import PlanEntry
from quire.speculation.tree import depths
from quire.worker.gpu.backend import host_sampling
from quire.worker.gpu.batches import LogitRows
from quire.worker.gpu.drafted import Drafted
from quire.worker.gpu.memory import too_much
from quire.worker.gpu.rejection import JudgedEntry, judge_drafts
from quire.worker.gpu.results import PendingStep
from quire.worker.gpu.sampled_stage import SampledRow, SampledRows
from quire.worker.gpu.sampled_steps import SampledSteps
from quire.worker.gpu.sampling import sample_special
from quire.worker.gpu.table import DeviceTable

_MASKS = int(Wants.MASKS)


@dataclass(slots=True)
class DrawnStep:
    """A step whose tokens the kernel has drawn."""

    pending: PendingStep
    entries: Sequence[PlanEntry]
    drawing: Sequence[int]
    """Entry of the plan that each row of `logits` is drawn for."""
    logits: Tensor
    drawn: Tensor
    """int32 [places, 2]: token and status of each row, to be replaced."""
    slot: int = 0
    """Which of the ring's slots `drawn` is."""
    drafted: Drafted | None = None
    positions: Tensor | None = None
    """int32, of the rows of the step, where the device alone knows them: each draws the token after its own."""

    def rows(self) -> SampledRows:
        """All that are drawn for, without masks."""
        entries = self.entries if isinstance(self.drawing, range) else [self.entries[i] for i in self.drawing]
        owners = np.array([entry.row for entry in entries], np.int32)
        positions = np.array([entry.start + entry.num_tokens for entry in entries], np.int32)
        return SampledRows(np.arange(len(owners), dtype=np.int32), owners, positions)


class SpecialDraws:
    """Draws again for rows that ask for more; their tokens replace the kernel's."""

    def __init__(self, table: DeviceTable, rejection: bool, kernels: SampledSteps | None = None) -> None:
        """`rejection`: judge drafts by rejection sampling; else a draft is kept if the target draws the same token.
        `kernels` draw for all rows but those whose settings depend on text with drafts; None: the full sampler draws
        for all rows."""
        self._table = table
        self._rejection = rejection
        self._kernels = kernels

    def draw(self, step: DrawnStep) -> None:
        drafted = step.drafted
        if drafted is not None:
            drafted.put_back(self._table, range(len(drafted.counts)))
        if not self._table.plain:
            self._draw_special(step)
        if drafted is not None and self._rejection:
            self._judge(step, drafted)

    def _draw_special(self, step: DrawnStep) -> None:
        rows = self._special(step)
        if len(rows) and self._kernels is not None:
            rows = self._draw_by_kernels(self._kernels, step, rows)
        if len(rows):
            self._draw_all_again(step, rows.apart())

    def _special(self, step: DrawnStep) -> SampledRows:
        """The rows that ask for more."""
        rows = step.rows()
        bits = self._table.bits(rows.owners)
        if not bits.all():
            asking = bits != 0
            rows, bits = rows.part(asking), bits[asking]
        if (bits & _MASKS).any():
            rows.masks = [step.entries[step.drawing[place]].masks for place in rows.places.tolist()]
        return rows

    def rank(self, pending: PendingStep, entries: Sequence[PlanEntry], reads: LogitRows, logits: Tensor) -> None:
        """Candidates of beams, from the logits behind those of the entries that draw."""
        infos = [self._table.info(entries[i].row) for i in reads.ranking]
        found = rank_candidates(logits[len(reads.drawing) :], [entries[i].candidates for i in reads.ranking],
                                [info.params.temperature or 1.0 for info in infos], host_sampling(logits.device))
        pending.candidates = (reads.ranking, found)

    def _draw_by_kernels(self, kernels: SampledSteps, step: DrawnStep, rows: SampledRows) -> SampledRows:
        """Returns the rows that are left for the full sampler: those whose token counts would include drafts, since
        counts cannot be undone."""
        others = rows.part(slice(0))
        mine = rows
        if step.drafted is not None:
            left = np.array([self._table.info(row).reads_history for row in rows.owners.tolist()], bool)
            mine, others = rows.part(~left), rows.part(left)
        if not len(mine):
            return rows
        try:
            found = kernels.draw(step.logits, mine, step.slot, step.positions)
        except RuntimeError as error:
            too_much(error)
            return rows
        if found is not None:
            step.pending.logprobs.append(([step.drawing[place] for place in found.rows], found))
        return others

    def _draw_all_again(self, step: DrawnStep, rows: Sequence[SampledRow]) -> None:
        try:
            self._draw_again(step, rows)
            return
        except RuntimeError as error:
            too_much(error)
        # One row asks for too much memory: try each row by itself, so that only those that still fail get the error.
        # Not inside the handler, where the error still holds what the attempt had allocated.
        for row in rows:
            try:
                self._draw_again(step, [row])
            except RuntimeError as error:
                step.pending.errors[step.drawing[row.place]] = too_much(error)

    def _draw_again(self, step: DrawnStep, rows: Sequence[SampledRow]) -> None:
        table = self._table
        output = sample_special(step.logits, rows, table, step.positions)
        numbers = send([[row.place, row.row, row.position] for row in rows], torch.int64, table.arena.device)
        places, owners, positions = numbers.unbind(1)
        if step.positions is not None:
            positions = step.positions[places].long() + 1
        tokens = output.token_ids.to(torch.int32)
        step.drawn[places] = torch.stack((tokens, output.status.to(torch.int32)), 1)
        # A position past the end has no place in the row; it goes to the last one, which is never read.
        table.tokens[owners, positions.clamp(max=table.max_model_len - 1)] = tokens
        if output.logprobs is not None:
            owned = [step.drawing[rows[r].place] for r in output.logprobs.rows]
            step.pending.logprobs.append((owned, output.logprobs))

    def _judge(self, step: DrawnStep, drafted: Drafted) -> None:
        """By rejection, for sequences that draw at random; what was drawn for them so far is replaced."""
        places = {i: place for place, i in enumerate(step.drawing)}
        judged, first = [], 0
        for index, (count, (row, position)) in enumerate(zip(drafted.counts, drafted.starts, strict=True)):
            if count and not self._table.info(row).params.greedy:
                parents = drafted.parents_of(index)
                ahead = [0, *depths(parents)] if parents else range(1 + count)
                if drafted.grown_depths and drafted.grown_depths[index]:
                    ahead = [0] * (1 + count)  # nothing that is judged depends on it
                rows = [SampledRow(places[first + i], row, position + depth, step.entries[first + i].masks)
                        for i, depth in enumerate(ahead)]
                judged.append(JudgedEntry(index, rows))
            first += 1 + count
        # Judging looks at the text of the drafts, which the draws before it may have overwritten.
        drafted.put_back(self._table, [one.index for one in judged])
        for found_at, found in judge_drafts(step.logits, judged, drafted, self._table, step.drawn):
            step.pending.logprobs.append(([step.drawing[place] for place in found_at], found))
        # The weights of a draft are a vocabulary wide: free them now, not when the host has seen the step's tokens.
        drafted.passes.clear()
