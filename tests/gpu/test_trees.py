"""Draft trees of lookups on a real GPU: tokens and log-probabilities without drafts, replayed graphs, nobody waits."""

from __future__ import annotations

import traceback
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.worker.gpu.options import DeviceOptions
    from tests.kernels.triton.test_branch import check_branches
    from tests.worker.gpu.drafting import accepted, forking, guessed_at_random, remembering, trees
    from tests.worker.gpu.engines import GEMMA3, MAX_LEN, QWEN3, SEQS, make_engine, run
    from tests.worker.gpu.head_cases import faint

    CONFIGS = {"full": QWEN3, "windows": GEMMA3, "heads of 128": {**QWEN3, "head_dim": 128, "num_attention_heads": 8}}


def engine(config: dict[str, Any], *, deterministic: bool = True, dtype: str = "float32", **more: Any) -> Any:
    length = min(MAX_LEN, more.get("num_blocks", 60) * 8)
    options = DeviceOptions(device="cuda", dtype=dtype, max_num_seqs=SEQS, max_num_batched_tokens=60,
                            max_model_len=length, deterministic=deterministic)
    return make_engine(config, device=True, depth=2, budget=60, options=options, weights=faint, **more)


def told(core: Any, requests: list[Any]) -> dict[str, Any]:
    found = run(core, requests)
    assert [one[3] for one in found.values() if one[3]] == []
    return {name: (one[0], one[1]) for name, one in found.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_branches_are_found_and_moved(dtype: torch.dtype) -> None:
    check_branches("cuda", dtype)


@pytest.mark.parametrize(
    ("family", "more"),
    [("full", {}), ("windows", {}), ("full", {"num_blocks": 16}), ("heads of 128", {"dtype": "bfloat16"})],
    ids=["full", "windows", "short memory", "heads of 128"],
)
def test_trees_change_no_bit(family: str, more: dict[str, Any]) -> None:
    """Heads of 128 in 16 bits: on Hopper nodes of trees have another kernel than rows without."""
    core = engine(CONFIGS[family], dtype=more.get("dtype", "float32"))
    plain, again = told(core, forking()), told(core, forking(6, again=True))
    core.close()
    core = engine(CONFIGS[family], **more, **trees())
    assert told(core, forking()) == plain
    assert told(core, forking(6, again=True)) == again
    kept, offered = accepted(core)
    assert 0 < kept < offered
    assert core.executor._worker._runner.trees.replays > 0
    core.close()


def test_rejection_keeps_greedy_texts_and_some_drafts_of_others() -> None:
    """What is drawn at random is compared with a CPU in tests/worker/gpu/test_trees.py."""
    core = engine(QWEN3)
    plain = told(core, guessed_at_random())
    core.close()
    core = engine(QWEN3, **trees("rejection"))
    found = told(core, guessed_at_random())
    greedy = [request.request_id for request in guessed_at_random() if request.params.greedy]
    assert greedy and {name: found[name] for name in greedy} == {name: plain[name] for name in greedy}
    kept, offered = accepted(core)
    assert 0 < kept < offered
    core.close()


@pytest.mark.parametrize("verifier", ["coupled", "rejection"])
def test_no_step_with_trees_makes_the_host_wait(verifier: str) -> None:
    core = engine(QWEN3, deterministic=False, dtype="bfloat16", **trees(verifier))
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
    for requests in (forking(), remembering(), guessed_at_random()):
        found = run(core, requests)
        assert caught == []
        assert [one[3] for one in found.values() if one[3]] == []
    core.close()
