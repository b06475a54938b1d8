"""Fuzz cases: the same on every machine, plain data, and servable by the engine they ask for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from quire.fuzz.case import FuzzCase, blocks_needed, random_case
from quire.fuzz.run import find_difference
from quire.fuzz.shrink import shrink, simpler_cases


def test_a_case_is_a_function_of_its_seed_and_survives_json() -> None:
    for seed in range(50):
        case = random_case(seed)
        assert case == random_case(seed) == FuzzCase.from_json(case.to_json())


def test_cases_cover_groups_beams_tiers_priorities_and_tenants() -> None:
    cases = [random_case(seed) for seed in range(80)]
    requests = [request for case in cases for request in case.requests]
    assert any(request.beam is not None for request in requests)
    assert any(request.params.get("n", 1) > 1 for request in requests)
    assert any(request.params.get("best_of") for request in requests)
    assert len({request.tenant for request in requests}) == 3 == len({r.priority for r in requests})
    modes = {case.options["preemption_mode"] for case in cases if case.options.get("swap_space")}
    assert modes == {"auto", "swap", "recompute"} and any(case.options.get("offload") for case in cases)
    assert {case.options["scheduling_policy"] for case in cases} == {"fcfs", "priority", "fair"}
    shapes = [r.params["structured_outputs"] for r in requests if "structured_outputs" in r.params]
    assert {kind for shape in shapes for kind in shape} == {"json", "json_object", "regex", "choice", "grammar"}
    assert any("structured_outputs" not in r.params and r.beam is None for r in requests)


def test_cases_cover_decoding_sequences_that_share_whole_tiles_of_keys() -> None:
    """Attention reads tiles of 64 keys that several sequences share once for all of them."""
    cases = [random_case(seed) for seed in range(80)]
    shared = [max(Counter(tuple(r.prompt[:64]) for r in case.requests if len(r.prompt) > 64).values(), default=0)
              for case in cases]
    assert sum(count >= 4 for count in shared) >= 8
    assert all(len(r.prompt) + r.max_tokens <= case.model["max_position_embeddings"]
               for case in cases for r in case.requests)


def test_every_request_of_a_case_fits_its_pool() -> None:
    for seed in range(80):
        case = random_case(seed)
        for request in case.requests:
            assert blocks_needed(request, case.options["block_size"]) <= case.options["num_kv_blocks"]
            assert request.num_sequences <= case.options["max_num_seqs"]


def test_some_cases_keep_latents() -> None:
    kinds = Counter(random_case(seed).model["architectures"][0] for seed in range(80))
    assert kinds["DeepseekV2ForCausalLM"] >= 8 and kinds["LlamaForCausalLM"] >= 30


def test_some_cases_draft_by_heads() -> None:
    drafts = [random_case(seed).options.get("speculative_config", {}) for seed in range(120)]
    assert Counter(each["model"] for each in drafts if each.get("method") == "eagle").keys() == {"eagle", "eagle3"}


@pytest.mark.parametrize("seed", [167, 192, 202, 8, 21])
def test_the_engine_gives_the_tokens_of_the_plain_path(seed: int, tmp_path: Path) -> None:
    assert find_difference(random_case(seed), tmp_path) is None


def test_a_failing_case_shrinks_to_the_request_that_fails() -> None:
    def fails(candidate: FuzzCase) -> bool:
        return any(request.beam is not None for request in candidate.requests)

    case = next(case for case in map(random_case, range(100)) if fails(case) and len(case.requests) > 3)
    small = shrink(case, fails, simpler_cases)
    assert len(small.requests) == 1 and small.requests[0].beam is not None
    assert len(small.requests[0].prompt) == 1
    assert blocks_needed(small.requests[0], small.options["block_size"]) <= small.options["num_kv_blocks"]
