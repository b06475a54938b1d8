"""How far the odds of lookups are trusted: as far as tokens that looked likely came true, drafted or not."""

from __future__ import annotations

import random
import statistics

import pytest

from quire.speculation.acceptance import Trust
from quire.speculation.ngram import NgramSource
from quire.speculation.speculator import LookupSpeculator
from quire.speculation.tree import TreeShape
from tests.speculation.test_speculator import Stream, memory_bound, repeating


def after(trust: Trust, hits: list[bool], expected: float, copies: int = 1) -> float:
    """The share after steps with tokens of so many copies of one text."""
    for hit in hits:
        for _ in range(copies):
            trust.add([(expected, hit)])
        trust.next_step()
    return trust.share


def test_a_new_one_believes_everything_and_none_is_above_what_was_expected() -> None:
    assert Trust().share == 1.0
    assert after(Trust(), [True] * 100, 0.7) == 1.0


def test_tokens_that_came_true_half_as_often_as_expected_halve_it() -> None:
    assert after(Trust(), [True, False] * 100, 1.0) == pytest.approx(0.53, abs=0.03)
    assert after(Trust(), [True, False, True, True] * 100, 0.75) > 0.95


def test_copies_of_one_text_count_as_one() -> None:
    hits = [False, True, False]
    assert after(Trust(), hits, 0.8, copies=16) == pytest.approx(after(Trust(), hits, 0.8))


@pytest.mark.parametrize(("chance", "drafts"), [(0.9, 8), (0.6, 4)])
def test_steps_that_end_with_the_first_miss_say_what_was_expected(chance: float, drafts: int) -> None:
    """A step of eight hits is one step, and so is one miss: the mean over a step's tokens would be lower."""
    rng, trust, shares = random.Random(1), Trust(), []
    for _ in range(2000):
        judged: list[tuple[float, bool]] = []
        while len(judged) < drafts and (not judged or judged[-1][1]):
            judged.append((chance, rng.random() < chance))
        trust.add(judged)
        trust.next_step()
        shares.append(trust._hits / trust._expected)
    assert statistics.mean(shares) == pytest.approx(1.0, abs=0.03)


def test_it_comes_back_and_steps_that_say_nothing_change_nothing() -> None:
    trust = Trust()
    low = after(trust, [False] * 40, 0.8)
    assert low < 0.2
    for _ in range(100):
        trust.next_step()
    assert trust.share == low
    assert after(trust, [True] * 60, 0.8) > 0.9


def test_reading_begins_a_step() -> None:
    """A head's speculator has lookups for rows under a grammar: it only reads and learns."""
    lookups = LookupSpeculator(NgramSource(1), 4)
    for _ in range(60):
        lookups._trust.add([(0.9, False)])
        lookups.read([])
    assert lookups._trust.share < 0.2


@pytest.mark.parametrize("tree", [None, TreeShape(2, 4, 6)])
def test_nobody_drafts_what_is_not_trusted_until_it_comes_true(tree: TreeShape | None) -> None:
    def drafted(trusted: bool, length: int) -> int:
        speculator = LookupSpeculator(NgramSource(1), 4, tree=tree)
        if not trusted:
            after(speculator._trust, [False] * 60, 0.9)
        Stream([repeating(length)], memory_bound, speculator).run()
        return int(speculator.stats.flat()["spec_draft_tokens"])

    assert drafted(True, 70) > 2 * drafted(False, 70)  # the paragraph has begun again
    assert drafted(False, 400) > 100
