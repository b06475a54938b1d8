"""Launching a step never makes the host wait for the GPU, whatever its requests ask for."""

from __future__ import annotations

import time
import traceback
from typing import Any

import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

if torch.cuda.is_available():
    from tests.gpu.models import VOCAB, config_of, device_engine
    from tests.worker.gpu import engines, test_grammars, test_groups

_NAP = 600_000_000
"""Clock cycles of a sleeping kernel: some 0.35 s."""


def drive(core: Any) -> None:
    """All kinds of sampling, several sequences of one prompt, beams, a grammar."""
    found = engines.run(core, engines.workload(0, 22, VOCAB))
    assert [error for *_, error in found.values() if error] == []
    requests = test_groups.groups()
    for request in requests:
        request.prompt_token_ids = [token % VOCAB for token in request.prompt_token_ids]
        request.sequences.clear()
        request.__post_init__()
        core.add(request)
    while core.has_work:
        core.step()
    assert [seq.error for request in requests for seq in request.sequences if seq.error] == []
    test_grammars.assert_kept(test_grammars.constrained(core, VOCAB))


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"deterministic": True}], ids=str)
def test_no_operation_of_a_step_synchronises(options: dict[str, Any]) -> None:
    core = device_engine(config_of("qwen3"), dtype="bfloat16", **options)
    worker = core.executor._worker
    caught: list[str] = []

    def watched(name: str, owner: Any) -> None:
        inner = getattr(owner, name)

        def call(*args: Any) -> Any:
            torch.cuda.set_sync_debug_mode("error")
            try:
                return inner(*args)
            except RuntimeError:
                caught.append(traceback.format_exc(limit=-6))
                raise
            finally:
                torch.cuda.set_sync_debug_mode("default")

        setattr(owner, name, call)

    watched("run", worker._runner)
    watched("run", worker._copies)
    watched("send", worker._copier)
    try:
        drive(core)
    except AssertionError:
        assert caught == []
        raise
    finally:
        core.close()
    assert caught == []


def test_steps_are_launched_while_the_gpu_is_busy_with_something_else() -> None:
    """Steps are launched behind a kernel that sleeps: launching must take less time than the nap."""
    core = device_engine(config_of("qwen3"), dtype="bfloat16")
    drive(core)
    worker = core.executor._worker
    submit, slow, count = worker.submit, [], [0]

    def timed(plan: Any) -> Any:
        count[0] += 1
        nap = count[0] % 7 == 0 and count[0] < 120
        if nap:
            torch.cuda._sleep(_NAP)
        begin = time.perf_counter()
        found = submit(plan)
        if nap and time.perf_counter() - begin > 0.15:
            kinds = [worker.table.info(entry.row).params for entry in plan.entries]
            slow.append(f"{time.perf_counter() - begin:.2f} s: {kinds}")
        return found

    worker.submit = timed
    drive(core)
    core.close()
    # One or two may have had to ask the driver for pinned memory, which waits.
    assert count[0] > 50 and len(slow) <= 2, slow
