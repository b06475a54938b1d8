"""What the target said of the texts, kept on its device: it reads each of them once, not in every epoch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.training.target import Seen, Target
from quire.worker.memory import available_memory

_SHARE = 0.8
"""Of the memory that is free, what may be taken. It is asked before the first step has been trained, which needs some
of the rest."""


class Remembered:
    """Of texts whose tokens have numbers, one after the other. Where there is not room for all, of the first ones."""

    def __init__(self, target: Target, ends: Sequence[int]) -> None:
        """`ends`: of each text, the number after its last token."""
        self._target = target
        self._ends = ends
        self.room: int | None = None
        """Tokens that are remembered; None: not known before something was seen. One more is that of padding."""
        self._states: Tensor | None = None
        self._best: Tensor | None = None
        self._known: set[int] = set()

    def keeps(self, text: int) -> bool:
        return self.room is None or self._ends[text] <= self.room

    def see(self, texts: list[int], rows: Tensor, where: Tensor) -> Seen:
        """Of some texts, by their numbers; `rows` [B, T] are their tokens, `where` [B, T] the tokens' numbers, or any
        larger one for padding."""
        if self._states is not None and self._best is not None and self._known.issuperset(texts):
            where = where.clamp(max=len(self._best) - 1)
            states = self._states[where]
            return Seen(states, self._target.final(states[..., -self._target.decoder.spec.hidden_size :]),
                        self._best[where].long())
        seen = self._target.see(rows)
        if self.room is None:
            self._make_room(seen.states)
        if self._states is not None and self._best is not None and all(map(self.keeps, texts)):
            where = where.clamp(max=len(self._best) - 1)
            self._states[where], self._best[where] = seen.states, seen.best.int()
            self._known.update(texts)
        return seen

    def _make_room(self, states: Tensor) -> None:
        """Zeros, since numbers that are none would spread from the padding."""
        width, device = states.shape[-1], states.device
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
        self.room = max(0, min(self._ends[-1], int(_SHARE * free / (width * states.element_size() + 4)) - 1))
        if self.room:
            self._states = torch.zeros(self.room + 1, width, dtype=states.dtype, device=device)
            self._best = torch.zeros(self.room + 1, dtype=torch.int32, device=device)
