"""Where a head's chains end: likely drafts alone until a text's drafts come true."""

from __future__ import annotations

from quire.worker.chain_floors import ChainFloors


def asked(floors: ChainFloors, row: int, results: list[tuple[int, int]], position: int = 10) -> int:
    """Drafts of a row, step after step: (offered, accepted); the position after them."""
    for offered, accepted in results:
        floors.offered(row, position, offered)
        position += 1 + accepted
        floors.kept(row, position)
    return position


def test_a_text_begins_with_likely_drafts_and_gets_all_once_they_come_true() -> None:
    floors = ChainFloors(0.03, 0.2)
    assert floors.of(3) == 0.2
    asked(floors, 3, [(1, 1)])
    assert floors.of(3) == 0.03
    asked(floors, 3, [(2, 0), (0, 0)])
    assert floors.of(3) == 0.2
    assert floors.of(4) == 0.2


def test_the_next_text_starts_as_those_before_it_came_out() -> None:
    floors = ChainFloors(0.03, 0.2)
    asked(floors, 0, [(4, 2)] * 6)
    assert floors.of(1) == 0.03
    asked(floors, 1, [(1, 0), (1, 0)])
    assert floors.of(1) == 0.2 and floors.of(0) == 0.03
    floors.restart(1)
    assert floors.of(1) == 0.03
    asked(floors, 1, [(0, 0)] * 60)
    floors.restart(1)
    assert floors.of(1) == 0.2


def test_steps_without_drafts_say_nothing() -> None:
    floors = ChainFloors(0.03, 0.2)
    end = asked(floors, 0, [(1, 1)])
    for position in range(end, end + 50):
        floors.kept(0, position)
    assert floors.of(0) == 0.03
    # Many accepted tokens are remembered as two, so that a change is noticed soon.
    end = asked(floors, 0, [(4, 4)] * 50, end + 50)
    asked(floors, 0, [(1, 0)] * 6, end)
    assert floors.of(0) == 0.2


def test_a_floor_that_was_asked_for_is_kept() -> None:
    for chosen in (0.0, 0.1, 0.5):
        floors = ChainFloors(chosen, chosen)
        assert floors.of(0) == chosen
        asked(floors, 0, [(1, 0)] * 5)
        assert floors.of(0) == chosen
