"""What is learned about reuse, against processes whose truth is known."""

from __future__ import annotations

from math import exp
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.kvcache.reuse_statistics import ReuseStatistics, best_stopping_rates

rates_and_widths = st.lists(
    st.tuples(st.floats(1e-6, 1.0), st.floats(1.0, 1000.0)), min_size=1, max_size=12)


@given(rates_and_widths)
def test_the_index_is_the_best_of_all_stopping_ages(cells: list[tuple[float, float]]) -> None:
    rates, widths = [rate for rate, _ in cells], [width for _, width in cells]
    found = best_stopping_rates(rates, widths)
    for start in range(len(cells)):
        best = reuse = time = 0.0
        survive = 1.0
        for rate, width in cells[start:]:
            here = 1 - exp(-rate * width)
            reuse += survive * here
            time += survive * here / rate
            survive *= 1 - here
            best = max(best, reuse / time)
        assert found[start] == pytest.approx(best, rel=1e-6)


def test_a_pause_before_reuse_is_worth_what_comes_after_it() -> None:
    pause, busy, dead = 1e-6, 0.05, 1e-6
    before, during, after = best_stopping_rates([pause, busy, dead], [100.0, 100.0, 100.0])
    assert during == pytest.approx(busy) and after == pytest.approx(dead)
    assert during > before > 0.15 * busy > 1000 * pause


def test_rates_of_reuse_are_recovered_by_kind_whatever_was_evicted() -> None:
    # Keys of kind 0 come back 1 to 399 ticks after each use, for ever; those of kind 1 never.
    random = Random(0)
    statistics = ReuseStatistics(100, 2)
    due = {now: [b"again %d" % now] for now in range(1, 300)}
    for now in range(1, 20_001):
        for key in due.pop(now, ()):
            statistics.begin(key, 0, now)
            due.setdefault(now + random.randrange(1, 400), []).append(key)
        statistics.begin(b"once %d" % now, 1, now)
        if now % 6 == 0:
            statistics.advance(now)
    indices = statistics.indices()
    size = statistics.num_buckets
    again, once = indices[:size], indices[size:]
    true = [1 / 200, 1 / 150, 1 / 100]  # from 0, 100 and 200 on, waiting for up to 400
    found = [again[statistics.bucket(age)] for age in (0, 100, 200)]
    assert found == pytest.approx(true, rel=0.3)
    assert all(once[statistics.bucket(age)] < again[statistics.bucket(age)] / 20 for age in (0, 100, 200))


def test_an_old_regime_is_forgotten() -> None:
    statistics = ReuseStatistics(100, 1)
    now = 0

    def phase(reused: bool) -> float:
        nonlocal now
        for _ in range(10_000):
            now += 1
            key = b"%d" % (now % 50) if reused else b"%d" % now
            interval = statistics.begin(key, 0, now)
            if interval is not None and now % 16 == 0:
                statistics.advance(now)
        return statistics.indices()[statistics.bucket(50)]

    busy, idle, busy_again = phase(True), phase(False), phase(True)
    assert idle < busy / 10 and busy_again > 5 * idle


def test_only_a_sample_is_followed_and_only_for_a_while() -> None:
    statistics = ReuseStatistics(1000, 1)
    for now in range(1, 100_000):
        statistics.begin(b"%d" % now, 0, now)
        if now % 62 == 0:
            statistics.advance(now)
    assert 0 < len(statistics._by_key) <= 5 * 1000
