"""On the device a draft is a row of the decode step: its tokens are those of the plain worker without drafts."""

from __future__ import annotations

from typing import Any

import pytest

from quire.scheduler.request import FinishReason
from tests.worker.gpu.drafting import METHODS, WINDOWS_ONLY, accepted, looping, remembering, speculation
from tests.worker.gpu.engines import GEMMA3, QWEN3, make_engine, run


def same(found: dict[str, Any], plain: dict[str, Any]) -> None:
    """The same tokens, log-probabilities of the same, and no errors."""
    assert {name: one[0] for name, one in found.items()} == {name: one[0] for name, one in plain.items()}
    assert {name: one[3] for name, one in found.items()} == dict.fromkeys(plain)
    for name, one in found.items():
        want = plain[name][1]
        assert [entry.token_id for entry in one[1]] == [entry.token_id for entry in want]
        assert [entry.logprob for entry in one[1]] == pytest.approx([entry.logprob for entry in want], abs=1e-4)


@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=["full", "windows"])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_tokens_and_logprobs_with_drafts_are_those_without(config: dict[str, Any], depth: int, method: str) -> None:
    plain = run(make_engine(config, device=False), looping())
    core = make_engine(config, device=True, depth=depth, **speculation(method))
    same(run(core, looping()), plain)
    kept, offered = accepted(core)
    assert offered > 0
    if method == "itself" and config is QWEN3:
        assert kept > 0.9 * offered
    elif method != "draft_model":
        assert 0 < kept < offered
    core.scheduler.check()
    core.close()


@pytest.mark.parametrize("method", METHODS)
def test_penalties_and_bad_words_see_the_drafts_before_their_place(method: str) -> None:
    plain = run(make_engine(QWEN3, device=False), remembering())
    core = make_engine(QWEN3, device=True, depth=2, **speculation(method, 4))
    same(run(core, remembering()), plain)
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


@pytest.mark.parametrize("method", ["skip_layers", "draft_model"])
def test_a_model_whose_every_layer_has_a_window_has_drafts_too(method: str) -> None:
    plain = run(make_engine(WINDOWS_ONLY, device=False), looping())
    core = make_engine(WINDOWS_ONLY, device=True, depth=2, **speculation(method))
    same(run(core, looping()), plain)
    assert accepted(core)[1] > 0


@pytest.mark.parametrize("method", ["ngram", "itself"])
def test_tight_memory_and_prefixes_change_no_token(method: str) -> None:
    plain = run(make_engine(QWEN3, device=False), looping(14))
    core = make_engine(QWEN3, device=True, depth=2, num_blocks=16, **speculation(method))
    same(run(core, looping(14)), plain)
    assert core.scheduler.stats.preemptions > 0
    core.scheduler.check()


@pytest.mark.parametrize("method", METHODS)
def test_the_end_of_a_request_may_fall_inside_a_draft(method: str) -> None:
    for length in (1, 2, 3, 5, 8):
        plain = run(make_engine(QWEN3, device=False), looping(5, length))
        core = make_engine(QWEN3, device=True, depth=2, **speculation(method, 4))
        found = run(core, looping(5, length))
        same(found, plain)
        assert all(len(one[0]) <= length for one in found.values())


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_inside_a_draft_leaves_the_others_their_tokens(method: str) -> None:
    plain = run(make_engine(QWEN3, device=False), looping(6))
    core = make_engine(QWEN3, device=True, depth=2, **speculation(method, 4))
    requests = looping(6)
    for request in requests:
        core.add(request)
    for _ in range(5):
        core.step()
    assert core.abort("r1")
    while core.has_work:
        core.step()
    for request in requests:
        tokens = request.sequences[0].tokens[24:]
        if request.request_id == "r1":
            assert request.sequences[0].finish_reason is FinishReason.ABORT
            assert tokens == plain["r1"][0][: len(tokens)]
        else:
            assert tokens == plain[request.request_id][0]
    core.scheduler.check()


def test_long_prompts_are_caught_up_with_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.worker.gpu import drafter

    monkeypatch.setattr(drafter, "MOST_AT_ONCE", 9)
    plain = run(make_engine(QWEN3, device=False), looping())
    core = make_engine(QWEN3, device=True, **speculation("itself"))
    same(run(core, looping()), plain)
    kept, offered = accepted(core)
    assert kept > 0.9 * offered > 0
