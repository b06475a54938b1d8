"""What a plan changes in the device's table: each number at its place, whatever way it took there."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.sampling.params import SamplingParams
from quire.scheduler.plan import PlanEntry, RowStart, StepPlan, TableDiff
from quire.worker.gpu.table import DeviceTable

LENGTH, BLOCK = 512, 4


def table_of(groups: int = 2) -> DeviceTable:
    return DeviceTable(3, LENGTH, BLOCK, groups, 1000, torch.device("cpu"))


def apply(table: DeviceTable, plan: StepPlan) -> None:
    places, values = table.apply(plan)
    assert places.dtype == values.dtype == np.int32 and len(set(places.tolist())) == len(places)
    table.arena[torch.from_numpy(places).long()] = torch.from_numpy(values)


@pytest.mark.parametrize("length", [1, 3, 300, LENGTH])
def test_the_tokens_of_a_row_that_starts_are_in_it(length: int) -> None:
    table, tokens = table_of(), [(31 * i + 5) % 1000 for i in range(length)]
    apply(table, StepPlan(1, starts=[RowStart(1, tokens, length, SamplingParams(), 7, 0)]))
    assert table.tokens[1, :length].tolist() == tokens and not table.tokens[[0, 2]].any()


@pytest.mark.parametrize("count", [1, 15, 16, 17, LENGTH // BLOCK - 2])
@pytest.mark.parametrize("first", [0, 2])
def test_long_and_short_diffs_are_in_the_tables_of_host_and_device(count: int, first: int) -> None:
    table = table_of()
    blocks = [900 - 7 * i for i in range(count)]
    passed = [-1] * min(count, 3) + blocks[3:]  # a window has passed the first of them
    apply(table, StepPlan(1, diffs=[TableDiff(2, 0, first, blocks), TableDiff(2, 1, first, passed),
                                    TableDiff(0, 1, 5, [11])]))
    for group, wanted in enumerate((blocks, passed)):
        for found in (table.tables[group].numpy(), table.host_tables[group]):
            assert found[2, first : first + count].tolist() == wanted
            assert not found[1].any() and not found[2, first + count :].any() and not found[2, :first].any()
    assert table.tables[1][0].nonzero().tolist() == [[5]] and table.host_tables[1][0, 5] == 11


def test_later_diffs_leave_those_of_a_plan_before_alone() -> None:
    """The numbers of a plan are copied when it is applied: the host's tables go on changing."""
    table = table_of(1)
    _, values = table.apply(StepPlan(1, diffs=[TableDiff(0, 0, 0, list(range(40)))]))
    table.apply(StepPlan(2, diffs=[TableDiff(0, 0, 0, [500] * 40)]))
    assert values.tolist() == list(range(40))


def test_a_diff_beyond_the_table_is_refused() -> None:
    for count in (2, 40):
        with pytest.raises(ValueError, match="broadcast"):
            table_of().apply(StepPlan(1, diffs=[TableDiff(0, 0, LENGTH // BLOCK - 1, [3] * count)]))


def test_proposed_and_given_tokens_are_put_behind_those_computed() -> None:
    table = table_of()
    apply(table, StepPlan(1, diffs=[TableDiff(0, 0, 0, list(range(1, 33)))],
                          entries=[PlanEntry(0, 10, 3, True, drafts=(5, 6)), PlanEntry(1, 4, 1, True, given=(9,))]))
    assert table.tokens[0, 11:13].tolist() == [5, 6] and table.tokens[1, 4] == 9
    assert table.tables[0][0, :32].tolist() == list(range(1, 33))
