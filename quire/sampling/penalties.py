"""Penalties on tokens that were there before: what a sequence has said so far, and the arithmetic of all devices."""

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


def penalised(
    values: Tensor, counts: Tensor, repetition: Tensor | float, frequency: Tensor | float, presence: Tensor | float
) -> Tensor:
    """Logits of tokens that the text holds, drawn `counts` times each (float32; 0: only in the prompt): repetition
    first (divide positive, multiply negative values), then subtract what frequency and presence ask for."""
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    return repeated - (frequency * counts + presence * (counts > 0))


@dataclass(slots=True)
class Penalties:
    """Penalties of a batch as flat (row, token) entries; no pair appears twice."""

    rows: Tensor
    ids: Tensor
    counts: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor

    def apply_(self, logits: Tensor) -> None:
        values = logits[self.rows, self.ids]
        logits[self.rows, self.ids] = penalised(values, self.counts, self.repetition, self.frequency, self.presence)


def gather_penalties(
    entries: Sequence[tuple[int, SamplingParams, TokenHistory]], device: torch.device
) -> Penalties | None:
    """Flatten (row, its parameters, its history) of the penalised rows; None when there is nothing to do."""
    if not entries:
        return None
    sizes = [len(history) for _, _, history in entries]

    def each(values: Sequence[float], dtype: type) -> Tensor:
        """A number of every row, for all its tokens."""
        return tensor([np.repeat(np.array(values, dtype), sizes)])

    def tensor(parts: list[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device)

    chosen = [params for _, params, _ in entries]
    return Penalties(
        rows=each([row for row, _, _ in entries], np.int64),
        ids=tensor([history.ids for _, _, history in entries]),
        counts=tensor([history.counts.astype(np.float32) for _, _, history in entries]),
        repetition=each([params.repetition_penalty for params in chosen], np.float32),
        frequency=each([params.frequency_penalty for params in chosen], np.float32),
        presence=each([params.presence_penalty for params in chosen], np.float32),
    )
