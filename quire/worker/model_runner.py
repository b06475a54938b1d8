"""One step on the model: gather inputs from the rows, run the decoder, draw tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from quire.kernels.cpu.sampling import CpuSampling
from quire.kernels.types import StepContext
from quire.layers.stream import ResidualStream
from quire.models.decoder import Decoder
from quire.parallel.collectives import Collectives
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.logprobs import batch_logprobs, rank_candidates, token_logprobs
from quire.sampling.sampler import sample
from quire.sampling.token_logprobs import LogprobRecord
from quire.scheduler.plan import EntryResult, PlanEntry
from quire.speculation.verify import RejectionDraw, put_in_place, rows_along
from quire.speculation.verify_tree import put_trees_in_place
from quire.worker.cache_engine import CacheEngine
from quire.worker.drafter import Proposer
from quire.worker.outcomes import along_drafts, drawn_result, kept_moves, take_candidates
from quire.worker.passes import Passes
from quire.worker.request_table import RequestTable
from quire.worker.step_inputs import step_inputs

_PROMPT_LOGITS_ROWS = 64
"""Prompt positions whose logits exist at once: a vocabulary wide, they would outgrow the model otherwise."""


LogitsUse = tuple[Tensor | slice | None, Callable[[Tensor], None]]
"""Rows of a step whose logits are wanted (None: all of them), and what is done with them where tokens are drawn."""


class ModelRunner:
    """Executes plan entries and decides nothing.

    Where ranks share the model, every rank runs every step. One of them draws (`Place.is_sampler`) and has the results;
    the tensor ranks of its stage are told what was drawn, those of earlier stages by `learn`.
    """

    def __init__(self, decoder: Decoder, cache: CacheEngine, table: RequestTable, drafter: Proposer | None = None,
                 rejection: bool = False, collectives: Collectives | None = None) -> None:
        self._passes = Passes(decoder, collectives)
        self._cache = cache
        self._table = table
        self._sampling = CpuSampling()
        self.drafter = drafter
        self._rejection = rejection
        """Judge drafts by rejection; else a draft is kept if it is what the target draws."""
        self._undecided: dict[int, PlanEntry] = {}
        """By row, on a stage that does not draw: the tree of its last step, until `learn` says what was kept."""

    def run(self, entries: Sequence[PlanEntry]) -> list[EntryResult]:
        """Results in the order of the entries; on ranks that do not draw there are none."""
        if not entries:
            return []
        guesses: dict[int, Tensor] = {}
        if self.drafter is not None:
            self.drafter.model.written(entries)
            if any(entry.device_drafts for entry in entries):
                entries, guesses = self.drafter.propose(entries)
        # Who shares another's logits computes nothing.
        computing = [entry for entry in entries if entry.num_tokens]
        ids, ctx = step_inputs(self._table, computing)
        hidden = self._forward(ids, ctx)
        if not self._passes.place.is_last:
            self._undecided |= {entry.row: entry for entry in computing if entry.parents}
            return []
        row_ends = dict(zip((entry.row for entry in computing), accumulate(entry.num_tokens for entry in computing),
                            strict=True))
        ends = [row_ends[entry.row if entry.shares is None else entry.shares] for entry in entries]
        results = [EntryResult() for _ in entries]
        failure: Exception | None = None
        uses = list(self._uses(entries, ends, results, guesses))
        for rows, use in uses:
            logits = self._passes.logits(hidden if rows is None else hidden[rows])
            if logits is None or failure is not None:
                continue
            try:
                use(logits)
            except Exception as error:
                if self._passes.alone:
                    raise
                failure = error  # the other ranks go on to the end of the step, and so must this one
        if uses:
            self._agree(entries, results, failure)
        return results if self._passes.place.is_sampler else []

    def _forward(self, ids: Tensor, ctx: StepContext) -> ResidualStream:
        """The stream after the last layer; who drafts from hidden states is shown them."""
        states = () if self.drafter is None else self.drafter.model.states
        if self.drafter is None or not states:
            return self._passes.forward(ids, ctx, self._cache.layers)
        return self._passes.forward_watched(ids, ctx, self._cache.layers, states, self.drafter.model.watched)

    def _agree(self, entries: Sequence[PlanEntry], results: list[EntryResult], failure: Exception | None) -> None:
        """The rows take over the tokens that were drawn, on every tensor rank of this stage. The KV of a tree's kept
        branch goes where it belongs, before anybody can read it there."""
        mine = [result.tokens for result in results] if self._passes.place.is_sampler else None
        kept: list[tuple[int, int, int]] = []
        for entry, tokens in zip(entries, self._passes.tell_group(mine, failure), strict=True):
            self._append(entry.row, entry.drawn_at, tokens)
            if entry.parents:
                kept += kept_moves(entry, tokens)
        if kept:
            self._cache.move_tokens(self._table, kept)

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """These tokens were drawn for a row on a later stage, the first of them for `position`. A row that is empty is
        left alone.

        The sequence has not been planned since, and what was drawn counts as written only when the engine knows of it:
        plans that could read the slots of a kept branch come with these tokens, or after them.
        """
        if not tokens or self._table.is_empty(row):
            return
        self._append(row, position, tokens)
        entry = self._undecided.pop(row, None)
        if entry is not None and entry.drawn_at == position:
            kept = kept_moves(entry, tokens)
            if kept:
                self._cache.move_tokens(self._table, kept)

    def restart(self, row: int) -> None:
        """The row belongs to another sequence from now on."""
        self._undecided.pop(row, None)
        if self.drafter is not None:
            self.drafter.model.restart(row)

    def _append(self, row: int, position: int, tokens: Sequence[int]) -> None:
        if not tokens or self._table.is_empty(row):
            return
        for place, token in enumerate(tokens):
            self._table.append(row, position + place, token)
        if self.drafter is not None:
            self.drafter.model.kept(row, position + len(tokens) - 1)

    def _uses(self, entries: Sequence[PlanEntry], ends: list[int], results: list[EntryResult],
              guesses: dict[int, Tensor]) -> Iterator[LogitsUse]:
        """Everything for which logits are wanted, the same on all tensor ranks."""
        for entry, end, result in zip(entries, ends, results, strict=True):
            if entry.prompt_logprobs_from is not None:
                yield from self._prompt_logprobs(entry, end - entry.num_tokens, result)
        drawing = [i for i, entry in enumerate(entries) if entry.sample]
        if drawing:
            rows = [row for i in drawing for row in range(ends[i] - 1 - len(entries[i].drafts), ends[i])]
            everything = rows == list(range(max(ends)))
            yield None if everything else torch.tensor(rows), partial(self._draw, entries, drawing, results, guesses)
        asking = [i for i, entry in enumerate(entries) if entry.candidates]
        for at in range(0, len(asking), _PROMPT_LOGITS_ROWS):
            part = asking[at : at + _PROMPT_LOGITS_ROWS]
            yield torch.tensor([ends[i] - 1 for i in part]), partial(self._rank_candidates, entries, part, results)

    def _draw(self, entries: Sequence[PlanEntry], drawing: list[int], results: list[EntryResult],
              guesses: dict[int, Tensor], logits: Tensor) -> None:
        """Tokens for the entries that reach the end of what their sequence knows, drafts judged on the way."""
        rows: list[SamplingRow] = []
        firsts: list[int] = []
        for i in drawing:
            firsts.append(len(rows))
            rows += rows_along(self._table.sampling(entries[i].row), entries[i].drafts, entries[i].masks,
                               entries[i].parents)
        batch = SamplingBatch.build(rows, logits.shape[1])
        output = sample(logits, batch, self._sampling, spent=not self._rejection)
        drawn, status, logprobs = output.token_ids.tolist(), output.status.tolist(), output.logprobs
        judged: dict[int, int] = {}
        if self._rejection:
            draws = [RejectionDraw(first, entries[i].drafts, rows[first : first + 1 + len(entries[i].drafts)],
                                   guesses.get(i), entries[i].parents)
                     for i, first in zip(drawing, firsts, strict=True)]
            draws = [draw for draw in draws if draw.drafts and not draw.rows[0].params.greedy]
            judged = put_in_place(drawn, logits, [draw for draw in draws if not draw.parents])
            judged |= put_trees_in_place(drawn, logits, [draw for draw in draws if draw.parents])
            if judged:
                logprobs = batch_logprobs(logits, torch.tensor(drawn), batch, self._sampling)
        found: dict[int, LogprobRecord] = {}
        if logprobs is not None:
            found = dict(zip(logprobs.rows, logprobs.records(), strict=True))
        places = [drawn_result(token, state) for token, state in zip(drawn, status, strict=True)]
        for place, one in found.items():
            places[place].logprobs = [one]
        for i, first in zip(drawing, firsts, strict=True):
            # What follows the first refused draft was not drawn by rejection.
            drafts = entries[i].drafts
            kept = along_drafts(drafts, places[first : first + 1 + len(drafts)], entries[i].parents, judged.get(first))
            # Into the result that is there already: it may have prompt log-probabilities.
            results[i].tokens, results[i].logprobs, results[i].error = kept.tokens, kept.logprobs, kept.error
            results[i].num_drafts, results[i].parents, results[i].kept = kept.num_drafts, kept.parents, kept.kept

    def _rank_candidates(self, entries: Sequence[PlanEntry], part: list[int], results: list[EntryResult],
                         logits: Tensor) -> None:
        """The likeliest next tokens of the entries that ask for them instead of a draw."""
        temperatures = [self._table.sampling(entries[i].row).params.temperature or 1.0 for i in part]
        found = rank_candidates(logits, [entries[i].candidates for i in part], temperatures, self._sampling)
        take_candidates(part, found, results)

    def _prompt_logprobs(self, entry: PlanEntry, first_row: int, result: EntryResult) -> Iterator[LogitsUse]:
        """Of the prompt tokens that follow the positions of this chunk."""
        state = self._table.sampling(entry.row)
        num_prompt = state.position - state.num_output
        begin = entry.prompt_logprobs_from or 0
        end = min(entry.start + entry.num_tokens, num_prompt - 1)
        result.prompt_logprobs = []
        for at in range(begin, end, _PROMPT_LOGITS_ROWS):
            stop = min(at + _PROMPT_LOGITS_ROWS, end)
            rows = slice(first_row + at - entry.start, first_row + stop - entry.start)
            yield rows, partial(self._score_prompt, entry.row, at, stop, result)

    def _score_prompt(self, row: int, at: int, stop: int, result: EntryResult, logits: Tensor) -> None:
        targets = torch.from_numpy(self._table.tokens[row, at + 1 : stop + 1].astype(np.int64))
        wanted = self._table.sampling(row).params.prompt_logprobs or 0
        found = token_logprobs(logits, targets, wanted, self._sampling).records()
        result.prompt_logprobs = (result.prompt_logprobs or []) + found
