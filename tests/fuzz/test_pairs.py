"""Cases with several engines: right engines pass, and engines with the bugs that they were made for do not."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from quire.fuzz.pair_case import PairCase, pair_on_ranks, random_pair_case
from quire.fuzz.pair_net import NumberMover
from quire.fuzz.pair_run import PairPlay, find_pair_fault
from quire.fuzz.pair_shrink import simpler_pair_cases
from quire.kvcache.leases import Leases
from quire.kvcache.manager import KVCacheManager
from quire.peers.decode import DecodeSide
from quire.peers.memory import Landing
from quire.ranks import shared_kv
from quire.scheduler.results import Results

CASES = 150
"""Within so many cases each of the bugs below is found."""
RARE = (285, 123)
"""Seeds of cases that reach what few do: a link that breaks while a thread reads blocks, a prompt that another sequence
has computed meanwhile."""


def test_a_case_is_a_function_of_its_seed_and_survives_json() -> None:
    for seed in range(30):
        case = random_pair_case(seed)
        assert case == random_pair_case(seed) == PairCase.from_data(json.loads(case.to_json()))


@pytest.mark.parametrize("first", range(0, 60, 20))
def test_right_engines_pass(first: int) -> None:
    for seed in range(first, first + 20):
        assert find_pair_fault(random_pair_case(seed)) is None, f"case {seed}"


def test_cases_reach_what_they_are_made_for() -> None:
    """Prompts arrive, and in every way do not; a second engine goes on where the first one failed."""
    total: dict[str, float] = {}
    for seed in range(60, 90):
        play = PairPlay(random_pair_case(seed))
        play.run()
        for node in play.net.nodes:
            for name, value in node.hub.metrics().items():
                total[name] = total.get(name, 0) + value
    for name in ("prompts_arrived", "prompts_failed", "prompts_computed_here", "prefills_done", "prefills_failed",
                 "prefills_cancelled", "links_lost", "tokens_received"):
        assert total[f"kv_{name}"] > 0, name


def test_a_failing_case_can_be_made_simpler() -> None:
    case = random_pair_case(3)
    simpler = list(simpler_pair_cases(case))
    assert simpler and all(isinstance(each, PairCase) and each != case for each in simpler)


# ---- bugs


def late_writes_land(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer that was shut still takes what comes."""
    def shut(self: NumberMover, transfer: int) -> None:
        old = self.landings[transfer]
        self.landings[transfer] = Landing(old.tables, old.starts, lambda start, end: None)

    monkeypatch.setattr(NumberMover, "shut", shut)


def blocks_are_given_back_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Leases, "hold", lambda self, number: None)


def windows_are_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefill side forgets which tokens of a window the other side wants."""
    from quire.peers.prefill import PrefillSide

    make = PrefillSide._request

    def forgets(self: Any, *args: Any) -> Any:
        request = make(self, *args)
        request.windows_kept_at = None
        return request

    monkeypatch.setattr(PrefillSide, "_request", forgets)


def reserved_blocks_are_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    publish = KVCacheManager.publish
    monkeypatch.setattr(KVCacheManager, "publish",
                        lambda self, kv, tokens, confirmed, awaited=False: publish(self, kv, tokens, confirmed))


def unwritten_window_blocks_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks before the window are reserved, never written, and found by others."""
    reserve = KVCacheManager.reserve
    monkeypatch.setattr(KVCacheManager, "reserve",
                        lambda self, kv, match, tokens, deadline, position=None: reserve(self, kv, match, tokens,
                                                                                         deadline, 0))


def a_first_token_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    take = Results.take_first_token

    def twice(self: Any, seq: Any, first: Any) -> None:
        take(self, seq, first)
        if not seq.finished:
            take(self, seq, first)

    monkeypatch.setattr(Results, "take_first_token", twice)


def a_cancelled_reservation_is_never_confirmed(monkeypatch: pytest.MonkeyPatch) -> None:
    end = DecodeSide._end

    def forgets(self: Any, asking: Any, abort: bool) -> None:
        confirm, self._cache.reservations.confirm = self._cache.reservations.confirm, lambda number: True
        try:
            end(self, asking, abort)
        finally:
            self._cache.reservations.confirm = confirm

    monkeypatch.setattr(DecodeSide, "_end", forgets)


BUGS: Sequence[Callable[[pytest.MonkeyPatch], None]] = (
    late_writes_land, blocks_are_given_back_while_they_are_read, windows_are_left_behind,
    reserved_blocks_are_exchanged, unwritten_window_blocks_are_kept, a_first_token_comes_twice,
    a_cancelled_reservation_is_never_confirmed)


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_is_found(bug: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch) -> None:
    bug(monkeypatch)
    assert any(find_pair_fault(random_pair_case(seed)) is not None for seed in (*RARE, *range(CASES)))


# ---- engines of several ranks


def on_ranks(seed: int) -> PairCase:
    return pair_on_ranks(random_pair_case(seed), seed)


def test_right_engines_of_several_ranks_pass() -> None:
    """Some of either kind, and what they send one another arrives."""
    arrived, sizes = 0, set()
    for seed in range(8):
        case = on_ranks(seed)
        assert case == PairCase.from_data(json.loads(case.to_json()))
        sizes |= {bool(case.decode.options.get("ranks")), *(bool(each.get("ranks")) for each in case.prefill)}
        play = PairPlay(case)
        try:
            play.run()
        finally:
            play.close()
        assert play.difference() is None, f"case {seed}: {play.difference()}"
        arrived += play.hub.stats.prompts_arrived
    assert arrived > 5 and sizes == {False, True}


def test_a_rank_that_does_not_get_its_part_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What came is written by one rank, and another is left out."""
    dealt = shared_kv.dealt_pieces

    def left_out(layouts: Any, pieces: Any, everyone: bool) -> Any:
        found = dealt(layouts, pieces, everyone)
        return [*found[:-1], []] if everyone and len(found) > 1 else found

    monkeypatch.setattr(shared_kv, "dealt_pieces", left_out)
    assert any(find_pair_fault(on_ranks(seed)) is not None for seed in range(CASES))
