"""Draft trees of lookups over the device worker on CPU tensors: the tokens of the plain worker without drafts."""

from __future__ import annotations

from typing import Any

import pytest

from quire.worker.gpu.trees import TreeSteps, first_branch
from tests.worker.gpu.drafting import WINDOWS_ONLY, accepted, forking, guessed_at_random, remembering, trees
from tests.worker.gpu.engines import GEMMA3, QWEN3, make_engine, run
from tests.worker.gpu.head_cases import faint
from tests.worker.gpu.test_drafts import same

CONFIGS = {"full": QWEN3, "windows": GEMMA3, "windows only": WINDOWS_ONLY}


@pytest.mark.parametrize(("config", "options"), [
    ("full", {"depth": 2}), ("windows", {"depth": 1}), ("windows only", {"depth": 2, "num_blocks": 40}),
    ("full", {"depth": 2, "num_blocks": 16, "budget": 60}),
], ids=["full", "windows", "windows only", "short memory"])
def test_tokens_and_logprobs_are_those_without_drafts(monkeypatch: pytest.MonkeyPatch, config: str,
                                                      options: dict[str, Any]) -> None:
    plain = run(make_engine(CONFIGS[config], device=False), forking())
    steps: list[int] = []
    launch = TreeSteps.launch
    monkeypatch.setattr(TreeSteps, "launch", lambda self, entries: steps.append(
        sum(bool(entry.parents) for entry in entries)) or launch(self, entries))
    core = make_engine(CONFIGS[config], device=True, **options, **trees())
    same(run(core, forking()), plain)
    core.scheduler.check()
    kept, offered = accepted(core)
    assert 0 < kept < offered
    assert sum(steps) > 2


def test_a_branch_that_is_not_the_first_is_moved_and_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that repeats itself: what follows reads the KV that was moved."""
    moved: list[int] = []
    from quire.ops.cpu import CpuOps

    copy = CpuOps.copy_slots
    monkeypatch.setattr(CpuOps, "copy_slots", lambda self, layer, source, target: moved.append(len(source)) or copy(
        self, layer, source, target))
    found = []
    for more in ({}, trees()):
        core = make_engine(QWEN3, device=True, weights=faint, **more)
        found.append(run(core, forking(6, again=True)))
    same(*found)
    assert sum(moved) > 6


def test_rejection_draws_what_it_draws_on_a_cpu() -> None:
    want = make_engine(QWEN3, device=False, budget=400, **trees("rejection"))
    got = make_engine(QWEN3, device=True, budget=400, **trees("rejection"))
    same(run(got, guessed_at_random()), run(want, guessed_at_random()))
    assert accepted(got) == accepted(want)
    assert 0 < accepted(got)[0] < accepted(got)[1]
    assert got.scheduler.speculator is not None and got.scheduler.speculator.tree is not None


def test_sequences_whose_draws_read_their_text_take_the_first_branch() -> None:
    plain = run(make_engine(QWEN3, device=False), remembering())
    core = make_engine(QWEN3, device=True, depth=2, **trees())
    same(run(core, remembering()), plain)
    assert accepted(core)[1] > 0


def test_the_first_branch_of_a_tree() -> None:
    from quire.scheduler.plan import PlanEntry

    entry = PlanEntry(0, 5, 6, True, drafts=(10, 11, 12, 13, 14), parents=(-1, -1, 0, 0, 2))
    cut = first_branch(entry)
    assert (cut.drafts, cut.parents, cut.num_tokens) == ((10, 12, 14), (), 4)
