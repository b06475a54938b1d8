"""Which chains a model may end at unlikely drafts."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire.scheduler.request import Sequence


def drawn_plainly(seq: Sequence, at_random: bool) -> bool:
    """As the worker decides it (`sampling.batch.PlainDraw`), except for what changes from token to token."""
    request, params = seq.request, seq.request.params
    if params.penalised or params.logit_bias or params.allowed_token_ids is not None or request.bad_words:
        return False
    return at_random or params.greedy or params.top_k == 1
