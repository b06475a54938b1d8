"""Experts that a step reads are counted, not computed."""

from __future__ import annotations

import pytest

from quire.bench.gpu import experts
from quire.bench.gpu.cases import distinct_experts
from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from tests.checkpoints import config_of, make_model
from tests.worker.gpu.engines import make_engine

CONFIG = config_of(make_model("qwen3_moe"))
TOP_K = CONFIG["num_experts_per_tok"]
EXPERTS = CONFIG.get("num_experts") or CONFIG["num_local_experts"]


def requests(count: int) -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    return [Request(str(i), [3 + i, 5, 7 * i + 1], params, seed=i, arrival_time=0.0) for i in range(count)]


@pytest.mark.parametrize("count", [1, 4])
def test_rows_and_experts_of_every_step_are_counted(count: int) -> None:
    core = make_engine(CONFIG, device=True)
    load = core.executor._worker.decoder.expert_load
    found = {each.rows: each for each in experts.spread(core, load, requests(count), TOP_K)}
    assert (found[3 * count].steps, found[count].steps) == (1, 4)
    assert found[1].distinct == TOP_K if count == 1 else TOP_K < found[4].distinct <= min(EXPERTS, 4 * TOP_K)
    assert found[count].expected == pytest.approx(distinct_experts(EXPERTS, TOP_K, count))
    assert int(load.counts.sum()) == TOP_K * 7 * count * len(load.layers)
    line = experts.line_of("b", "tiny", list(found.values()))
    assert line["steps"] == 5 and "if tokens spread evenly" in experts.text(line)
