"""The request table takes changes of block tables in both forms that plans have."""

from __future__ import annotations

import random

import numpy as np
import pytest

from quire.ranks.plan_codec import PlanDecoder, PlanEncoder
from quire.scheduler.diffs import OneBlockDiffs
from quire.scheduler.plan import StepPlan, TableDiff
from quire.worker.request_table import RequestTable


@pytest.mark.parametrize("groups", [1, 3])
def test_blocks_that_reached_a_rank_as_columns_are_where_single_diffs_put_them(groups: int) -> None:
    rng = random.Random(groups)
    places = {(rng.randrange(8), rng.randrange(groups), rng.randrange(16)) for _ in range(40)}
    plan = StepPlan(1, diffs=[TableDiff(*place, [rng.randrange(1000)]) for place in places])
    crossed, _ = PlanDecoder().decode(PlanEncoder().encode(plan))
    assert isinstance(crossed.diffs, OneBlockDiffs) and crossed == plan
    one, other = (RequestTable(8, 64, 4, groups) for _ in range(2))
    one.apply(plan)
    other.apply(crossed)
    assert all(np.array_equal(*tables) for tables in zip(one.tables, other.tables, strict=True))
    assert sum(int(np.count_nonzero(table)) for table in other.tables) > 20
