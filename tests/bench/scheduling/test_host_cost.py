"""What the host pays for a token: every setting is measured, and its log-probabilities are really there."""

from __future__ import annotations

from quire.bench.scheduling.host_cost import SETTINGS, front_door, lines, resting_head
from quire.sampling.params import SamplingParams


def test_there_is_a_line_for_every_setting() -> None:
    found = list(lines([3], 4))
    assert [line["setting"] for line in found] == list(SETTINGS)
    assert all(line["us_per_token"] > 0 for line in found) and found[0]["us_beyond_plain"] == 0


def test_the_ready_results_carry_what_is_asked_for() -> None:
    llm = front_door(2, 5, 5)
    try:
        outputs = llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=5, ignore_eos=True, logprobs=5),
                               use_tqdm=False)
    finally:
        llm.close()
    for row, output in enumerate(outputs):
        (one,) = output.outputs
        assert one.token_ids == [1000 + row] * 5 and one.cumulative_logprob == -1.25
        assert one.logprobs is not None and [len(position) for position in one.logprobs] == [5] * 5


def test_the_head_rests() -> None:
    speculator = resting_head()
    llm = front_door(2, 200, None, speculator)
    try:
        llm.generate([[1, 2, 3], [4, 5]], SamplingParams(max_tokens=200, ignore_eos=True, temperature=0),
                     use_tqdm=False)
    finally:
        llm.close()
    assert speculator.stats.verifications == 0 and speculator.stats.decode_tokens == 2 * 199
