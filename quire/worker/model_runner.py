"""One step on the model: gather inputs from the rows, run the decoder, draw tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.layers.stream import ResidualStream
from quire.models.decoder import Decoder
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.logprobs import batch_logprobs, rank_candidates, token_logprobs
from quire.sampling.sampler import sample
from quire.scheduler.plan import EntryResult, PlanEntry, TokenLogprobs
from quire.speculation.verify import RejectionDraw, put_in_place, rows_along
from quire.worker.cache_engine import CacheEngine
from quire.worker.drafter import Drafter
from quire.worker.outcomes import along_drafts, drawn_result, reported, take_candidates
from quire.worker.request_table import RequestTable
from quire.worker.step_inputs import step_inputs

_PROMPT_LOGITS_ROWS = 64
"""Prompt positions whose logits exist at once: a vocabulary wide, they would outgrow the model otherwise."""


class ModelRunner:
    """Executes plan entries and decides nothing."""

    def __init__(self, decoder: Decoder, cache: CacheEngine, table: RequestTable,
                 drafter: Drafter | None = None, rejection: bool = False) -> None:
        self._decoder = decoder
        self._cache = cache
        self._table = table
        self.drafter = drafter
        self._rejection = rejection
        """Judge drafts by rejection; else a draft is kept if it is what the target draws."""

    def run(self, entries: Sequence[PlanEntry]) -> list[EntryResult]:
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
        hidden = self._decoder.forward(ids, ctx, self._cache.layers)
        row_ends = dict(zip((entry.row for entry in computing), ctx.query_start.tolist()[1:], strict=True))
        ends = [row_ends[entry.row if entry.shares is None else entry.shares] for entry in entries]
        results = [EntryResult() for _ in entries]
        for entry, end, result in zip(entries, ends, results, strict=True):
            if entry.prompt_logprobs_from is not None:
                self._prompt_logprobs(entry, hidden, end - entry.num_tokens, result)
        self._draw(entries, ends, hidden, results, guesses)
        self._rank_candidates(entries, ends, hidden, results)
        return results

    def _draw(self, entries: Sequence[PlanEntry], ends: list[int], hidden: ResidualStream, results: list[EntryResult],
              guesses: dict[int, Tensor]) -> None:
        """Tokens for the entries that reach the end of what their sequence knows, drafts judged on the way."""
        drawing = [i for i, entry in enumerate(entries) if entry.sample]
        if not drawing:
            return
        last: list[int] = []
        rows: list[SamplingRow] = []
        firsts: list[int] = []
        for i in drawing:
            firsts.append(len(rows))
            rows += rows_along(self._table.sampling(entries[i].row), entries[i].drafts, entries[i].masks)
            last += range(ends[i] - 1 - len(entries[i].drafts), ends[i])
        everything = last == list(range(len(hidden)))
        logits = self._decoder.logits(hidden if everything else hidden[torch.tensor(last)])
        batch = SamplingBatch.build(rows, logits.shape[1])
        output = sample(logits, batch)
        drawn, status, logprobs = output.token_ids.tolist(), output.status.tolist(), output.logprobs
        judged: dict[int, int] = {}
        if self._rejection:
            draws = [RejectionDraw(first, entries[i].drafts, rows[first : first + 1 + len(entries[i].drafts)],
                                   guesses.get(i)) for i, first in zip(drawing, firsts, strict=True)]
            judged = put_in_place(drawn, logits, [d for d in draws if d.drafts and not d.rows[0].params.greedy])
            if judged:
                logprobs = batch_logprobs(logits, torch.tensor(drawn), batch)
        found: dict[int, TokenLogprobs] = {}
        if logprobs is not None:
            found = dict(zip(logprobs.rows, reported(logprobs), strict=True))
        places = [drawn_result(token, state) for token, state in zip(drawn, status, strict=True)]
        for place, one in found.items():
            places[place].logprobs = [one]
        for i, first in zip(drawing, firsts, strict=True):
            # What follows the first refused draft was not drawn by rejection.
            count = 1 + judged.get(first, len(entries[i].drafts))
            self._keep(entries[i], along_drafts(entries[i].drafts, places[first : first + count]), results[i])

    def _keep(self, entry: PlanEntry, judged: EntryResult, result: EntryResult) -> None:
        """The row takes over the tokens up to the first that is not what was proposed."""
        known = entry.start + entry.num_tokens - len(entry.drafts)
        result.tokens, result.logprobs, result.error = judged.tokens, judged.logprobs, judged.error
        result.num_drafts = judged.num_drafts
        for place, token in enumerate(judged.tokens):
            self._table.append(entry.row, known + place, token)
        if self.drafter is not None and judged.tokens:
            self.drafter.model.kept(entry.row, known + len(judged.tokens) - 1)

    def _rank_candidates(self, entries: Sequence[PlanEntry], ends: list[int], hidden: ResidualStream,
                         results: list[EntryResult]) -> None:
        """The likeliest next tokens of the entries that ask for them instead of a draw."""
        asking = [i for i, entry in enumerate(entries) if entry.candidates]
        for at in range(0, len(asking), _PROMPT_LOGITS_ROWS):
            part = asking[at : at + _PROMPT_LOGITS_ROWS]
            logits = self._decoder.logits(hidden[torch.tensor([ends[i] - 1 for i in part])])
            temperatures = [self._table.sampling(entries[i].row).params.temperature or 1.0 for i in part]
            take_candidates(part, rank_candidates(logits, [entries[i].candidates for i in part], temperatures), results)

    def _prompt_logprobs(self, entry: PlanEntry, hidden: ResidualStream, first_row: int, result: EntryResult) -> None:
        """Of the prompt tokens that follow the positions of this chunk."""
        state = self._table.sampling(entry.row)
        num_prompt = state.position - state.num_output
        begin = entry.prompt_logprobs_from or 0
        end = min(entry.start + entry.num_tokens, num_prompt - 1)
        result.prompt_logprobs = []
        for at in range(begin, end, _PROMPT_LOGITS_ROWS):
            stop = min(at + _PROMPT_LOGITS_ROWS, end)
            logits = self._decoder.logits(hidden[first_row + at - entry.start : first_row + stop - entry.start])
            targets = torch.from_numpy(self._table.tokens[entry.row, at + 1 : stop + 1].astype(np.int64))
            found = token_logprobs(logits, targets, state.params.prompt_logprobs or 0)
            result.prompt_logprobs.extend(reported(found))
