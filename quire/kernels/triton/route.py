"""Expert routing on the device, without a host sync: choose each token's experts, sort the pairs by expert.

Pairs of token and expert (token * top_k + place among its experts) are sorted by expert into blocks of rows, each of
one expert, padded with -1. The host need not know how many blocks are in use: a GEMM's grid has as many as there
can be, and unused ones have expert -1. So one captured graph serves any routing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.routing import RoutedRows
from quire.kernels.torch_routing import choose_experts

_AT_ONCE = 1024
_MOST_SPANS = 16


@triton.jit
def _choose_kernel(
    logits, bias, slots, load, chosen, weights, scale, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, TOP_K: tl.constexpr,
    PLACES: tl.constexpr, SIGMOID: tl.constexpr, BIASED: tl.constexpr, RENORMALISED: tl.constexpr,
    GROUPS: tl.constexpr, GROUP_POW: tl.constexpr, CHOSEN_GROUPS: tl.constexpr, BEST_TWO: tl.constexpr,
    PADDED: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    real = expert < EXPERTS
    raw = tl.load(logits + token * EXPERTS + expert, mask=real, other=float("-inf")).to(tl.float32)
    if SIGMOID:
        scores = tl.where(real, 1.0 / (1.0 + tl.exp(-raw)), 0.0)
    else:
        scores = tl.exp(raw - tl.max(raw, axis=0))
        scores = scores / tl.sum(scores, axis=0)
    ranked = scores
    if BIASED:
        ranked = ranked + tl.load(bias + expert, mask=real, other=0.0)
    ranked = tl.where(real, ranked, float("-inf"))
    if GROUPS > 1:
        of = expert // (EXPERTS // GROUPS)
        group = tl.arange(0, GROUP_POW)
        counted = tl.full([GROUP_POW], float("-inf"), tl.float32)
        for each in tl.static_range(GROUPS):
            inside = tl.where(of == each, ranked, float("-inf"))
            value = tl.max(inside, axis=0)
            if BEST_TWO:
                value += tl.max(tl.where(expert == tl.argmax(inside, axis=0), float("-inf"), inside), axis=0)
            counted = tl.where(group == each, value, counted)
        allowed = of < 0
        for _ in tl.static_range(CHOSEN_GROUPS):
            best = tl.argmax(counted, axis=0)
            allowed = allowed | (of == best)
            counted = tl.where(group == best, float("-inf"), counted)
        ranked = tl.where(allowed, ranked, float("-inf"))
    place = tl.arange(0, PLACES)
    picks = tl.zeros([PLACES], tl.int32)
    gains = tl.zeros([PLACES], tl.float32)
    for index in tl.static_range(TOP_K):
        best = tl.minimum(tl.argmax(ranked, axis=0), EXPERTS - 1)  # rows of padding may hold NaN
        picks = tl.where(place == index, best, picks)
        gains = tl.where(place == index, tl.sum(tl.where(expert == best, scores, 0.0), axis=0), gains)
        ranked = tl.where(expert == best, float("-inf"), ranked)
    if RENORMALISED:
        gains = gains / (tl.sum(gains, axis=0) + 1e-20)
    if PADDED:
        picks = tl.where(tl.load(slots + token) >= 0, picks, -1)
    if COUNTED:
        tl.atomic_add(load + picks, tl.full([PLACES], 1, tl.int64), mask=(place < TOP_K) & (picks >= 0), sem="relaxed")
    tl.store(chosen + token * TOP_K + place, picks, mask=place < TOP_K)
    tl.store(weights + token * TOP_K + place, gains * scale, mask=place < TOP_K)


def choose(routed: RoutedRows) -> tuple[Tensor, Tensor]:
    """int32 and float32 [T, top_k]: the experts of each row, best first, and their weights; -1 for rows of padding."""
    logits, spec, tokens = routed.logits, routed.router, routed.logits.shape[0]
    chosen = torch.empty(tokens, spec.top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(tokens, spec.top_k, dtype=torch.float32, device=logits.device)
    _choose_kernel[(tokens,)](
        logits, logits if routed.choice_bias is None else routed.choice_bias,
        chosen if routed.slots is None else routed.slots, chosen if routed.load is None else routed.load, chosen,
        weights, spec.scale, spec.num_experts, triton.next_power_of_2(spec.num_experts), spec.top_k,
        triton.next_power_of_2(spec.top_k), spec.score == "sigmoid", routed.choice_bias is not None, spec.renormalised,
        spec.groups, triton.next_power_of_2(spec.groups), spec.chosen_groups, spec.group_score == "best two",
        routed.slots is not None, routed.load is not None, num_warps=1 if spec.num_experts <= 256 else 4,
    )  # fmt: skip
    return chosen, weights


def choose_reference(routed: RoutedRows) -> tuple[Tensor, Tensor]:
    chosen, weights = choose_experts(routed.logits, routed.router, routed.choice_bias)
    if routed.slots is not None:
        chosen = torch.where(routed.slots[:, None] >= 0, chosen, -1)
    if routed.load is not None:
        routed.load.add_(torch.bincount(chosen[chosen >= 0], minlength=routed.router.num_experts))
    return chosen.to(torch.int32), weights


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Pairs by expert, in blocks of `rows`."""

    pairs: Tensor
    """int32 [blocks * rows]: the pair of each row, or -1; of a block without an expert: anything."""
    expert: Tensor
    """int32 [blocks]: whose block it is, or -1."""
    counts: Tensor
    """int32 [experts, spans]: how many pairs each expert has in each span of the pairs."""
    rows: int


