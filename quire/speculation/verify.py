"""Which drafts the target keeps, and which token of its own follows them: the verifiers.

Coupled (greedy is a case of it): the target draws at every place of the draft with the noise that belongs to
that place, and drafts are kept as long as they are what it drew. So the tokens are those of plain decoding.

Rejection: a draft x drawn from q is kept with probability min(1, p(x)/q(x)); in place of the first refused
one stands a draw from max(0, p - q), after the last kept one a draw from p. So they are distributed as p.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from quire.sampling.batch import SamplingRow
from quire.sampling.philox import Purpose, uniform


def rows_along(row: SamplingRow, drafts: Sequence[int], masks: bytes = b"") -> list[SamplingRow]:
    """What sampling knows before each draft, and after the last; `masks` are a grammar's for all of these."""
    rows = [row]
    for draft in drafts:
        rows.append(rows[-1].ahead((draft,)))
    size = len(masks) // len(rows)
    for place, each in enumerate(rows):
        each.mask = masks[place * size : (place + 1) * size]
    return rows


def count_equal(drafts: Sequence[int], drawn: Sequence[int]) -> int:
    """Leading drafts that are what the target drew."""
    for place, (draft, token) in enumerate(zip(drafts, drawn, strict=False)):
        if draft != token:
            return place
    return len(drafts)


def judge_by_rejection(drafts: Sequence[int], target: Tensor, proposal: Tensor | None,
                       rows: Sequence[SamplingRow]) -> tuple[int, int]:
    """(drafts kept, the token after them).

    `target` are integer weights [drafts + 1, vocabulary], proportional to p at every place, `proposal` those
    of q at every draft; None: each draft was certain (q is 1 there). `rows` name the noise of each place.
    """
    for place, draft in enumerate(drafts):
        p = target[place].double()
        if not float(p.sum()) > 0.0:
            return place, 0  # nothing can be drawn here, as the row's status says
        p /= p.sum()
        if proposal is None:
            q = torch.zeros_like(p)
            q[draft] = 1.0
        else:
            q = proposal[place].double()
            q /= q.sum()
        if _noise(rows[place], Purpose.ACCEPT) * float(q[draft]) >= float(p[draft]):
            rest = (p - q).clamp_(min=0.0)
            # Where p and q are equal nothing is left, and nothing is refused but for rounding.
            return place, _pick(rest if float(rest.sum()) > 0.0 else p, _noise(rows[place], Purpose.RESAMPLE))
    last = target[len(drafts)].double()
    drawable = float(last.sum()) > 0.0
    return len(drafts), _pick(last, _noise(rows[len(drafts)], Purpose.SAMPLE)) if drawable else 0


def _noise(row: SamplingRow, purpose: Purpose) -> float:
    return uniform(row.seed, row.seq_index, row.position, purpose)


def _pick(weights: Tensor, noise: float) -> int:
    """First place whose running total exceeds the share `noise` of the whole."""
    running = weights.cumsum(-1)
    place = int(torch.searchsorted(running, running[-1:] * noise, right=True))
    return min(place, int((weights > 0).nonzero()[-1]))
