"""Heads that draft where ranks share the target: on every rank the drafts of one rank, and its results, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from quire import LLM
from quire.config import EngineConfig
from quire.scheduler.plan import PlanEntry, StepPlan, StepResult
from quire.worker.worker import Worker
from tests.checkpoints import make_checkpoint
from tests.eagle_heads import make_head
from tests.parallel_ranks.rank_threads import RankWorkers
from tests.parallel_ranks.test_worker_replay import PROMPTS, params

SIZES = [(2, 1), (3, 1), (1, 2), (1, 3), (2, 2)]
Drafts = list[tuple[int, int, tuple[int, ...]]]
"""Row, place of its last token, what was proposed to follow."""


def proposed(worker: Worker) -> Drafts:
    """Fills up while the worker runs."""
    drafter, found = worker._runner.drafter, []
    assert drafter is not None
    propose = drafter.propose

    def recording(entries: Sequence[PlanEntry]) -> Any:
        filled, guesses = propose(entries)
        found.extend((entry.row, entry.start, tuple(entry.drafts)) for entry in filled if entry.drafts)
        return filled, guesses

    drafter.propose = recording  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(("kind", "tied"), [("eagle", True), ("eagle3", False)])
def test_in_chunks_swapped_shared_and_from_the_cache(tmp_path: Path, kind: str, tied: bool) -> None:
    """Nine query heads on three of keys, as SmolLM2 has them; every prompt twice, greedy and drawn, alone and in
    groups. EAGLE-3 reads layers of every stage."""
    target = tmp_path / "target"
    make_checkpoint(target, "llama", hidden_size=72, intermediate_size=272, num_attention_heads=9,
                    num_key_value_heads=3, tie_word_embeddings=tied)
    head = make_head(tmp_path / "head", target, kind)
    options: dict[str, Any] = {
        "skip_tokenizer_init": True, "num_threads": 1, "max_num_seqs": 8, "max_num_batched_tokens": 19, "block_size": 4,
        "num_kv_blocks": 24, "swap_space": 0.01, "preemption_mode": "swap",
        "speculative_config": {"method": "eagle", "model": str(head), "num_speculative_tokens": 3, "adaptive": False}}
    steps: list[tuple[StepPlan, StepResult]] = []
    with LLM(str(target), **options) as llm:
        worker = llm._core.executor._worker  # type: ignore[attr-defined]
        execute, drafts = worker.execute, proposed(worker)

        def recording(plan: StepPlan) -> StepResult:
            kept = copy.deepcopy(plan)
            result = execute(plan)
            steps.append((kept, copy.deepcopy(result)))
            return result

        worker.execute = recording
        for _ in range(2):
            llm.generate(PROMPTS, [params(i) for i in range(len(PROMPTS))], use_tqdm=False)
        metrics, pool = llm.metrics(), worker.pool
    assert all(metrics[name] for name in ("preemptions_by_swap", "copies_on_write", "prefix_hit_tokens"))
    assert len(drafts) > 50 and metrics["spec_accepted_tokens"] > 0
    for tensor_size, num_stages in SIZES:
        ranks = RankWorkers(EngineConfig.create(model=str(target), **options), pool, tensor_size, num_stages)
        try:
            told = [proposed(each) for each in ranks.workers]
            for plan, expected in steps:
                assert ranks.execute(copy.deepcopy(plan)).entries == expected.entries, (tensor_size, num_stages, plan)
            assert all(each == drafts for each in told)
        finally:
            ranks.close()