def most_blocks(pairs: int, num_experts: int, rows: int) -> int:
    """Every expert that is used may fill its last block in part."""
    return pairs // rows + min(pairs, num_experts)


def span_of(pairs: int) -> tuple[int, int]:
    """(pairs of a span, spans): programs that look through many pairs share them out. Both are powers of two times
    `_AT_ONCE`, or one span, so that few kernels are compiled."""
    length = _AT_ONCE * 4
    while length * _MOST_SPANS < pairs:
        length *= 2
    return length, triton.next_power_of_2(triton.cdiv(max(1, pairs), length))


@triton.jit(do_not_specialize=["pairs"])
def _count_kernel(chosen, counts, pairs, SPAN: tl.constexpr, SPANS: tl.constexpr, AT_ONCE: tl.constexpr):
    me = tl.program_id(0)
    span = tl.program_id(1)
    total = tl.zeros([AT_ONCE], tl.int32)
    for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, pairs), AT_ONCE):
        pair = start + tl.arange(0, AT_ONCE)
        total += (tl.load(chosen + pair, mask=pair < pairs, other=-1) == me).to(tl.int32)
    tl.store(counts + me * SPANS + span, tl.sum(total, axis=0))


@triton.jit(do_not_specialize=["pairs", "blocks"])
def _place_kernel(
    chosen, counts, placed, block_expert, pairs, blocks, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    SPAN: tl.constexpr, SPANS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Each program computes where the blocks begin (a handful of instructions) and writes its expert's pairs of its
    span; the program of the first span also writes the experts of the blocks."""
    me = tl.program_id(0)
    span = tl.program_id(1)
    expert = tl.arange(0, BLOCK)
    each = tl.arange(0, SPANS)
    all_counts = tl.load(
        counts + expert[:, None] * SPANS + each[None, :], mask=(expert < EXPERTS)[:, None] & (each < SPANS)[None, :],
        other=0,
    )  # fmt: skip
    needed = (tl.sum(all_counts, axis=1) + ROWS - 1) // ROWS
    before = tl.sum(tl.where(expert < me, needed, 0), axis=0)
    mine = tl.sum(tl.where(expert == me, needed, 0), axis=0)
    own = tl.where((expert == me)[:, None], all_counts, 0)
    at = before * ROWS + tl.sum(tl.sum(tl.where((each < span)[None, :], own, 0), axis=1), axis=0)
    for start in range(span * SPAN, tl.minimum((span + 1) * SPAN, pairs), AT_ONCE):
        pair = start + tl.arange(0, AT_ONCE)
        hit = tl.load(chosen + pair, mask=pair < pairs, other=-1) == me
        tl.store(placed + at + tl.cumsum(hit.to(tl.int32), axis=0) - 1, pair, mask=hit)
        at += tl.sum(hit.to(tl.int32), axis=0)
    if span == 0:
        full = before * ROWS + tl.sum(tl.sum(own, axis=1), axis=0)
        row = tl.arange(0, ROWS)
        tl.store(placed + full + row, tl.zeros_like(row) - 1, mask=full + row < (before + mine) * ROWS)
        for start in range(0, mine, 64):
            index = start + tl.arange(0, 64)
            tl.store(block_expert + before + index, tl.zeros_like(index) + me, mask=index < mine)
        if me == 0:
            for start in range(tl.sum(needed, axis=0), blocks, 256):
                index = start + tl.arange(0, 256)
                tl.store(block_expert + index, tl.zeros_like(index) - 1, mask=index < blocks)


def block_experts(chosen: Tensor, num_experts: int, rows: int) -> ExpertBlocks:
    """The pairs of int32 `chosen` [T, top_k], by expert and within one by token."""
    pairs, device = chosen.numel(), chosen.device
    blocks = most_blocks(pairs, num_experts, rows)
    span, spans = span_of(pairs)
    found = ExpertBlocks(
        torch.empty(blocks * rows, dtype=torch.int32, device=device),
        torch.empty(blocks, dtype=torch.int32, device=device),
        torch.empty(num_experts, spans, dtype=torch.int32, device=device),
        rows,
    )
    _count_kernel[(num_experts, spans)](chosen, found.counts, pairs, span, spans, _AT_ONCE, num_warps=4)
    _place_kernel[(num_experts, spans)](
        chosen, found.counts, found.pairs, found.expert, pairs, blocks, num_experts,
        triton.next_power_of_2(num_experts), rows, span, spans, _AT_ONCE, num_warps=4,
    )  # fmt: skip
    return found


def block_experts_reference(chosen: Tensor, num_experts: int, rows: int) -> ExpertBlocks:
    flat = chosen.reshape(-1).tolist()
    span, spans = span_of(len(flat))
    blocks = most_blocks(len(flat), num_experts, rows)
    pairs, owners = [], []
    for expert in range(num_experts):
        own = [pair for pair, whose in enumerate(flat) if whose == expert]
        needed = -(-len(own) // rows)
        pairs += own + [-1] * (needed * rows - len(own))
        owners += [expert] * needed
    pieces = [flat[start * span : (start + 1) * span] for start in range(spans)]
    counts = [[piece.count(expert) for piece in pieces] for expert in range(num_experts)]
    pairs += [-1] * (blocks * rows - len(pairs))
    owners += [-1] * (blocks - len(owners))
    made = [torch.tensor(part, dtype=torch.int32, device=chosen.device) for part in (pairs, owners, counts)]
    return ExpertBlocks(made[0], made[1], made[2], rows)
