"""`itl_slo_ms` on a real engine: prompts are cut so that a stream goes on, and every token stays the same."""

from __future__ import annotations

import pytest

from quire import LLM, SamplingParams
from quire.bench.scheduling.arrivals import Arrival, Story, play
from quire.config import EngineConfig
from quire.errors import ConfigError

STREAM = Arrival(0.0, list(range(1, 33)), 600)
LONG = Arrival(0.01, [i % 500 + 1 for i in range(6000)], 8)
"""Comes while the stream goes on, also where a token of the stream takes a tenth of a millisecond."""



def played(model: str, slo_ms: float | None) -> tuple[list[Story], int]:
    with LLM(model, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=4, max_model_len=8000,
             max_num_batched_tokens=8192, enable_prefix_caching=False, itl_slo_ms=slo_ms, num_threads=1) as llm:
        play(llm, [Arrival(0.0, [1] * 64, 8)])
        before = llm.metrics()["steps"]
        stories = play(llm, [STREAM, LONG])
        return stories, int(llm.metrics()["steps"] - before)


def meanwhile(stories: list[Story]) -> int:
    """Tokens of the stream that came while the long prompt was computed."""
    stream, long = stories
    return sum(long.scheduled < moment <= long.tokens[0] for moment in stream.tokens)


def test_a_long_prompt_no_longer_stops_a_stream(dummy_model: str) -> None:
    """Tokens are counted: how long they took says more of what else runs on this machine. That gaps stay within the
    bound is tested on machines that are simulated (tests/scheduler/test_pacing.py)."""
    found = []
    for _ in range(4):  # the bound is a measured time, which another program may have made too long
        free, _ = played(dummy_model, None)
        paced, steps = played(dummy_model, 1e3 * max(free[0].gaps) / 4)
        assert steps >= STREAM.num_output
        found.append((meanwhile(free), meanwhile(paced)))
        if found[-1][0] <= 2 and found[-1][1] >= 4:
            return
    pytest.fail(f"tokens of the stream meanwhile, without a bound and with one: {found}")


def test_the_tokens_are_those_of_an_engine_without_a_bound(dummy_model: str) -> None:
    prompts = [[(7 * i + j) % 500 + 1 for j in range(50 * i + 20)] for i in range(6)]
    params = [SamplingParams(temperature=0, max_tokens=10 + 5 * i, ignore_eos=True, detokenize=False)
              for i in range(6)]
    tokens = []
    for slo_ms in (None, 5.0):
        with LLM(dummy_model, load_format="dummy", skip_tokenizer_init=True, max_num_seqs=3, max_model_len=512,
                 itl_slo_ms=slo_ms) as llm:
            tokens.append([output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)])
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("options", [
    {"itl_slo_ms": 0}, {"itl_slo_ms": -5.0}, {"itl_slo_ms": float("nan")}, {"itl_slo_ms": "100"},
    {"itl_slo_ms": 100, "batching_policy": "prefill-first"}, {"itl_slo_ms": 100, "batching_policy": "static"},
    {"itl_slo_ms": 100, "enable_chunked_prefill": False},
])
def test_a_bound_that_nobody_could_hold_is_refused_by_name(options: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="itl_slo_ms") as caught:
        EngineConfig.create(**options)
    assert caught.value.field == "itl_slo_ms"
