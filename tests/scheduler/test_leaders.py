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


def test_who_waits_for_a_leader_holds_nobody_back() -> None:
    driver = drive(block_size=4, max_num_batched_tokens=200)
    shared = prompt(40)
    driver.add(*(make_request(f"r{i}", [*shared, 50 + i, 60 + i], max_tokens=8) for i in range(3)),
               make_request("other", prompt(12, salt=9), max_tokens=2))
    assert driver.step() == {"r0": 42, "other": 12}
    assert driver.step() == {"r0": 1, "other": 1, "r1": 2, "r2": 2}


def test_who_was_set_aside_keeps_its_place_in_every_queue() -> None:
    for queue in ("fcfs", "priority", "fair"):
        driver = drive(block_size=4, max_num_batched_tokens=200, max_num_seqs=2, queue=queue)
        shared = prompt(40)
        driver.add(*(make_request(f"r{i}", [*shared, 50 + i, 60 + i], max_tokens=1) for i in range(3)))
        assert driver.step() == {"r0": 42}
        assert [request.request_id for request in driver.scheduler.waiting] == ["r1", "r2"]
        assert driver.step() == {"r1": 2, "r2": 2}


def test_only_so_many_may_pass_one_that_waits() -> None:
    """A leader with a long prompt in small chunks: short prompts pass its follower until their number is used up."""
    driver = drive(num_blocks=400, block_size=4, max_num_batched_tokens=12, max_num_seqs=8, max_model_len=1000,
                   long_prefill_token_threshold=4)
    shared = prompt(600)
    driver.add(make_request("leader", [*shared, 1], max_tokens=1), make_request("follower", [*shared, 2], max_tokens=1),
               *(make_request(f"short{i}", [3 + i % 7, 5], max_tokens=1) for i in range(100)))
    follower = driver.scheduler._roster.requests["follower"]
    most = 0
    while follower.first_scheduled_time is None:
        driver.step()
        most = max(most, follower.num_overtaken)
    assert most == 64
    assert len(driver.scheduler.waiting) >= 100 - 64 - 8
