"""Batching policies do what they are named after."""

from __future__ import annotations

from tests.scheduler.timed import linear_cost, play, workload


def test_in_a_static_batch_nobody_joins_until_all_have_finished() -> None:
    requests = workload(1, count=20, rate=2.0, prompts=(20, 100))
    played = play(requests, linear_cost(), policy="static", max_num_seqs=4)
    assert len(played.tokens) == 20
    running: set[int] = set()
    sizes = []
    for plan in played.plans:
        running -= set(plan.freed_rows)
        if plan.starts:
            assert not running, "someone joined a batch under way"
            running = {start.row for start in plan.starts}
            sizes.append(len(running))
    assert max(sizes) == 4 and sum(sizes) == 20


def test_prefill_first_never_mixes_prompts_with_decoding_and_decode_first_never_skips_a_stream() -> None:
    requests = workload(2, count=20, rate=2.0)
    for plan in play(requests, linear_cost(), policy="prefill-first").plans:
        assert len({entry.num_tokens == 1 for entry in plan.entries}) == 1
    mixed = play(requests, linear_cost())
    assert any(len({entry.num_tokens == 1 for entry in plan.entries}) == 2 for plan in mixed.plans)


def test_continuous_batching_finishes_sooner_than_static_batches() -> None:
    requests = workload(3, count=30, rate=5.0, prompts=(20, 100))
    seconds = {policy: play(requests, linear_cost(), policy=policy, max_num_seqs=8).seconds
               for policy in ("static", "decode-first", "prefill-first")}
    assert seconds["decode-first"] < 0.9 * seconds["static"]
    assert seconds["prefill-first"] < 0.9 * seconds["static"]
