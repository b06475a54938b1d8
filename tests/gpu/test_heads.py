"""Draft heads on a real GPU: tokens and log-probabilities without drafts, passes replayed from graphs, nobody waits."""

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
    from quire.worker.gpu.runner import Resting
    from tests.kernels.triton.test_chains import check_chains
    from tests.kernels.triton.test_features import check_features
    from tests.worker.gpu.drafting import accepted, looping, remembering
    from tests.worker.gpu.engines import MAX_LEN, SEQS, make_engine, run
    from tests.worker.gpu.head_cases import TARGETS, Pause, asked, faint
    from tests.worker.gpu.test_ahead import check_drafts_ahead, simple
    from tests.worker.gpu.test_grammars import speculated

KINDS = ("eagle", "eagle3", "mtp")


def engine(kind: str, *, depth: int = 2, budget: int = 120, deterministic: bool = True, dtype: str = "float32",
           **more: Any) -> Any:
    length = min(MAX_LEN, more.get("num_blocks", 60) * more.get("block_size", 8))
    options = DeviceOptions(device="cuda", dtype=dtype, max_num_seqs=SEQS, max_num_batched_tokens=budget,
                            max_model_len=length, deterministic=deterministic)
    return make_engine(TARGETS[kind], device=True, depth=depth, budget=budget, options=options, **more)


def told(core: Any, requests: list[Any]) -> dict[str, Any]:
    found = run(core, requests)
    assert [one[3] for one in found.values() if one[3]] == []
    return {name: (one[0], one[1]) for name, one in found.items()}


@functools.cache
def plain(kind: str, requests: Any, count: int) -> dict[str, Any]:
    """What the same engine says without drafts."""
    core = engine(kind, weights=faint)
    found = told(core, requests(count))
    core.close()
    return found



@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_states_are_kept_and_fetched(dtype: torch.dtype) -> None:
    check_features("cuda", dtype)


def test_chains_go_on_behind_what_was_accepted() -> None:
    check_chains("cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_made_ahead_change_no_bit(kind: str) -> None:
    """And are those that would be made when asked for, but for a near tie."""
    ahead, asked_for = check_drafts_ahead(lambda: engine(kind, **asked(kind)))
    both = [text for text in ahead if text in asked_for]
    assert len(both) > 30 and sum(ahead[text] == asked_for[text] for text in both) >= 0.95 * len(both)


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_change_no_bit_and_are_made_by_replayed_graphs(kind: str) -> None:
    core = engine(kind, **asked(kind))
    assert told(core, looping(12)) == plain(kind, looping, 12)
    kept, offered = accepted(core)
    runner = core.executor._worker._runner.drafter.runner
    assert 0 < kept < offered
    assert runner.replays > 20 and runner._wide_graphs.replays + runner._ahead_graphs.replays > 5
    core.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_rests_changes_no_bit_and_nothing_is_kept_for_it(kind: str) -> None:
    core = engine(kind, **asked(kind))
    pause, runner = Pause(core.scheduler.speculator, 4, 12, tells=True), core.executor._worker._runner
    assert told(core, looping(12)) == plain(kind, looping, 12)
    resting = runner._other_graphs[Resting.MIDDLE]
    assert resting.replays == pause.rested > 0
    assert len(resting) == len(runner.resting_rungs)
    core.close()


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_cpu_tensors(kind: str) -> None:
    """As many kept, of as many, as by plain torch on a CPU."""
    core = engine(kind, depth=1, budget=400, **asked(kind))
    host = make_engine(TARGETS[kind], device=True, budget=400, ops=TorchOps(), **asked(kind))
    found, want = told(core, looping(8)), told(host, looping(8))
    assert sum(found[name][0] == want[name][0] for name in want) >= len(want) - 1
    (kept, offered), (wanted, of) = accepted(core), accepted(host)
    assert abs(kept / offered - wanted / of) < 0.05
    core.close()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_short_memory_and_chunks_change_no_bit(kind: str) -> None:
    core = engine(kind, budget=40, num_blocks=16, **asked(kind))
    assert told(core, looping(14)) == plain(kind, looping, 14)
    assert core.scheduler.stats.preemptions > 0
    core.close()


@pytest.mark.parametrize(("kind", "verifier"), [("eagle", "coupled"), ("eagle3", "rejection"), ("mtp", "coupled")])
def test_no_step_with_drafts_makes_the_host_wait(kind: str, verifier: str) -> None:
    core = engine(kind, deterministic=False, dtype="bfloat16", **asked(kind, 3, verifier))
    runner = core.executor._worker._runner
    caught: list[str] = []

    def watched(inner: Any) -> Any:
        def launching(step: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return inner(step)
            except RuntimeError:
                caught.append(traceback.format_exc(limit=-6))
                raise
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return launching

    runner.run, runner.draft_on = watched(runner.run), watched(runner.draft_on)
    for requests in (looping(), remembering(), simple()):
        found = run(core, requests)
        assert caught == []
        assert [one[3] for one in found.values() if one[3]] == []
    assert accepted(core)[0] > 0
    core.close()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_lookups_draft_for_rows_under_a_grammar_beside_a_heads_drafts(kind: str) -> None:
    plain, _ = speculated(engine(kind, weights=faint))
    found, drafts = speculated(engine(kind, **asked(kind)))
    assert found == plain
    assert drafts["held0"][0] > 10 and sum(drafts[f"free{i}"][0] for i in (1, 3, 5, 7)) > 10
