"""Trees of lookups: every alternative that the text offers, likeliest first, and every beginning of them a tree."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.speculation.growing import Grown, grow, in_order
from quire.speculation.ngram import NgramProposer
from quire.speculation.suffix import SuffixSource
from quire.speculation.tree import TreeShape, ancestry, depths


def proposer(text: list[int], least: int = 1) -> NgramProposer:
    found = NgramProposer(least)
    for token in text:
        found.extend([token])
    return found


def chance(evidence: int, rank: int) -> float:
    return 0.9 if rank == 0 else 0.4 / rank


def branches(grown: Grown) -> set[tuple[int, ...]]:
    return {tuple(grown.tokens[node] for node in path) for path in ancestry(grown.parents)}


def test_all_that_followed_is_offered_the_latest_first() -> None:
    text = [1, 2, 5, 1, 2, 6, 1, 2, 7, 1, 2]
    grown = grow(proposer(text), chance, TreeShape(4, 2, 12), 0.0)
    assert grown.tokens[0] == 7
    assert {(7,), (6,), (5,), (7, 1), (6, 1), (5, 1)} <= branches(grown)
    two = grow(proposer(text), chance, TreeShape(2, 1, 12), 0.0)
    assert two.tokens == (7, 6)


def test_the_first_branch_is_the_chain() -> None:
    rng = random.Random(1)
    for _ in range(50):
        text = [rng.randrange(4) for _ in range(40)]
        chain = proposer(text).propose(5)
        grown = grow(proposer(text), lambda evidence, rank: 0.99 if rank == 0 else 0.001, TreeShape(3, 5, 5), 0.0)
        assert grown.tokens[0] == chain.tokens[0]


def test_a_text_that_repeats_itself_goes_on() -> None:
    grown = grow(proposer([1, 2, 3] * 4), chance, TreeShape(2, 8, 8), 0.3)
    assert grown.tokens == (1, 2, 3, 1, 2, 3, 1, 2)
    assert in_order(grown.tokens, grown.parents) == (grown.tokens, ())


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 3), max_size=60), st.integers(1, 4), st.integers(2, 5), st.integers(1, 6),
       st.integers(1, 20), st.booleans())
def test_every_beginning_is_a_tree_of_different_siblings(text: list[int], least: int, width: int, depth: int,
                                                        nodes: int, cached: bool) -> None:
    shape = TreeShape(width, depth, max(nodes, depth))
    if cached:
        source = SuffixSource(least, 1000)
        source.open([3, *text], 1, "a").finish()
        made = source.open([1, 2], 2, "a")
        for token in text[:20]:
            made.extend([token])
    else:
        made = proposer(text, least)
    grown = grow(made, chance, shape, 0.01)
    assert len(grown.tokens) == len(grown.parents) == len(grown.chances) <= shape.nodes
    assert list(grown.chances) == sorted(grown.chances, reverse=True)
    for count in range(1, len(grown.tokens) + 1):
        tokens, parents = grown.tokens[:count], grown.parents[:count]
        assert all(-1 <= parent < node for node, parent in enumerate(parents))
        assert max(depths(parents)) <= depth
        assert len(set(zip(parents, tokens, strict=True))) == count  # no sibling twice
        ordered, moved = in_order(tokens, parents)
        whole = moved or tuple(range(-1, count - 1))
        assert all(-1 <= parent < node for node, parent in enumerate(whole))
        assert branches(Grown(ordered, whole)) == branches(Grown(tokens, parents))
        assert max(map(len, ancestry(whole))) == max(map(len, ancestry(parents)))
