"""One step on the model: gather inputs from the rows, run the decoder, draw tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from quire.attention.context import StepContext
from quire.models.decoder import Decoder
from quire.sampling.batch import SamplingBatch
from quire.sampling.sampler import FAILURES, NOT_FINITE, OK, SampledLogprobs, likeliest, sample, token_logprobs
from quire.scheduler.plan import EntryResult, PlanEntry, TokenLogprobs
from quire.worker.cache_engine import CacheEngine
from quire.worker.request_table import RequestTable

_PROMPT_LOGITS_ROWS = 64
"""Prompt positions whose logits exist at once: a vocabulary wide, they would outgrow the model otherwise."""


class ModelRunner:
    """Executes plan entries and decides nothing."""

    def __init__(self, decoder: Decoder, cache: CacheEngine, table: RequestTable) -> None:
        self._decoder = decoder
        self._cache = cache
        self._table = table

    def run(self, entries: Sequence[PlanEntry]) -> list[EntryResult]:
        if not entries:
            return []
        # Who shares another's logits computes nothing.
        computing = [entry for entry in entries if entry.num_tokens]
        ids, ctx = self._inputs(computing)
        hidden = self._decoder.forward(ids, ctx, self._cache.layers)
        row_ends = dict(zip((entry.row for entry in computing), ctx.query_start.tolist()[1:], strict=True))
        ends = [row_ends[entry.row if entry.shares is None else entry.shares] for entry in entries]
        results = [EntryResult() for _ in entries]
        for entry, end, result in zip(entries, ends, results, strict=True):
            if entry.prompt_logprobs_from is not None:
                self._prompt_logprobs(entry, hidden, end - entry.num_tokens, result)
        self._draw(entries, ends, hidden, results)
        self._rank_candidates(entries, ends, hidden, results)
        return results

    def _inputs(self, entries: Sequence[PlanEntry]) -> tuple[Tensor, StepContext]:
        """Token ids and step context, all gathered from the table."""
        table = self._table
        rows = np.array([entry.row for entry in entries], np.int64)
        starts = np.array([entry.start for entry in entries], np.int64)
        counts = np.array([entry.num_tokens for entry in entries], np.int64)
        for entry in entries:
            if entry.drafts or entry.given:
                values, end = entry.drafts or entry.given, entry.start + entry.num_tokens
                table.tokens[entry.row, end - len(values) : end] = values
        query_start = np.zeros(len(entries) + 1, np.int32)
        np.cumsum(counts, out=query_start[1:])
        token_rows, positions = rows, starts
        if query_start[-1] != len(entries):
            token_rows = np.repeat(rows, counts)
            positions = np.arange(query_start[-1]) - np.repeat(query_start[:-1] - starts, counts)
        ids = table.tokens[token_rows, positions].astype(np.int64)
        lengths = (starts + counts).astype(np.int32)
        size = table.block_size
        width = -(-int(lengths.max()) // size)
        index, offset = positions // size, positions % size
        return torch.from_numpy(ids), StepContext(
            positions=torch.from_numpy(positions),
            query_start=torch.from_numpy(query_start),
            context_len=torch.from_numpy(lengths),
            block_tables=tuple(torch.from_numpy(blocks[rows, :width]) for blocks in table.tables),
            slots=tuple(torch.from_numpy(blocks[token_rows, index].astype(np.int64) * size + offset)
                        for blocks in table.tables),
        )

    def _draw(self, entries: Sequence[PlanEntry], ends: list[int], hidden: Tensor, results: list[EntryResult]) -> None:
        """Tokens for the entries that reach the end of what their sequence knows."""
        drawing = [i for i, entry in enumerate(entries) if entry.sample]
        if not drawing:
            return
        last = [ends[i] - 1 for i in drawing]
        everything = last == list(range(len(hidden)))
        logits = self._decoder.logits(hidden if everything else hidden[torch.tensor(last)])
        rows = [self._table.sampling(entries[i].row) for i in drawing]
        output = sample(logits, SamplingBatch.build(rows, logits.shape[1]))
        for i, token, status in zip(drawing, output.token_ids.tolist(), output.status.tolist(), strict=True):
            entry = entries[i]
            if status == OK:
                self._table.append(entry.row, entry.start + entry.num_tokens, token)
                results[i].tokens.append(token)
            else:
                results[i].error = FAILURES[status]
        if output.logprobs is not None:
            for place, found in zip(output.logprobs.rows, _token_logprobs(output.logprobs), strict=True):
                results[drawing[place]].logprobs = [found]

    def _rank_candidates(self, entries: Sequence[PlanEntry], ends: list[int], hidden: Tensor,
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

    def _prompt_logprobs(self, entry: PlanEntry, hidden: Tensor, first_row: int, result: EntryResult) -> None:
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
