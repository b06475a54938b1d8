"""The device worker as one of several ranks: the plans of one worker, carried out by several, give the same results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire.config import CacheConfig
from quire.kernels.slices import RankTree, Slices, add_in_tree
from quire.models.build import dummy_weights
from quire.parallel.peers import PeerGroup
from quire.scheduler.plan import StepPlan, StepResult
from quire.speculation.options import SpeculationOptions
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.speculation import Speculation
from tests.parallel_ranks.rank_threads import side_by_side
from tests.worker.gpu import engines
from tests.worker.gpu.device_ranks import DeviceRankWorkers, device_ranks

OPTIONS = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=engines.SEQS, max_num_batched_tokens=40,
                        max_model_len=engines.MAX_LEN)
Steps = list[tuple[StepPlan, StepResult]]


def recorded(config: dict[str, Any], speculation: SpeculationOptions | None = None,
             draft: dict[str, Any] | None = None) -> Steps:
    """Every plan of an engine of one rank, with what came of it."""
    core = engines.make_engine(config, device=True, speculation=speculation, draft=draft)
    worker = core.executor._worker  # type: ignore[attr-defined]
    submit, steps = worker.submit, []

    def recording(plan: StepPlan) -> Any:
        kept = copy.deepcopy(plan)
        future = submit(plan)
        steps.append((kept, copy.deepcopy(future.result())))  # the scheduler cuts tokens after an end
        return future

    worker.submit = recording
    engines.run(core, engines.workload(3, 11))
    worker.close()
    return steps


def replayed(steps: Steps, config: dict[str, Any], sizes: list[tuple[int, int]], options: DeviceOptions = OPTIONS,
             speculation: Callable[[], Speculation] = lambda: None) -> None:  # type: ignore[assignment,return-value]
    assert sum(len(result.entries) for _, result in steps) > 50
    for tensor_size, num_stages in sizes:
        ranks = DeviceRankWorkers(config, CacheConfig(block_size=8, num_kv_blocks=60), options, tensor_size,
                                  num_stages, speculation)
        try:
            for plan, expected in steps:
                assert ranks.execute(copy.deepcopy(plan)).entries == expected.entries, (tensor_size, num_stages, plan)
        finally:
            ranks.close()


@pytest.mark.parametrize(("config", "sizes"), [
    (engines.QWEN3, [(2, 1), (1, 2), (2, 2)]),
    ({**engines.QWEN3, "num_attention_heads": 9, "num_key_value_heads": 3}, [(2, 1)]),
    (engines.GEMMA3, [(1, 2)]),
], ids=["even", "uneven", "windows"])
def test_plans_of_one_rank_on_several(config: dict[str, Any], sizes: list[tuple[int, int]]) -> None:
    replayed(recorded(config), config, sizes)


@pytest.mark.parametrize(("method", "sizes", "verifier"), [
    ("ngram", [(2, 2)], "coupled"), ("skip_layers", [(2, 1)], "rejection"), ("draft_model", [(2, 1)], "coupled"),
])
def test_drafts_of_one_rank_on_several(method: str, sizes: list[tuple[int, int]], verifier: str) -> None:
    config, draft = engines.QWEN3, None
    drafting = SpeculationOptions(method, 3, adaptive=False, verifier=verifier)
    if method == "draft_model":
        draft = {**config, "num_hidden_layers": 1}
        drafting = replace(drafting, model="draft")

    def speculation() -> Speculation:
        return Speculation(drafting, draft, None if draft is None else dummy_weights(draft))

    options = replace(OPTIONS, draft_rows=3 * engines.SEQS)
    replayed(recorded(config, drafting, draft), config, sizes, options, speculation)


def _side_by_side(size: int, call: Any, slot_bytes: int = 1 << 10) -> list[Any]:
    ranks, give_up = device_ranks(size, 1, slot_bytes)
    groups = [each.group for each in ranks]
    return side_by_side([lambda group=group: call(group) for group in groups], give_up)


@pytest.mark.parametrize("size", [2, 3])
def test_what_a_group_exchanges(size: int) -> None:
    """More than a slot holds, lengths that differ, an odd number of exchanges before a step ends: again and again."""
    torch.manual_seed(size)
    slices = Slices.each(9, 4)
    tree = RankTree.even(slices.total, size)
    values = torch.randn(slices.total, 3, 5)
    given = [torch.randn(4 + rank, 150) for rank in range(size)]
    bias, residual = torch.randn(5), torch.randn(3, 5)
    owners = torch.tensor([0, 1, size - 1, 0])
    counts = [part.numel() for part in given]

    def call(group: PeerGroup) -> list[Any]:
        mine = given[group.rank]
        nodes = torch.stack([add_in_tree(list(values[first:last])) for first, last in tree.nodes(group.rank)])
        found = []
        for _ in range(3):
            found.append(group.sum_nodes(nodes, tree, bias, residual))
            found += group.exchange(mine, counts)
            found.append(group.pick(mine[:4], owners))
            found.append(group.sum_parts(mine[:1].clone(), None, None))
            out = torch.empty(1, 20 * size)
            group.gather(mine[:1, :20].contiguous(), [20] * size, out)
            found.append(out)
            group.settle()
        return found

    for found in _side_by_side(size, call):
        each = len(found) // 3
        for part in (found[:each], found[each : 2 * each], found[2 * each :]):
            total, *rest = part
            assert torch.equal(total, add_in_tree(list(values)) + bias + residual)
            assert all(torch.equal(got, mine.reshape(-1)) for got, mine in zip(rest, given, strict=False))
            picked, summed, gathered = rest[size:]
            assert torch.equal(picked, torch.stack([given[owner][row] for row, owner in enumerate(owners.tolist())]))
            assert torch.allclose(summed, sum(part[:1] for part in given))
            assert torch.equal(gathered, torch.cat([part[:1, :20] for part in given], 1))


def test_room_is_passed_on_without_a_copy() -> None:
    def call(group: PeerGroup) -> torch.Tensor:
        room = group.room(2, 3)
        room.fill_(group.rank + 1.0)
        return group.sum_parts(room, None, None)

    assert all(torch.equal(found, torch.full((2, 3), 3.0)) for found in _side_by_side(2, call))
