"""A prefix that several waiting requests share is computed once, by the first of them."""

from __future__ import annotations

from tests.scheduler.simulation import expected_tokens, make_request
from tests.scheduler.test_scheduler import drive, prompt


def test_followers_wait_for_the_prefix_that_the_first_computes() -> None:
    driver = drive(block_size=4, max_num_batched_tokens=200)
    shared = prompt(40)
    driver.add(*(make_request(f"r{i}", [*shared, 50 + i, 60 + i], max_tokens=2) for i in range(3)))
    assert driver.step() == {"r0": 42}
    assert driver.step() == {"r0": 1, "r1": 2, "r2": 2}


def test_a_follower_waits_through_every_chunk_of_its_leader() -> None:
    driver = drive(block_size=4, max_num_batched_tokens=16)
    shared = prompt(40)
    driver.add(*(make_request(f"r{i}", [*shared, 50 + i, 60 + i], max_tokens=8) for i in range(2)))
    assert [driver.step() for _ in range(4)] == [{"r0": 16}, {"r0": 16}, {"r0": 10}, {"r0": 1, "r1": 2}]


def test_a_small_share_is_not_worth_a_lost_step() -> None:
    driver = drive(block_size=4, max_num_batched_tokens=200)
    system = prompt(8)
    driver.add(*(make_request(f"r{i}", [*system, *prompt(20, salt=i + 1)], max_tokens=2) for i in range(2)))
    assert driver.step() == {"r0": 28, "r1": 28}


def test_when_the_leader_is_aborted_the_first_follower_leads() -> None:
    driver = drive(block_size=4, max_num_batched_tokens=16)
    requests = [make_request(f"r{i}", [*prompt(40), 50 + i, 60 + i], max_tokens=3) for i in range(3)]
    driver.add(*requests)
    driver.step()
    driver.scheduler.abort("r0")
    assert driver.step() == {"r1": 16}
    driver.drain()
    for request in requests[1:]:
        assert request.sequences[0].tokens[42:] == expected_tokens(request, max_len=256)


def test_without_a_prefix_cache_nobody_waits() -> None:
    driver = drive(block_size=4, max_num_batched_tokens=200, caching=False)
    driver.add(*(make_request(f"r{i}", prompt(40), max_tokens=2) for i in range(2)))
    assert driver.step() == {"r0": 40, "r1": 40}
