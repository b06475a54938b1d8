"""Log-probabilities of the prompt tokens that a step computes, a few rows of logits at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from quire.layers.stream import ResidualStream
from quire.sampling.logprobs import SampledLogprobs, token_logprobs
from quire.scheduler.plan import PlanEntry
from quire.worker.gpu.backend import host_sampling
from quire.worker.gpu.batches import MixedBatch
from quire.worker.gpu.memory import too_much
from quire.worker.gpu.passes import DevicePasses
from quire.worker.gpu.results import PendingStep
from quire.worker.gpu.table import DeviceTable

_LOGITS_ROWS = 256


def add_prompt_logprobs(
    pending: PendingStep,
    entries: Sequence[PlanEntry],
    batch: MixedBatch,
    hidden: ResidualStream,
    passes: DevicePasses,
    table: DeviceTable,
) -> None:
    """For the entries that ask for them. One that asks for more than the memory holds fails alone."""
    for place, i in enumerate(batch.order):
        entry, begin = entries[i], entries[i].prompt_logprobs_from
        if begin is not None:
            try:
                found = _of_entry(entry, begin, hidden, int(batch.query_start[place]), passes, table)
            except RuntimeError as error:
                pending.errors[i] = too_much(error)
            else:
                pending.prompt_logprobs += [(i, run) for run in found]


def _of_entry(
    entry: PlanEntry, begin: int, hidden: ResidualStream, first: int, passes: DevicePasses, table: DeviceTable
) -> list[SampledLogprobs]:
    """Of the prompt tokens that follow the positions of this chunk, whose first token is `first` of the step."""
    info = table.info(entry.row)
    end = min(entry.start + entry.num_tokens, info.num_prompt - 1)
    found = []
    for at in range(begin, end, _LOGITS_ROWS):
        stop = min(at + _LOGITS_ROWS, end)
        chunk = torch.arange(first + at - entry.start, first + stop - entry.start, device=table.arena.device)
        logits = passes.logits(hidden[chunk]).float()
        targets = table.tokens[entry.row, at + 1 : stop + 1].long()
        found.append(token_logprobs(logits, targets, info.params.prompt_logprobs or 0, host_sampling(logits.device)))
    return found
