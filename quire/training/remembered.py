"""What the target said of the texts, kept on its device: it reads each of them once, not in every epoch."""

from __future__ import annotations

import torch
from torch import Tensor

from quire.training.target import Seen, Target
from quire.worker.memory import available_memory

_SHARE = 0.65
"""Of the memory that is free, what may be taken; else nothing is kept. It is asked before the first step has been
trained, which needs some of the rest."""


class Remembered:
    """Of texts of so many tokens in all, each of which has a number; one more is that of padding."""

    def __init__(self, target: Target, tokens: int) -> None:
        self._target = target
        self._tokens = tokens
        self._full = False
        """There is no room."""
        self._states: Tensor | None = None
        self._best: Tensor | None = None
        self._known: set[int] = set()

    def see(self, texts: list[int], rows: Tensor, where: Tensor) -> Seen:
        """Of some texts, by their numbers; `rows` [B, T] are their tokens, `where` [B, T] the tokens' numbers."""
        if self._states is not None and self._best is not None and self._known.issuperset(texts):
            states = self._states[where]
            return Seen(states, self._target.final(states[..., -self._target.decoder.spec.hidden_size :]),
                        self._best[where])
        seen = self._target.see(rows)
        if self._states is None and not self._full:
            self._make_room(seen.states)
        if self._states is not None and self._best is not None:
            self._states[where], self._best[where] = seen.states, seen.best
            self._known.update(texts)
        return seen

    def _make_room(self, states: Tensor) -> None:
        """Zeros, since numbers that are none would spread from the padding."""
        shape, device = (self._tokens + 1, states.shape[-1]), states.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
        self._full = shape[0] * (shape[1] * states.element_size() + 8) > _SHARE * free
        if not self._full:
            self._states = torch.zeros(shape, dtype=states.dtype, device=device)
            self._best = torch.zeros(shape[0], dtype=torch.int64, device=device)
