"""What is timed at start, so that drafts are judged by what they cost on this machine."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest

from quire.config import EngineConfig
from quire.engine.assembly.calibration import measure_step_times
from quire.models.registry import read_spec
from quire.models.spec import DecoderSpec
from quire.scheduler.plan import EntryResult, StepPlan, StepResult
from quire.speculation.assembly import build_speculator
from quire.speculation.options import SpeculationOptions
from quire.worker.memory import PoolSize
from tests.checkpoints import _BASE


class Timed:
    """Takes plans; every one is done at once."""

    def __init__(self) -> None:
        self.sizes: set[int] = set()
        self.blocks = 0

    def submit(self, plan: StepPlan) -> Future[StepResult]:
        for diff in plan.diffs:
            self.blocks = len(diff[3])
        for entry in plan.entries:
            assert entry.start + entry.num_tokens <= 16 * self.blocks
            if entry.sample and not entry.device_drafts:
                self.sizes.add(entry.num_tokens)
        done: Future[StepResult] = Future()
        done.set_result(StepResult(plan.step, [EntryResult([1], num_drafts=e.num_drafts) for e in plan.entries]))
        return done


@pytest.fixture
def spec() -> DecoderSpec:
    return read_spec({**_BASE["llama"][2], "architectures": ["LlamaForCausalLM"]})


@pytest.mark.parametrize(("rows", "length", "sizes"), [
    (0, 4096, {1, 2, 3, 4, 5}),
    (40, 4096, {1, 2, 3, 4, 5, 8, 16, 32}),
    (512, 4096, {1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256}),
    (512, 200, {1, 2, 3, 4, 5, 8, 16, 32, 64}),
])
def test_steps_of_as_many_rows_as_drafts_may_have_are_timed(rows: int, length: int, sizes: set[int],
                                                            spec: DecoderSpec) -> None:
    speculator = build_speculator(
        SpeculationOptions.parse({"method": "eagle", "model": "given", "num_speculative_tokens": 4}), rows)
    assert speculator is not None
    executor: Any = Timed()
    pool = PoolSize(400, length, 1, 0)
    measure_step_times(speculator, executor, EngineConfig.create(model="given", block_size=16), spec, pool)
    assert executor.sizes == sizes
    assert speculator.times.known and speculator.drafting.known  # type: ignore[attr-defined]
