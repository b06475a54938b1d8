"""Draft trees that heads and draft models grow on a real GPU: tokens and log-probabilities without drafts, every level
a replayed graph, nobody waits."""

from __future__ import annotations

import functools
import traceback
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from quire.models.build import dummy_weights
    from quire.ops.reference import TorchOps
    from quire.speculation.options import SpeculationOptions
    from quire.worker.gpu.options import DeviceOptions
    from tests.kernels.triton.test_growth import SHAPES, check_growth
    from tests.worker.gpu.drafting import METHODS, accepted, guessed_at_random, looping, remembering
    from tests.worker.gpu.engines import MAX_LEN, QWEN3, SEQS, make_engine, run
    from tests.worker.gpu.head_cases import asked, faint
else:
    SHAPES = []

TREE = {"width": 3, "depth": 4, "nodes": 9}


def engine(*, depth: int = 2, budget: int = 120, deterministic: bool = True, dtype: str = "float32",
           enforce_eager: bool = False, **more: Any) -> Any:
    length = min(MAX_LEN, more.get("num_blocks", 60) * 8)
    options = DeviceOptions(device="cuda", dtype=dtype, max_num_seqs=SEQS, max_num_batched_tokens=budget,
                            max_model_len=length, deterministic=deterministic, enforce_eager=enforce_eager)
    return make_engine(QWEN3, device=True, depth=depth, budget=budget, options=options, **more)


def trees(method: str, verifier: str = "coupled") -> dict[str, Any]:
    """Keywords of `engine`: of a head, or of a draft model."""
    if method in ("eagle", "eagle3"):
        return asked(method, 4, verifier, TREE)
    config, draft = METHODS[method]
    return {"speculation": SpeculationOptions.parse({**config, "adaptive": False, "verifier": verifier, "tree": TREE}),
            "draft": draft, "weights": dummy_weights}


def told(core: Any, requests: list[Any]) -> dict[str, Any]:
    found = run(core, requests)
    assert [one[3] for one in found.values() if one[3]] == []
    return {name: (one[0], one[1]) for name, one in found.items()}


@functools.cache
def plain(count: int, weights: Any) -> dict[str, Any]:
    """What the same engine says without drafts."""
    core = engine(weights=weights)
    found = told(core, looping(count))
    core.close()
    return found


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_grow_the_trees_of_a_cpu(shape: tuple[int, int, int]) -> None:
    for seed in range(8):
        check_growth("cuda", shape, seed)


@pytest.mark.parametrize("method", ["eagle", "eagle3", "skip_layers", "draft_model"])
def test_trees_change_no_bit_and_every_level_is_replayed(method: str) -> None:
    more = trees(method)
    core = engine(**more)
    assert told(core, looping(12)) == plain(12, more["weights"])
    kept, offered = accepted(core)
    worker = core.executor._worker
    assert 0 < kept < offered
    assert worker._grower.replays > 20 and worker._runner.trees.replays > 5
    core.close()


def test_trees_without_graphs_change_no_bit() -> None:
    core = engine(enforce_eager=True, **trees("eagle"))
    assert told(core, looping(12)) == plain(12, faint)
    assert accepted(core)[0] > 0 and core.executor._worker._grower.replays == 0
    core.close()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_trees_are_those_of_cpu_tensors(kind: str) -> None:
    """As many kept, of as many, as by plain torch on a CPU, where they are compared node by node."""
    core = engine(depth=1, budget=400, **trees(kind))
    host = make_engine(QWEN3, device=True, budget=400, ops=TorchOps(), **trees(kind))
    found, want = told(core, looping(8)), told(host, looping(8))
    assert sum(found[name][0] == want[name][0] for name in want) >= len(want) - 1
    (kept, offered), (wanted, of) = accepted(core), accepted(host)
    assert abs(kept / offered - wanted / of) < 0.05
    core.close()


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_short_memory_and_chunks_change_no_bit(kind: str) -> None:
    core = engine(budget=40, num_blocks=16, **trees(kind))
    assert told(core, looping(14)) == plain(14, faint)
    assert core.scheduler.stats.preemptions > 0
    core.close()


def test_rejection_keeps_greedy_texts_and_some_drafts_of_others() -> None:
    """What is drawn at random is compared with a CPU in tests/worker/gpu/test_grown_trees.py."""
    core = engine(weights=faint)
    without = told(core, guessed_at_random())
    core.close()
    core = engine(**trees("eagle", "rejection"))
    found = told(core, guessed_at_random())
    greedy = [request.request_id for request in guessed_at_random() if request.params.greedy]
    assert greedy and {name: found[name] for name in greedy} == {name: without[name] for name in greedy}
    kept, offered = accepted(core)
    assert 0 < kept < offered
    core.close()


@pytest.mark.parametrize(("method", "verifier"), [("eagle", "coupled"), ("eagle3", "rejection"),
                                                  ("draft_model", "coupled")])
def test_no_step_with_trees_makes_the_host_wait(method: str, verifier: str) -> None:
    core = engine(deterministic=False, dtype="bfloat16", **trees(method, verifier))
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
    for requests in (looping(), remembering(), guessed_at_random()):
        found = run(core, requests)
        assert caught == []
        assert [one[3] for one in found.values() if one[3]] == []
    assert core.executor._worker._grower.replays > 0
    core.close()
