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
from quire.sampling.batch import SamplingRow
from quire.sampling.logprobs import batch_logprobs, rank_candidates, token_logprobs
from quire.sampling.token_logprobs import LogprobRecord
from quire.scheduler.plan import EntryResult, PlanEntry
from quire.speculation.verify import RejectionDraw, put_in_place, rows_along
from quire.speculation.verify_tree import put_trees_in_place
from quire.worker.cache_engine import CacheEngine
from quire.worker.drafter import Proposer
from quire.worker.draws import draw_rows
from quire.worker.outcomes import along_drafts, drawn_result, kept_moves, take_candidates
from quire.worker.passes import Passes
from quire.worker.request_table import RequestTable
from quire.worker.step_inputs import StepInputs

_PROMPT_LOGITS_ROWS = 64
"""Prompt positions whose logits exist at once; each is a vocabulary wide, so a long prompt's would fill the memory."""


LogitsUse = tuple[Tensor | slice | None, Callable[[Tensor], None]]
"""Rows of a step whose logits are needed (None: all), and the function that uses them on the rank that draws."""


class ModelRunner:
    """Executes plan entries; makes no scheduling decision.

    If ranks share the model, every rank runs every step. One rank draws (`Place.is_sampler`) and returns the results.
    The other tensor ranks of its stage are told the tokens within the step, ranks of earlier stages through `learn`.
    """

    def __init__(self, decoder: Decoder, cache: CacheEngine, table: RequestTable, drafter: Proposer | None = None,
                 rejection: bool = False, collectives: Collectives | None = None) -> None:
        self._passes = Passes(decoder, collectives)
        self._cache = cache
        self._table = table
        self._sampling = CpuSampling()
        self._inputs = StepInputs(table)
        self.drafter = drafter
        self._rejection = rejection
        """Verify drafts by rejection sampling; otherwise a draft is kept if it equals what the target draws."""
        self._undecided: dict[int, PlanEntry] = {}
        """By row, on a stage that does not draw: the last entry with a draft tree, until `learn` says what was kept."""

    def run(self, entries: Sequence[PlanEntry]) -> list[EntryResult]:
        """Results in the order of the entries; empty on ranks that do not draw."""
        if not entries:
            return []
        guesses: dict[int, Tensor] = {}
        if self.drafter is not None:
            self.drafter.model.written(entries)
            if any(entry.device_drafts for entry in entries):
                entries, guesses = self.drafter.propose(entries)
        # Entries that share another row's logits compute nothing.
        computing = [entry for entry in entries if entry.num_tokens]
        ids, ctx = self._inputs.of(computing)
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
                failure = error  # other ranks continue to the end of the step, so this one must too
        if uses:
            self._agree(entries, results, failure)
        return results if self._passes.place.is_sampler else []

    def _forward(self, ids: Tensor, ctx: StepContext) -> ResidualStream:
        """The stream after the last layer; also passes hidden states to a drafter that reads them."""
        states = () if self.drafter is None else self.drafter.model.states
        if self.drafter is None or not states:
            return self._passes.forward(ids, ctx, self._cache.layers)
        return self._passes.forward_watched(ids, ctx, self._cache.layers, states, self.drafter.model.watched)

    def _agree(self, entries: Sequence[PlanEntry], results: list[EntryResult], failure: Exception | None) -> None:
        """Append the drawn tokens to the rows, on every tensor rank of this stage, and move the KV of a draft tree's
        accepted branch to its final slots before anything reads them."""
        mine = [result.tokens for result in results] if self._passes.place.is_sampler else None
        kept: list[tuple[int, int, int]] = []
        for entry, tokens in zip(entries, self._passes.tell_group(mine, failure), strict=True):
            self._append(entry.row, entry.drawn_at, tokens)
            if entry.parents:
                kept += kept_moves(entry, tokens)
        if kept:
            self._cache.move_tokens(self._table, kept)

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """These tokens were drawn for a row by a later pipeline stage, the first of them at `position`. Does nothing if
        the row is empty.

        Moving a kept branch here is safe: the sequence has not been planned since, and no plan reads the slots of a
        kept branch before the engine knows these tokens. Such a plan arrives with them or after them.
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
        """The row belongs to a new sequence from now on."""
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
        """Everything that needs logits, in the same order on all tensor ranks."""
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
        """Draw a token for each entry that reaches the end of its sequence's known tokens, and verify its drafts."""
        rows: list[SamplingRow] = []
        firsts: list[int] = []
        for i in drawing:
            firsts.append(len(rows))
            rows += rows_along(self._table.sampling(entries[i].row), entries[i].drafts, entries[i].masks,
                               entries[i].parents)
        output = draw_rows(logits, rows, self._sampling, spent=not self._rejection)
        drawn, logprobs = output.tokens, output.logprobs
        judged: dict[int, int] = {}
        if self._rejection:
            draws = [RejectionDraw(first, entries[i].drafts, rows[first : first + 1 + len(entries[i].drafts)],
                                   guesses.get(i), entries[i].parents)
                     for i, first in zip(drawing, firsts, strict=True)]
            draws = [draw for draw in draws if draw.drafts and not draw.rows[0].params.greedy]
            judged = put_in_place(drawn, logits, [draw for draw in draws if not draw.parents])
            judged |= put_trees_in_place(drawn, logits, [draw for draw in draws if draw.parents])
            if judged and output.batch is not None:
                logprobs = batch_logprobs(logits, torch.tensor(drawn), output.batch, self._sampling)
        found: dict[int, LogprobRecord] = {}
        if logprobs is not None:
            found = dict(zip(logprobs.rows, logprobs.records(), strict=True))
        places = [drawn_result(token, state) for token, state in zip(drawn, output.status, strict=True)]
        for place, one in found.items():
            places[place].logprobs = [one]
        for i, first in zip(drawing, firsts, strict=True):
            # `along_drafts` keeps what was accepted and one more token; positions after a rejected draft do not count.
            drafts = entries[i].drafts
            kept = along_drafts(drafts, places[first : first + 1 + len(drafts)], entries[i].parents, judged.get(first))
            # Fill the existing result: it may already have prompt log-probabilities.
            results[i].tokens, results[i].logprobs, results[i].error = kept.tokens, kept.logprobs, kept.error
            results[i].num_drafts, results[i].parents, results[i].kept = kept.num_drafts, kept.parents, kept.kept

    def _rank_candidates(self, entries: Sequence[PlanEntry], part: list[int], results: list[EntryResult],
                         logits: Tensor) -> None:
        """The likeliest next tokens, for entries that ask for candidates instead of a draw."""
        temperatures = [self._table.sampling(entries[i].row).params.temperature or 1.0 for i in part]
        found = rank_candidates(logits, [entries[i].candidates for i in part], temperatures, self._sampling)
        take_candidates(part, found, results)

    def _prompt_logprobs(self, entry: PlanEntry, first_row: int, result: EntryResult) -> Iterator[LogitsUse]:
        """Log-probabilities of the prompt tokens that follow this chunk's positions."""
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
