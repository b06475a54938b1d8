"""The device worker's small kernels in plain torch: what the Triton ones are checked against, and run on a
CPU."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from quire.sampling.philox import Purpose, uniforms
from quire.sampling.sampler import NOT_FINITE, OK, argmax_rows

FIELDS: Final = 8
"""int32 words of a row's sampling state: temperature, log(min_p), seed (two), sequence index, elsewhere; two spare."""
TEMPERATURE: Final = 0
LOG_MIN_P: Final = 1
SEED_LOW: Final = 2
SEED_HIGH: Final = 3
SEQ_INDEX: Final = 4
ELSEWHERE: Final = 5
"""Not 0: the row asks for more than `draw` knows, and is left to others."""


def scatter(arena: Tensor, places: Tensor, values: Tensor) -> None:
    """arena[places[i]] = values[i], all int32; no place twice."""
    arena[places.long()] = values


def gather_inputs(
    tokens: Tensor,
    tables: tuple[Tensor, ...],
    block_size: int,
    rows: Tensor,
    positions: Tensor,
    ids: Tensor,
    wide_positions: Tensor,
    slots: tuple[Tensor, ...],
    lengths: Tensor | None,
) -> None:
    """Token ids, positions and cache slots of tokens given by table row and position.

    A negative row is padding: id 0, slot -1. `lengths`, if asked for, gets position + 1 (0 for padding).
    """
    real = rows >= 0
    row, position = rows.clamp(min=0).long(), positions.long()
    ids.copy_(torch.where(real, tokens[row, position].long(), 0))
    wide_positions.copy_(position)
    for table, slot in zip(tables, slots, strict=True):
        block = table[row, position // block_size].long()
        slot.copy_(torch.where(real, block * block_size + position % block_size, -1))
    if lengths is not None:
        lengths.copy_(torch.where(real, positions + 1, 0))


def keep_features(features: Tensor, kept: Tensor, table: Tensor, block_size: int, rows: Tensor, positions: Tensor
                  ) -> None:
    """Hidden states [T, width] of tokens given by table row (negative: padding) and position, to their slots of `kept`
    [slots, width]."""
    real = rows >= 0
    row, position = rows[real].long(), positions[real].long()
    kept[table[row, position // block_size].long() * block_size + position % block_size] = features[real]


def fetch_features(kept: Tensor, table: Tensor, block_size: int, rows: Tensor, positions: Tensor, out: Tensor) -> None:
    """Into `out` [T, width]: what is kept of the token before each. Zeros for padding and before the first token."""
    known = (rows >= 0) & (positions > 0)
    row, before = torch.where(known, rows, 0).long(), torch.where(known, positions - 1, 0).long()
    slots = table[row, before // block_size].long() * block_size + before % block_size
    out.copy_(torch.where(known[:, None], kept[slots], 0))


def walk_trees(trees: Tensor, parents: Tensor, ids: Tensor, drawn: Tensor, ring: Tensor, tokens: Tensor, path: Tensor,
               ok: int, nodes: int) -> None:
    """Which branch of each tree was drawn, and its tokens in the rows of the table: as `kernels.triton.branch`."""
    results = drawn[int(ring[0])].tolist()
    for tree, (row, position, first, count) in enumerate(trees.tolist()):
        if row < 0:
            continue
        path[tree] = -1
        node = -1
        for depth in range(path.shape[1] + 1):
            token, status = results[first + 1 + node]
            if status != ok:
                break
            if position + depth < tokens.shape[1]:
                tokens[row, position + depth] = token
            children = [i for i in range(count)
                        if int(parents[first + 1 + i]) == node and int(ids[first + 1 + i]) == token]
            if not children or depth == path.shape[1]:
                break
            node = path[tree, depth] = children[0]


def follow_chains(chains: Tensor, ids: Tensor, drawn: Tensor, ring: Tensor, rows: Tensor, positions: Tensor, ok: int,
                  span: int) -> None:
    """The tokens that each chain of drafts has become, as rows of a step: as `kernels.triton.chains`."""
    results = drawn[int(ring[0])].tolist()
    for chain, (row, position, first, count) in enumerate(chains.tolist()):
        accepted = 0
        while accepted < count and results[first + accepted] == [int(ids[first + 1 + accepted]), ok]:
            accepted += 1
        for place in range(span):
            at = position + accepted - (span - 1) + place
            real = row >= 0 and at >= position
            rows[chain * span + place] = row if real else -1
            positions[chain * span + place] = at if real else 0


def draw(
    logits: Tensor,
    state: Tensor,
    rows: Tensor,
    positions: Tensor,
    tokens: Tensor,
    out: Tensor,
    ring: Tensor,
    scratch: Any = None,
) -> None:
    """Draw a token for each row of logits [R, V] whose table row `rows[i]` is not negative, nor drawn elsewhere.

    `state` int32 [table rows, FIELDS] holds how each row draws (temperature 0: argmax). The token of position
    `positions[i]` goes to `tokens[rows[i], positions[i]]` (if it has room) and, with its status, to
    `out[ring[0], i]`, int32 [slots, >= R, 2]. The operations are those of `quire.sampling.sampler`, bit for
    bit.
    """
    owner = rows.clamp(min=0).long()
    mine = state[owner]
    real = (rows >= 0) & (mine[:, ELSEWHERE] == 0)
    floats = mine.view(torch.float32)
    values = logits.float()
    chosen = argmax_rows(values)
    peak = values.amax(-1)
    temperature = floats[:, TEMPERATURE]
    warm = torch.where(temperature > 0, temperature, 1.0)
    weights = ((values - peak[:, None]) / warm[:, None]).exp_().mul_(2.0**40).to(torch.int64)
    weights *= values >= (peak + warm * floats[:, LOG_MIN_P])[:, None]
    seed = (mine[:, SEED_HIGH].long() << 32) | (mine[:, SEED_LOW].long() & 0xFFFFFFFF)
    noise = uniforms(seed, mine[:, SEQ_INDEX].long(), positions.long(), Purpose.SAMPLE)
    running = weights.cumsum(-1)
    total = running[:, -1]
    target = (noise * total.double()).to(torch.int64).minimum(total - 1)
    drawn = torch.searchsorted(running, target[:, None], right=True).squeeze(1).clamp_(max=values.shape[1] - 1)
    finite = torch.isfinite(peak)
    chosen = torch.where(finite, torch.where(temperature > 0, drawn, chosen), 0).to(torch.int32)
    status = torch.where(finite, OK, NOT_FINITE).to(torch.int32)
    slot = out[int(ring[0])]
    slot[: len(rows)][real] = torch.stack((chosen, status), 1)[real]
    fits = real & (positions < tokens.shape[1])
    tokens[owner[fits], positions[fits].long()] = chosen[fits]
