"""Who gets a request, and the loads that policies go by."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.errors import ConfigError
from quire.router.load import Load, Ticket
from quire.router.policies import POLICIES, Candidate, make_policy


def candidates(*loads: tuple[int, int], held: tuple[int, ...] = ()) -> list[Candidate]:
    found = []
    for place, (waiting, tokens) in enumerate(loads):
        load = Load(waiting=waiting, waiting_tokens=tokens)
        found.append(Candidate(f"s{place}", load, held[place] if held else 0))
    return found


@pytest.mark.parametrize("name", POLICIES)
def test_equals_take_turns(name: str) -> None:
    policy, who = make_policy(name), candidates((0, 0), (0, 0), (0, 0))
    assert Counter(policy.choose(100, who).place for _ in range(30)) == {0: 10, 1: 10, 2: 10}


def test_turns_go_on_when_one_is_missing() -> None:
    policy, who = make_policy("round-robin"), candidates((0, 0), (0, 0), (0, 0))
    assert [policy.choose(1, who).place for _ in range(3)] == [0, 1, 2]
    assert [policy.choose(1, who[1:]).place for _ in range(4)] == [0, 1, 0, 1]
    assert policy.choose(1, who).place == 0


def test_the_least_loaded_is_the_one_with_the_fewest_requests() -> None:
    assert make_policy("least-loaded").choose(1, candidates((2, 10), (1, 9000), (3, 5))).place == 1
    assert make_policy("least-loaded").choose(1, candidates((1, 10), (1, 9000), (1, 5))).place == 2


def test_a_prefix_is_worth_its_tokens_against_the_queue() -> None:
    policy = make_policy("cache-aware")
    assert policy.choose(1000, candidates((1, 500), (0, 0), held=(900, 0))).place == 0
    assert policy.choose(1000, candidates((3, 5000), (0, 0), held=(900, 0))).place == 1
    assert "free sooner" in policy.choose(1000, candidates((3, 5000), (0, 0), held=(900, 0))).why
    assert "holds 900 of 1000" in policy.choose(1000, candidates((0, 0), (0, 0), held=(900, 0))).why


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="round-robin"):
        make_policy("random")


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 100)), max_size=60))
def test_a_load_is_what_its_tickets_say(moves: list[tuple[int, int]]) -> None:
    load, waiting, running = Load(), list[Ticket](), list[Ticket]()
    for move, tokens in moves:
        if move == 0:
            waiting.append(load.send(tokens))
        elif move == 1 and waiting:
            ticket = waiting.pop()
            ticket.started()
            ticket.started()
            running.append(ticket)
        elif move == 2 and running:
            ticket = running.pop()
            ticket.ended()
            ticket.ended()
        elif move == 3 and waiting:
            waiting.pop().ended()
        assert (load.waiting, load.running) == (len(waiting), len(running))
        assert load.waiting_tokens == sum(ticket.tokens for ticket in waiting)
