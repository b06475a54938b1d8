"""The load of `quire bench gpu --mixed`: what its steps hold, seen on CPU tensors."""

from __future__ import annotations

from quire.bench.gpu.mixed import Load, text
from tests.worker.gpu.engines import QWEN3, make_engine


def test_every_step_is_one_prompt_beside_the_decoding_sequences() -> None:
    core = make_engine(QWEN3, device=True, depth=2)
    load = Load(core, decodes=3, context=20, answer=150)
    plans: list[list[int]] = []
    submit = core.executor.submit

    def seen(plan):  # type: ignore[no-untyped-def]
        plans.append(sorted(entry.num_tokens for entry in plan.entries))
        return submit(plan)

    core.executor.submit = seen  # type: ignore[method-assign]
    assert len(load.steps(0, 4)) == 4 and plans == [[1, 1, 1]] * 4
    plans.clear()
    load.steps(16, 8)
    assert plans == [[1, 1, 1, 16]] * 8
    core.close()


def test_a_line_reads_as_a_sentence() -> None:
    line = {"model": "8b", "prompt": 16, "decodes": 8, "step_ms": 2.0, "kernel_ms": 1.0, "host_ms": 1.5,
            "gpu_busy_share": 0.5}
    assert text(line) == ("mixed   8b, as it comes: a prompt of 16 beside 8 decoding: 2.00 ms a step, kernels 1.00 "
                          "(50% busy), host 1.50")
