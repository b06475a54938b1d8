"""One step on the model: gather inputs from the rows, run the decoder, draw tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.layers.stream import ResidualStream
from quire.models.decoder import Decoder
from quire.sampling.batch import SamplingBatch, SamplingRow
from quire.sampling.masks import TokenMasks
from quire.sampling.sampler import (
    FAILURES,
    NOT_FINITE,
    OK,
    SampledLogprobs,
    likeliest,
    sample,
    token_logprobs,
)
from quire.scheduler.plan import EntryResult, PlanEntry, TokenLogprobs
from quire.speculation.verify import RejectionDraw, count_equal, put_in_place, rows_along
from quire.worker.cache_engine import CacheEngine
from quire.worker.drafter import Drafter
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
        output = sample(logits, SamplingBatch.build(rows, logits.shape[1]))
        drawn, status = output.token_ids.tolist(), output.status.tolist()
        found: dict[int, TokenLogprobs] = {}
        if output.logprobs is not None:
            found = dict(zip(output.logprobs.rows, _token_logprobs(output.logprobs), strict=True))
        judged: dict[int, int] = {}
        if self._rejection:
            draws = [RejectionDraw(first, entries[i].drafts, rows[first : first + 1 + len(entries[i].drafts)],
                                   guesses.get(i)) for i, first in zip(drawing, firsts, strict=True)]
            judged = put_in_place(drawn, logits, [d for d in draws if d.drafts and not d.rows[0].params.greedy])
        for i, first in zip(drawing, firsts, strict=True):
            entry, result = entries[i], results[i]
            end = first + 1 + len(entry.drafts)
            if first in judged:
                kept = judged[first]
                for place in range(first, first + kept + 1):
                    if place in found:
                        found[place] = _logprobs_of(logits[place], drawn[place], rows[place])
            else:
                kept = count_equal(entry.drafts, drawn[first:end])
            self._keep(entry, kept, drawn[first:end], status[first:end], result)
            if rows[first].params.logprobs is not None:
                result.logprobs = [found[first + place] for place in range(len(result.tokens))]

    def _keep(self, entry: PlanEntry, kept: int, drawn: list[int], status: list[int], result: EntryResult) -> None:
        """The row takes over the tokens up to the first that is not what was proposed."""
        known = entry.start + entry.num_tokens - len(entry.drafts)
        result.num_drafts = len(entry.drafts)
        for place in range(kept + 1):
            if status[place] != OK:
                if not place:
                    result.error = FAILURES[status[place]]
                # Else the tokens before it stand, and the next step says the same for itself.
                return
            self._table.append(entry.row, known + place, drawn[place])
            result.tokens.append(drawn[place])
        if self.drafter is not None:
            self.drafter.model.kept(entry.row, known + kept)

    def _rank_candidates(self, entries: Sequence[PlanEntry], ends: list[int], hidden: ResidualStream,
                         results: list[EntryResult]) -> None:
        """The likeliest next tokens of the entries that ask for them instead of a draw."""
        asking = [i for i, entry in enumerate(entries) if entry.candidates]
        for at in range(0, len(asking), _PROMPT_LOGITS_ROWS):
            part = asking[at : at + _PROMPT_LOGITS_ROWS]
            logits = self._decoder.logits(hidden[torch.tensor([ends[i] - 1 for i in part])])
            temperatures = [self._table.sampling(entries[i].row).params.temperature or 1.0 for i in part]
            if any(temperature != 1.0 for temperature in temperatures):
                logits = logits / torch.tensor(temperatures)[:, None]
            finite = torch.isfinite(logits.amax(-1)).tolist()
            ids, logprobs = likeliest(logits, max(entries[i].candidates for i in part))
            for i, sound, tokens, scores in zip(part, finite, ids.tolist(), logprobs.tolist(), strict=True):
                if sound:
                    results[i].candidates = list(zip(tokens, scores, strict=True))[: entries[i].candidates]
                else:
                    results[i].error = FAILURES[NOT_FINITE]

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
            result.prompt_logprobs.extend(_token_logprobs(found))


def _token_logprobs(found: SampledLogprobs) -> list[TokenLogprobs]:
    return [TokenLogprobs(*row) for row in found.to_list()]


def _logprobs_of(logits: Tensor, token: int, row: SamplingRow) -> TokenLogprobs:
    one = logits[None].clone()
    masks = TokenMasks.of({0: row.mask} if row.mask else {}, logits.device)
    if masks is not None:
        masks.apply_(one)
    found = token_logprobs(one, torch.tensor([token]), row.params.logprobs or 0)
    return _token_logprobs(found)[0]
