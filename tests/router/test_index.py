"""The index of who holds what, against one that looks at every server's blocks by itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from quire.router.index import KVIndex

Moves = st.lists(st.tuples(st.sampled_from(["store", "evict", "clear"]), st.integers(0, 4), st.integers(0, 9),
                           st.integers(0, 9)), max_size=60)


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


@given(Moves)
def test_it_answers_as_a_plain_search_would(moves: list[tuple[str, int, int, int]]) -> None:
    index, plain = KVIndex(1000), {server: set[int]() for server in range(5)}
    for move, server, first, count in moves:
        numbers = list(range(first, first + count))
        if move == "store":
            index.stored(server, map(name, numbers))
            plain[server].update(numbers)
        elif move == "evict":
            index.evicted(server, map(name, numbers))
            plain[server].difference_update(numbers)
        else:
            index.cleared(server)
            plain[server].clear()
    assert index.num_blocks == sum(map(len, plain.values()))
    for start in range(4):
        prompt = list(range(start, 12))
        expected = {}
        for server, held in plain.items():
            count = next((place for place, number in enumerate(prompt) if number not in held), len(prompt))
            if count and server != 3:
                expected[server] = count
        assert index.leading(map(name, prompt), [0, 1, 2, 4]) == expected
    for server in range(5):
        assert index.held_by(server) == len(plain[server])
        index.cleared(server)
    assert index.num_blocks == 0 and not index._holders


def test_it_is_bounded_and_one_server_cannot_take_the_room_of_another() -> None:
    index = KVIndex(100)
    index.stored(0, map(name, range(10)))
    index.stored(1, map(name, range(1000)))
    assert index.held_by(1) == 50 and index.num_dropped == 950
    index.stored(0, map(name, range(500, 530)))
    assert index.held_by(0) == 40 and index.num_blocks == 90


def test_names_are_not_made_beyond_what_is_held() -> None:
    index, made = KVIndex(100), []
    index.stored(0, map(name, range(3)))

    def names() -> object:
        for number in range(1000):
            made.append(number)
            yield name(number)

    assert index.leading(names(), [0, 1]) == {0: 3}  # type: ignore[arg-type]
    assert len(made) == 4
