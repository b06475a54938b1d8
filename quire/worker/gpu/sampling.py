"""The full sampler over the device's logits and token rows: for rows with drafts, for memory that runs short, and as
the reference of the sampling kernels.

Nothing here waits for the device. What penalties and bad words need to know of the text is read from the request table,
where the last token lies even when the host has not seen it yet.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.batch import Edits, SamplingBatch
from quire.sampling.kernels import SamplingKernels
from quire.sampling.penalties import penalised
from quire.sampling.sampler import SamplerOutput, sample
from quire.sampling.sending import send, send_tensor
from quire.worker.gpu.backend import host_sampling
from quire.worker.gpu.sampled_stage import SampledRow
from quire.worker.gpu.table import DeviceTable, RowInfo


@dataclass(slots=True)
class DeviceEdits:
    """`Edits` whose last two parts come from the tokens on the device."""

    base: Edits | None
    table: DeviceTable
    rows: Sequence[SampledRow]
    infos: Sequence[RowInfo]

    def apply_(self, logits: Tensor, kernels: SamplingKernels | None = None) -> tuple[Tensor, Tensor | None]:
        before = logits.amax(-1) if self.base is None else self.base.apply_(logits, kernels)[0]
        for index, (row, info) in enumerate(zip(self.rows, self.infos, strict=True)):
            if info.bad_words:
                _ban_words(logits[index], self.table, row, info)
            if info.params.penalised:
                _penalise(logits[index], self.table, row, info)
        return before, None


def sample_special(logits: Tensor, rows: Sequence[SampledRow], table: DeviceTable, positions: Tensor | None = None
                   ) -> SamplerOutput:
    """Tokens of the rows `rows[i].place` of logits [R, V], with log-probabilities where asked for."""
    return sample(*special_batch(logits, rows, table, positions), host_sampling(logits.device))


def special_batch(logits: Tensor, rows: Sequence[SampledRow], table: DeviceTable, positions: Tensor | None = None
                  ) -> tuple[Tensor, SamplingBatch]:
    """The rows `rows[i].place` of logits [R, V], and how each of them draws. `positions`: of the tokens that all rows
    follow, where the device alone knows them."""
    infos = [table.info(row.row) for row in rows]
    # Copies, since several may be of one row: the places of a draft.
    states = [info.state.ahead(()) for info in infos]
    for row, info, state in zip(rows, infos, states, strict=True):
        state.position, state.mask = row.position, row.mask
        state.num_output = row.position - info.num_prompt
    places = send([row.place for row in rows], torch.int64, logits.device)
    picked = logits[places].float()
    batch = SamplingBatch.build(states, picked.shape[1], logits.device)
    if any(info.bad_words or info.params.penalised for info in infos):
        batch.edits = DeviceEdits(batch.edits, table, rows, infos)  # type: ignore[assignment]
    for draws in (batch.plain, batch.nucleus, batch.filtered):
        if draws is not None and positions is not None:
            draws.positions = positions[places[draws.rows]].long() + 1
    return picked, batch


def _penalise(logits: Tensor, table: DeviceTable, row: SampledRow, info: RowInfo) -> None:
    """`penalties.penalised` over the whole vocabulary: which tokens the text holds is known on the device only."""
    params = info.params
    known = table.tokens[row.row, : row.position].long()
    drawn = known[info.num_prompt :]
    counts = torch.zeros_like(logits).index_add_(0, drawn, torch.ones_like(drawn, dtype=logits.dtype))
    seen = torch.zeros_like(logits, dtype=torch.bool).index_fill_(0, known, True)
    found = penalised(logits, counts, params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    logits.copy_(torch.where(seen, found, logits))


def _ban_words(logits: Tensor, table: DeviceTable, row: SampledRow, info: RowInfo) -> None:
    """Ban the last token of every bad word whose other tokens were just drawn."""
    drawn = row.position - info.num_prompt
    words = [word for word in info.bad_words if len(word) - 1 <= drawn]
    if not words:
        return
    width = max(len(word) - 1 for word in words)
    heads = torch.tensor([[-1] * (width - len(word) + 1) + list(word[:-1]) for word in words], dtype=torch.int64)
    heads = send_tensor(heads.reshape(len(words), width), logits.device)
    last = send([word[-1] for word in words], torch.int64, logits.device)
    recent = table.tokens[row.row, row.position - width : row.position].long()
    matches = ((heads == recent) | (heads < 0)).all(1)
    logits.index_add_(0, last, torch.where(matches, -math.inf, 0.0).to(logits.dtype))
