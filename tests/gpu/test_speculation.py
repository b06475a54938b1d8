"""Speculation on a real GPU, with captured graphs: the tokens are those without drafts, whoever proposes them."""

from __future__ import annotations

import functools
import traceback
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.ops.reference import TorchOps
    from quire.worker.gpu.options import DeviceOptions
    from tests.worker.gpu.drafting import Case, accepted, looping, remembering, speculation, texts_with_an_abort
    from tests.worker.gpu.engines import GEMMA3, MAX_LEN, QWEN3, SEQS, make_engine, run

    CONFIGS = {"full": QWEN3, "windows": GEMMA3, "heads of 128": {**QWEN3, "head_dim": 128, "num_attention_heads": 8}}

METHODS = ("ngram", "suffix", "skip_layers", "draft_model", "itself")


def engine(
    config: dict[str, Any], *, depth: int = 2, budget: int = 40, deterministic: bool = True, **asked: Any
) -> Any:
    length = min(MAX_LEN, asked.get("num_blocks", 60) * asked.get("block_size", 8))
    kind = "bfloat16" if config["head_dim"] == 128 else "float32"
    options = DeviceOptions(device="cuda", dtype=kind, max_num_seqs=SEQS, max_num_batched_tokens=budget,
                            max_model_len=length, deterministic=deterministic)
    return make_engine(config, device=True, depth=depth, budget=budget, options=options, **asked)


def host_engine(config: dict[str, Any], budget: int = 40, **asked: Any) -> Any:
    """The same worker on CPU tensors."""
    return make_engine(config, device=True, budget=budget, ops=TorchOps(), **asked)


def told(core: Any, requests: list[Any]) -> dict[str, Any]:
    """Tokens and log-probabilities of every request; none may fail."""
    found = run(core, requests)
    assert [one[3] for one in found.values() if one[3]] == []
    return {name: (one[0], one[1]) for name, one in found.items()}


@functools.cache
def plain(family: str, requests: Any, *more: int, deterministic: bool = True) -> dict[str, Any]:
    """What the same engine says without drafts."""
    core = engine(CONFIGS[family], deterministic=deterministic)
    found = told(core, requests(*more))
    core.close()
    return found


def replays(core: Any) -> tuple[int, int]:
    """Steps replayed from graphs: of the target, of the draft model."""
    runner = core.executor._worker._runner
    drafter = runner.drafter
    return runner.graphs.replays, 0 if drafter is None else drafter.runner.graphs.replays


@pytest.mark.parametrize(("method", "family"), [
    *((method, "full") for method in METHODS), ("ngram", "windows"), ("draft_model", "windows"),
    ("ngram", "heads of 128"), ("suffix", "heads of 128"),
])
def test_drafts_change_no_bit_where_kernels_do_not_depend_on_the_batch(method: str, family: str) -> None:
    core = engine(CONFIGS[family], **speculation(method))
    assert told(core, looping()) == plain(family, looping)
    kept, offered = accepted(core)
    steps, drafting = replays(core)
    assert offered > 0
    assert kept > 0 or method == "draft_model"
    assert steps > 0
    assert drafting > 0 or method in ("ngram", "suffix")
    core.close()


@pytest.mark.parametrize("method", METHODS)
def test_drafts_change_no_token_but_where_two_were_as_likely(method: str) -> None:
    core = engine(QWEN3, deterministic=False, **speculation(method))
    found, want = told(core, looping()), plain("full", looping, deterministic=False)
    core.close()
    # Other kernels for another number of rows: a draw lands between two tokens where the last bits decide.
    assert sum(found[name][0] == want[name][0] for name in want) >= len(want) - 2


@pytest.mark.parametrize("method", METHODS)
def test_penalties_and_bad_words_see_the_drafts_before_their_place(method: str) -> None:
    core = engine(QWEN3, **speculation(method, 4))
    assert told(core, remembering()) == plain("full", remembering)
    assert accepted(core)[1] > 0
    core.close()


@pytest.mark.parametrize("method", ["ngram", "skip_layers", "draft_model", "itself"])
def test_rejection_draws_what_it_draws_on_cpu_tensors(method: str) -> None:
    asked = speculation(method, 3, "rejection")
    for requests in (looping, remembering):
        core = engine(QWEN3, depth=1, budget=400, **asked)
        found, want = told(core, requests()), told(host_engine(QWEN3, budget=400, **asked), requests())
        assert sum(found[name][0] == want[name][0] for name in want) >= len(want) - 2
        assert accepted(core)[0] > 0
        core.close()


@pytest.mark.parametrize("method", METHODS)
def test_the_end_of_a_request_may_fall_inside_a_draft(method: str) -> None:
    for length in (1, 2, 5):
        core = engine(QWEN3, **speculation(method, 4))
        assert told(core, looping(5, length)) == plain("full", looping, 5, length)
        core.close()


@pytest.mark.parametrize("method", METHODS)
def test_an_abort_inside_a_draft_leaves_the_others_their_tokens(method: str) -> None:
    want = plain("full", looping, 6)
    core = engine(QWEN3, **speculation(method, 4))
    for name, tokens in texts_with_an_abort(core, looping(6), "r1").items():
        assert tokens == (want[name][0][: len(tokens)] if name == "r1" else want[name][0])
    core.close()


@pytest.mark.parametrize("method", ["ngram", "itself"])
def test_tight_memory_changes_no_token(method: str) -> None:
    core = engine(QWEN3, num_blocks=16, **speculation(method))
    assert told(core, looping(14)) == plain("full", looping, 14)
    assert core.scheduler.stats.preemptions > 0
    core.close()


@pytest.mark.parametrize("seed", range(1, 5))
def test_whatever_runs_with_drafts_gives_the_tokens_without(seed: int) -> None:
    """Chunks, prefixes, preemption, aborts, steps in flight and drafts in any mixture."""
    case = Case(seed)
    core = engine(case.config, budget=case.budget, block_size=8, num_blocks=200)
    want = case.outcome(core)
    core.close()
    core = engine(case.config, depth=case.depth, budget=case.budget, block_size=case.block_size,
                  num_blocks=case.num_blocks, **speculation(case.method, case.drafts))
    case.assert_same(case.outcome(core), want)
    core.close()


@pytest.mark.parametrize(("method", "verifier"), [
    *((method, "coupled") for method in METHODS), ("ngram", "rejection"), ("draft_model", "rejection"),
])
def test_no_step_with_drafts_makes_the_host_wait(method: str, verifier: str) -> None:
    core = engine(QWEN3, deterministic=False, **speculation(method, 3, verifier))
    runner = core.executor._worker._runner
    inner, caught = runner.run, []

    def watched(plan: Any) -> Any:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return inner(plan)
        except RuntimeError:
            caught.append(traceback.format_exc(limit=-6))
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    runner.run = watched
    for requests in (looping(), remembering()):
        found = run(core, requests)
        assert caught == []
        assert [one[3] for one in found.values() if one[3]] == []
    core.close()
