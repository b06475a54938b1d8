"""Draft trees that grow on the device: candidates of a level and the nodes of the next pass, then the nodes that are
judged (`kernels/growth.py` says what lies where, and has the same in torch).

A program has a tree. No program reads what its own launch has written, so nothing has to be waited for.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from quire.kernels import growth
from quire.kernels.growth import Growing, JudgedRows, NodeRows
from quire.kernels.types import NO_DETOUR
from quire.sampling.sampler import OK

_FIELDS, _NONE, _NO_DETOUR = tl.constexpr(growth.FIELDS), tl.constexpr(growth.NO_NODE), tl.constexpr(NO_DETOUR)
_DRAWN, _OK = tl.constexpr(growth.DRAWN), tl.constexpr(OK)


@triton.jit
def _children(tokens, chances, drawn, row, child, warm, inside, WIDTH: tl.constexpr):
    """(token, chance, whether it is one) of each child of a row: the likeliest; where the token that was drawn counts
    more, it comes first, and the others follow with half of their chances."""
    token = tl.load(drawn + row * 2, mask=inside, other=-1)
    status = tl.load(drawn + row * 2 + 1, mask=inside, other=1)
    rank = child * 0 + WIDTH
    own = tl.zeros(child.shape, tl.float64)
    for at in range(0, WIDTH):
        here = tl.load(tokens + row * WIDTH + at, mask=inside, other=-1).to(tl.int32) == token
        rank = tl.where(here & (rank == WIDTH), at, rank)
        own = tl.where(here, tl.load(chances + row * WIDTH + at, mask=inside, other=0.0).to(tl.float64), own)
    # Behind the drawn token come those before its own rank, each one further, then those after it.
    other = tl.where(warm & (child <= rank), child - 1, child)
    known = inside & (other >= 0)
    likely = tl.load(tokens + row * WIDTH + other, mask=known, other=0).to(tl.int32)
    chance = tl.load(chances + row * WIDTH + other, mask=known, other=0.0).to(tl.float64)
    half = tl.full(child.shape, 1.0 - _DRAWN, tl.float64)
    first = warm & (child == 0)
    chance = tl.where(first, _DRAWN + half * own, tl.where(warm, half * chance, chance))
    return tl.where(first, token, likely), chance, inside & (chance > 0.0) & ((warm == 0) | (status == _OK))


@triton.jit
def _grow_kernel(
    trees, level_at, candidates, branch_chances, expanded, tokens, chances, drawn, ids, rows, places, after, positions,
    lengths, detours, size, nodes_size, detour_stride, WIDTH: tl.constexpr, MOST: tl.constexpr, DEPTH: tl.constexpr,
    FIRST: tl.constexpr, LANES: tl.constexpr, RESET: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    me = trees + tree * _FIELDS
    row = tl.load(me)
    level = tl.load(level_at)
    start, most_nodes, depth = tl.load(me + 1), tl.load(me + 2), tl.load(me + 3)
    candidates += tree * size
    branch_chances += tree * size
    expanded += tree * nodes_size
    real = row >= 0
    lane = tl.arange(0, LANES)
    mine, child = lane // WIDTH, lane % WIDTH
    ROWS: tl.constexpr = 1 if FIRST else MOST
    inside = real & (lane < ROWS * WIDTH)
    token, chance, known = _children(tokens, chances, drawn, tree * ROWS + mine, child,
                                     tl.load(me + 4) + lane * 0 != 0, inside, WIDTH)
    if FIRST:
        # The first level: nothing is left of the trees of the step before.
        number = lane
        everywhere = tl.arange(0, RESET)
        tl.store(branch_chances + everywhere, tl.full([RESET], -1.0, tl.float64),
                 mask=real & (everywhere >= WIDTH) & (everywhere < size))
        later = (everywhere >= MOST) & (everywhere < nodes_size)
        tl.store(expanded + everywhere, everywhere * 0 - 1, mask=real & later)
    else:
        number = WIDTH * (1 + (level - 1) * MOST) + lane
        parent = tl.load(expanded + (level - 1) * MOST + mine, mask=inside, other=-1)
        above = tl.load(branch_chances + parent, mask=inside & (parent >= 0), other=-1.0)
        known = known & (above > 0.0)
        chance = above * chance
    chance = tl.where(known, chance, -1.0)
    tl.store(candidates + number, token, mask=inside)
    tl.store(branch_chances + number, chance, mask=inside)
    for e in range(0, MOST):
        node = level * MOST + e
        best = tl.max(chance, axis=0)
        chosen = tl.min(tl.where(chance == best, lane, LANES), axis=0)
        goes = real & (best > 0.0) & (level + 1 < depth) & (node < most_nodes)
        candidate = tl.sum(tl.where(lane == chosen, number, 0), axis=0)
        at = tree * MOST + e
        tl.store(expanded + node, tl.where(goes, candidate, -1), mask=real & (node < nodes_size))
        tl.store(ids + at, tl.where(goes, tl.sum(tl.where(lane == chosen, token, 0), axis=0), 0).to(tl.int64))
        tl.store(rows + at, tl.where(goes, row, -1))
        tl.store(places + at, tl.where(goes, start + 1 + node, 0))
        tl.store(after + at, tl.where(goes, start + 1 + candidate // WIDTH, 0))
        tl.store(positions + at, tl.where(goes, start + 1 + level, 0).to(tl.int64))
        tl.store(lengths + at, tl.where(goes, start + 2 + level, 0))
        line = detours + at * detour_stride
        tl.store(line, tl.where(goes, start + 1, _NO_DETOUR))
        for up in range(0, DEPTH):
            going = goes & (up <= level) & (node >= 0)
            tl.store(line + 1 + level - up, start + 1 + node, mask=going)
            above_it = tl.load(expanded + node, mask=going & (up > 0), other=-1)
            node = tl.where(up == 0, candidate, above_it) // WIDTH - 1
        chance = tl.where(lane == chosen, -1.0, chance)


@triton.jit
def _finish_kernel(
    judged, candidates, branch_chances, expanded, rows, positions, parents, tokens, size, nodes_size, tokens_stride,
    WIDTH: tl.constexpr, MOST: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    tree = tl.program_id(0)
    row = tl.load(judged + tree * 4)
    if row >= 0:
        position, first = tl.load(judged + tree * 4 + 1), tl.load(judged + tree * 4 + 2)
        drafts = tl.load(judged + tree * 4 + 3)
        lane = tl.arange(0, LANES)
        inside = lane < size
        chance = tl.load(branch_chances + tree * size + lane, mask=inside, other=-1.0)
        token = tl.load(candidates + tree * size + lane, mask=inside, other=0)
        node = lane // WIDTH - 1
        parent = tl.load(expanded + tree * nodes_size + node, mask=inside & (node >= 0), other=-1)
        left = chance
        for _ in range(0, drafts):
            best = tl.max(left, axis=0)
            left = tl.where(lane == tl.min(tl.where(left == best, lane, LANES), axis=0), -1.0, left)
        kept = (chance > 0.0) & (left < 0.0)
        # Of nodes whose parent has its place: that place and one. A branch goes on where the last one did.
        seen = tl.where(node < 0, 0, -1)
        for k in range(0, drafts):
            open_ = kept & (seen >= 0)
            latest = tl.max(tl.where(open_, seen, -1), axis=0)
            here = open_ & (seen == latest)
            best = tl.max(tl.where(here, chance, -1.0), axis=0)
            chosen = tl.min(tl.where(here & (chance == best), lane, LANES), axis=0)
            found = latest >= 0
            above = chosen // WIDTH - 1
            depth = tl.where(above < 0, 1, 2 + above // MOST)
            at = first + 1 + k
            tl.store(rows + at, tl.where(found, row, -1))
            tl.store(parents + at, tl.where(found, latest - 1, _NONE))
            tl.store(positions + at, tl.where(found, position + depth - 1, position + k))
            tl.store(tokens + row.to(tl.int64) * tokens_stride + position + k,
                     tl.sum(tl.where(lane == chosen, token, 0), axis=0), mask=found)
            kept = kept & (lane != chosen)
            seen = tl.where(parent == chosen, k + 1, seen)


@triton.jit
def _line_kernel(judged, positions, parents, detours, stride, DEPTH: tl.constexpr):
    """Where the keys of a node's ancestors lie."""
    tree, node = tl.program_id(0), tl.program_id(1)
    row = tl.load(judged + tree * 4)
    if (row >= 0) & (node < tl.load(judged + tree * 4 + 3)):
        position, first = tl.load(judged + tree * 4 + 1), tl.load(judged + tree * 4 + 2) + 1
        known = tl.load(parents + first + node) != _NONE
        depth = tl.load(positions + first + node) - position + 1
        line = detours + (first + node).to(tl.int64) * stride
        tl.store(line, tl.where(known, position, _NO_DETOUR))
        for up in range(0, DEPTH):
            going = known & (up < depth)
            tl.store(line + depth - up, position + node, mask=going)
            node = tl.load(parents + first + node, mask=going, other=0)


