"""Where chains of drafts go on once they are judged, found on the device (torch: `step_reference`)."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _follow_kernel(
    chains,  # int32 [chains, 4]: row of the table (-1: none), position of the first draft, row of the step, drafts
    ids,
    drawn,
    ring,
    rows,
    positions,
    num_rows,
    OK: tl.constexpr,
    SPAN: tl.constexpr,
    PLACES: tl.constexpr,
):
    chain = tl.program_id(0)
    row = tl.load(chains + chain * 4)
    position = tl.load(chains + chain * 4 + 1)
    first = tl.load(chains + chain * 4 + 2)
    place = tl.arange(0, PLACES)
    own = (row >= 0) & (place < tl.load(chains + chain * 4 + 3))
    results = drawn + (tl.load(ring).to(tl.int64) * num_rows + first + place) * 2
    draft = tl.load(ids + first + 1 + place, mask=own, other=-1).to(tl.int32)
    hit = own & (draft == tl.load(results, mask=own, other=-2)) & (tl.load(results + 1, mask=own, other=OK) == OK)
    accepted = tl.min(tl.where(hit, PLACES, place), axis=0)
    at = position + accepted - (SPAN - 1) + place
    real = (row >= 0) & (at >= position)
    tl.store(rows + chain * SPAN + place, tl.where(real, row, -1), mask=place < SPAN)
    tl.store(positions + chain * SPAN + place, tl.where(real, at, 0), mask=place < SPAN)


def follow_chains(chains: Tensor, ids: Tensor, drawn: Tensor, ring: Tensor, rows: Tensor, positions: Tensor, ok: int,
                  span: int) -> None:
    """The tokens that each chain of drafts has become, as rows of a step with `span` of each: the last in the last.

    `chains` int32 [N, 4]: row of the table (-1: none), position of the first draft, row of the step of the token
    before the drafts (those of the drafts follow it), number of drafts, less than `span`. `ids` int64 are of the rows
    of the step, `drawn` int32 [slots, rows, 2] what was drawn after each, and its status. A draft is accepted if it is
    what was drawn before it. `rows` and `positions` int32 [N * span] get the accepted drafts and the token after them;
    the rows before those are padding.
    """
    _follow_kernel[(chains.shape[0],)](
        chains, ids, drawn, ring, rows, positions, drawn.shape[1], ok, span, triton.next_power_of_2(span), num_warps=1,
    )  # fmt: skip
