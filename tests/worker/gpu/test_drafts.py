"""On the device a draft is a row of the decode step: its tokens are those of the plain worker without drafts."""

from __future__ import annotations

import functools
from typing import Any

import pytest

from quire.scheduler.request import FinishReason
from tests.worker.gpu import test_grammars, test_groups
from tests.worker.gpu.drafting import (
    METHODS,
    WINDOWS_ONLY,
    Case,
    accepted,
    looping,
    remembering,
    speculation,
    texts_with_an_abort,
)
from tests.worker.gpu.engines import GEMMA3, QWEN3, make_engine, run

CONFIGS = {"full": QWEN3, "windows": GEMMA3, "windows only": WINDOWS_ONLY}


@functools.cache
def without(config: str, requests: Any, *more: int) -> dict[str, Any]:
    """What the plain worker says without drafts."""
    return run(make_engine(CONFIGS[config], device=False), requests(*more))


def same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """The same tokens, log-probabilities of the same, and no errors."""
    assert {name: one[0] for name, one in found.items()} == {name: one[0] for name, one in plain.items()}
    assert {name: one[3] for name, one in found.items()} == dict.fromkeys(plain)
    for name, one in found.items():
        want = plain[name][1]
        assert [entry.token_id for entry in one[1]] == [entry.token_id for entry in want]
        assert [entry.logprob for entry in one[1]] == pytest.approx([entry.logprob for entry in want], abs=1e-4)


@pytest.mark.parametrize("config", ["full", "windows"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_logprobs_with_drafts_are_those_without(config: str, depth: int, method: str) -> None:
    core = make_engine(CONFIGS[config], device=True, depth=depth, **speculation(method))
    same(run(core, looping()), without(config, looping))
    kept, offered = accepted(core)
    assert offered > 0
    if method == "itself" and config == "full":
        assert kept > 0.9 * offered
    elif method != "draft_model":
        assert 0 < kept < offered
    core.scheduler.check()
    core.close()


@pytest.mark.parametrize("method", METHODS)
def test_penalties_and_bad_words_see_the_drafts_before_their_place(method: str) -> None:
    core = make_engine(QWEN3, device=True, depth=2, **speculation(method, 4))
    same(run(core, remembering()), without("full", remembering))
    kept, offered = accepted(core)
    assert offered > 0
    assert kept > 0 or method == "draft_model"


@pytest.mark.parametrize("method", ["ngram", "skip_layers", "draft_model", "itself"])
@pytest.mark.parametrize("requests", [looping, remembering])
def test_rejection_draws_what_it_draws_on_a_cpu(method: str, requests: Any) -> None:
    # With room for everybody to catch up at once, both give the same number of drafts to the same places.
    want = make_engine(QWEN3, device=False, budget=400, **speculation(method, 3, "rejection"))
    got = make_engine(QWEN3, device=True, budget=400, **speculation(method, 3, "rejection"))
    same(run(got, requests()), run(want, requests()))
    assert accepted(got) == accepted(want)
    assert accepted(got)[0] > 0
    drafter = got.executor._worker._runner.drafter  # type: ignore[attr-defined]
    assert drafter is None or drafter.runner.passes == []  # what was judged is let go of


@pytest.mark.parametrize("method", ["skip_layers", "draft_model"])
def test_a_model_whose_every_layer_has_a_window_has_drafts_too(method: str) -> None:
    core = make_engine(WINDOWS_ONLY, device=True, depth=2, **speculation(method))
    same(run(core, looping()), without("windows only", looping))
    assert accepted(core)[1] > 0


@pytest.mark.parametrize("method", ["ngram", "itself"])
def test_tight_memory_and_prefixes_change_no_token(method: str) -> None:
    core = make_engine(QWEN3, device=True, depth=2, num_blocks=16, **speculation(method))
    same(run(core, looping(14)), without("full", looping, 14))
    assert core.scheduler.stats.preemptions > 0
    core.scheduler.check()


@pytest.mark.parametrize("method", METHODS)
def test_the_end_of_a_request_may_fall_inside_a_draft(method: str) -> None:
    for length in (1, 2, 3, 5, 8):
        core = make_engine(QWEN3, device=True, depth=2, **speculation(method, 4))
        found = run(core, looping(5, length))
        same(found, without("full", looping, 5, length))
        assert all(len(one[0]) <= length for one in found.values())


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_inside_a_draft_leaves_the_others_their_tokens(method: str) -> None:
    plain = without("full", looping, 6)
    core = make_engine(QWEN3, device=True, depth=2, **speculation(method, 4))
    requests = looping(6)
    for name, tokens in texts_with_an_abort(core, requests, "r1").items():
        want = plain[name][0]
        assert tokens == (want[: len(tokens)] if name == "r1" else want)
    assert requests[1].sequences[0].finish_reason is FinishReason.ABORT


@functools.cache
def groups_without() -> dict[str, Any]:
    return test_groups.outcome(QWEN3, device=False)


@pytest.mark.parametrize("method", METHODS)
def test_several_sequences_of_a_prompt_have_drafts_and_beams_run_beside_them(method: str) -> None:
    assert test_groups.outcome(QWEN3, device=True, depth=2, **speculation(method)) == groups_without()


@pytest.mark.parametrize("method", ["ngram", "itself"])
@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_a_grammar_holds_at_every_place_of_a_draft(method: str, verifier: str) -> None:
    vocab, asked = QWEN3["vocab_size"], {"budget": 400, **speculation(method, 3, verifier)}
    want = test_grammars.constrained(make_engine(QWEN3, device=False), vocab)
    if verifier == "rejection":
        want = test_grammars.constrained(make_engine(QWEN3, device=False, **asked), vocab)  # depends on the drafts
    core = make_engine(QWEN3, device=True, **asked)
    found = test_grammars.constrained(core, vocab)
    test_grammars.assert_kept(found)
    same(found, want)
    assert accepted(core)[1] > 0


def test_long_prompts_are_caught_up_with_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.worker.gpu import drafter

    monkeypatch.setattr(drafter, "MOST_AT_ONCE", 9)
    core = make_engine(QWEN3, device=True, **speculation("itself"))
    same(run(core, looping()), without("full", looping))
    kept, offered = accepted(core)
    assert kept > 0.9 * offered > 0


@pytest.mark.parametrize("seed", [1, 2, 3, 5, 8, 13, 21, 34])
def test_whatever_runs_with_drafts_gives_the_tokens_without(seed: int) -> None:
    """Chunks, prefixes, preemption, aborts, steps in flight and drafts in any mixture."""
    case = Case(seed)
    plain = case.outcome(make_engine(case.config, device=False, block_size=8, num_blocks=200, budget=case.budget))
    core = make_engine(case.config, device=True, depth=case.depth, block_size=case.block_size,
                       num_blocks=case.num_blocks, budget=case.budget, **speculation(case.method, case.drafts))
    case.assert_same(case.outcome(core), plain)
    core.close()
