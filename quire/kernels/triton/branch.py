"""The branch of a draft tree that the target keeps: found in what it drew, and its KV moved to the slots of its
positions (torch: `step_reference`)."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from quire.kernels.types import LayerCache


@triton.jit
def _walk_kernel(
    trees,  # int32 [trees, 4]: row of the table (-1: none), position of the first draft, row of the step, drafts
    parents,
    ids,
    drawn,
    ring,
    tokens,
    path,
    num_rows,
    tokens_stride,
    path_stride,
    OK: tl.constexpr,
    DEPTH: tl.constexpr,
    NODES: tl.constexpr,
):
    tree = tl.program_id(0)
    row = tl.load(trees + tree * 4)
    place = tl.arange(0, NODES)
    if row >= 0:
        position, first = tl.load(trees + tree * 4 + 1), tl.load(trees + tree * 4 + 2)
        own = place < tl.load(trees + tree * 4 + 3)
        parent = tl.load(parents + first + 1 + place, mask=own, other=-2)
        draft = tl.load(ids + first + 1 + place, mask=own, other=-1).to(tl.int32)
        results = drawn + tl.load(ring).to(tl.int64) * num_rows * 2
        text = tokens + row.to(tl.int64) * tokens_stride
        node = first * 0 - 1
        going = row >= 0
        for depth in range(0, DEPTH + 1):
            token = tl.load(results + (first + 1 + node) * 2)
            going = going & (tl.load(results + (first + 1 + node) * 2 + 1) == OK)
            tl.store(text + position + depth, token, mask=going & (position + depth < tokens_stride))
            child = tl.min(tl.where(own & (parent == node) & (draft == token), place, NODES), axis=0)
            going = going & (child < NODES)
            node = tl.where(going, child, node)
            tl.store(path + tree * path_stride + depth, tl.where(going, child, -1), mask=depth < DEPTH)


@triton.jit
def _move_kernel(
    first, second, table, trees, path, table_stride, path_stride, HEADS: tl.constexpr, PAGE: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, DEPTH: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """A program moves its features of all nodes of a branch, one after the other: what is read later was not written
    before, since a node lies at its depth or behind."""
    tree, head = tl.program_id(0), tl.program_id(1)
    row = tl.load(trees + tree * 4)
    if row >= 0:
        position = tl.load(trees + tree * 4 + 1)
        blocks = table + row.to(tl.int64) * table_stride
        column = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
        inside = column < WIDTH
        for depth in range(0, DEPTH):
            node = tl.load(path + tree * path_stride + depth)
            if node > depth:
                source = _place(blocks, position + node, head, HEADS, PAGE) * WIDTH + column
                target = _place(blocks, position + depth, head, HEADS, PAGE) * WIDTH + column
                tl.store(first + target, tl.load(first + source, mask=inside), mask=inside)
                if TWO:
                    tl.store(second + target, tl.load(second + source, mask=inside), mask=inside)


@triton.jit
def _place(blocks, place, head, HEADS: tl.constexpr, PAGE: tl.constexpr):
    block = tl.load(blocks + place // PAGE).to(tl.int64)
    return (block * HEADS + head) * PAGE + place % PAGE


def walk_trees(trees: Tensor, parents: Tensor, ids: Tensor, drawn: Tensor, ring: Tensor, tokens: Tensor, path: Tensor,
               ok: int, nodes: int) -> None:
    """Which branch of each tree was drawn, and its tokens in the rows of the table.

    `trees` int32 [N, 4]: row of the table (-1: no tree), position of the first draft, row of the step of the token
    before the drafts (those of the drafts follow it), number of drafts. `parents` int32 and `ids` int64 are of the rows
    of the step: the number of a draft's parent (-1: the text), and its token. `drawn` int32 [slots, rows, 2]: what was
    drawn after each row, and its status. `path` int32 [N, depth] gets the numbers of the drafts kept, then -1.
    """
    _walk_kernel[(trees.shape[0],)](
        trees, parents, ids, drawn, ring, tokens, path, drawn.shape[1], tokens.stride(0), path.stride(0), ok,
        path.shape[1], triton.next_power_of_2(nodes), num_warps=1,
    )  # fmt: skip


def move_branches(cache: LayerCache, table: Tensor, trees: Tensor, path: Tensor) -> None:
    """Everything that is kept of the drafts of a branch, to the slots of their positions."""
    parts = list(cache.tensors.values())
    _, heads, page, width = parts[0].shape
    views = [part.view(torch.uint8) if part.dtype.itemsize == 1 else part for part in parts]
    block = min(1024, triton.next_power_of_2(width))
    _move_kernel[(trees.shape[0], heads, triton.cdiv(width, block))](
        views[0], views[-1], table, trees, path, table.stride(0), path.stride(0), heads, page, width, block,
        path.shape[1], len(parts) == 2, num_warps=1 if block <= 128 else 4,
    )  # fmt: skip