def grow(growing: Growing, tokens: Tensor, chances: Tensor, drawn: Tensor, nodes: NodeRows, count: int, first: bool
         ) -> None:
    """As `kernels.growth.grow`."""
    g = growing
    lanes, size = triton.next_power_of_2(g.width * (1 if first else g.most)), g.tokens.shape[1]
    _grow_kernel[(count,)](
        g.trees, g.level, g.tokens, g.chances, g.expanded, tokens, chances, drawn, nodes.ids, nodes.rows, nodes.places,
        nodes.after, nodes.positions, nodes.lengths, nodes.detours, size, g.expanded.shape[1], nodes.detours.stride(0),
        g.width, g.most, g.depth, first, lanes, triton.next_power_of_2(max(size, g.expanded.shape[1])), num_warps=1,
    )  # fmt: skip


def finish(growing: Growing, judged: JudgedRows, count: int, nodes: int) -> None:
    """As `kernels.growth.finish`."""
    g, size = growing, growing.tokens.shape[1]
    lanes = triton.next_power_of_2(size)
    _finish_kernel[(count,)](
        judged.trees, g.tokens, g.chances, g.expanded, judged.rows, judged.positions, judged.parents, judged.tokens,
        size, g.expanded.shape[1], judged.tokens.stride(0), g.width, g.most, lanes, num_warps=1 if lanes <= 256 else 4,
    )  # fmt: skip
    _line_kernel[(count, nodes)](
        judged.trees, judged.positions, judged.parents, judged.detours, judged.detours.stride(0), g.depth, num_warps=1
    )
