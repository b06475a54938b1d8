"""What a sequence has said so far, as penalties see it: its tokens and how often each was drawn."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from quire.sampling.params import SamplingParams


class TokenHistory:
    """Distinct token ids of prompt and output with their output counts, kept up to date one token at a time.

    Penalties touch only these ids, so their cost follows the text of the request and not the vocabulary.
    """

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, prompt_ids: Iterable[int], output_ids: Sequence[int] = ()) -> None:
        self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt_ids))}
        capacity = max(16, 2 * (len(self._slots) + len(output_ids)))
        self._ids = np.zeros(capacity, dtype=np.int64)
        self._counts = np.zeros(capacity, dtype=np.int32)
        self._ids[: len(self._slots)] = list(self._slots)
        for token in output_ids:
            self.append(token)

    def __len__(self) -> int:
        return len(self._slots)

    def append(self, token: int) -> None:
        """Count one drawn token."""
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def copy(self) -> TokenHistory:
        other = TokenHistory(())
        other._slots, other._ids, other._counts = dict(self._slots), self._ids.copy(), self._counts.copy()
        return other

    @property
    def ids(self) -> np.ndarray:
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> np.ndarray:
        """Times each of `ids` was drawn; 0 for a token of the prompt only."""
        return self._counts[: len(self._slots)]


@dataclass(slots=True)
class Penalties:
    """Penalties of a batch as flat (row, token) entries; no pair appears twice."""

    rows: Tensor
    ids: Tensor
    repetition: Tensor
    subtract: Tensor

    def apply_(self, logits: Tensor) -> None:
        """Repetition first (divide positive, multiply negative values), then subtract the two others."""
        values = logits[self.rows, self.ids]
        values = torch.where(values > 0, values / self.repetition, values * self.repetition)
        logits[self.rows, self.ids] = values - self.subtract


def gather_penalties(
    entries: Sequence[tuple[int, SamplingParams, TokenHistory]], device: torch.device
) -> Penalties | None:
    """Flatten (row, its parameters, its history) of the penalised rows; None when there is nothing to do."""
    if not entries:
        return None
    rows, ids, repetition, subtract = [], [], [], []
    for row, params, history in entries:
        counts, size = history.counts, len(history)
        amount = np.float32(params.frequency_penalty) * counts.astype(np.float32)
        amount += np.float32(params.presence_penalty) * (counts > 0)
        rows.append(np.full(size, row, dtype=np.int64))
        ids.append(history.ids)
        repetition.append(np.full(size, params.repetition_penalty, dtype=np.float32))
        subtract.append(amount.astype(np.float32))

    def tensor(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    return Penalties(tensor(rows), tensor(ids), tensor(repetition), tensor(subtract))
