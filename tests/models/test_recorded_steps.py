"""A step run from its recorded list of calls has the bits of plain calls, or is refused and runs by plain calls."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest
import torch

from quire.errors import EngineError
from quire.kernels.kv_spec import KVSpec
from quire.kernels.types import StepContext
from quire.models.build import build_decoder
from quire.models.decoder import Decoder
from quire.ops import recording
from quire.ops.cpu import CpuOps
from quire.ops.recording import StepRecorder
from tests.checkpoints import FAMILY_NAMES, config_of, make_model, weights_of
from tests.paged_driver import PagedDriver

PLAIN = {"gpt2", "opt", "ministral3", "cohere", "mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "gpt_oss", "glm4_moe",
         "deepseek_v2", "deepseek_v3"}
"""Families whose forward computes something in torch: learned positions, factors by position, experts."""


def decoder_of(family: str, threads: int = 1) -> Decoder:
    model = make_model(family)
    return build_decoder(config_of(model), weights_of(model), CpuOps(num_threads=threads), max_model_len=128)


def recorder_of(decoder: Decoder) -> StepRecorder:
    assert isinstance(decoder.ops, CpuOps)
    return decoder.ops.recorder()


def tokens_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(97), k=length)


def mixed_steps(seed: int) -> list[dict[int, list[int]]]:
    """Prompts in pieces and single tokens of up to three sequences: some numbers of tokens come up often."""
    draw = random.Random(seed)
    left = {seq: tokens_of(seq, draw.randint(20, 40)) for seq in range(3)}
    steps = []
    while any(left.values()):
        step = {}
        for seq in sorted((seq for seq in left if left[seq] and draw.random() < 0.8), key=lambda _: draw.random()):
            size = draw.choice([1, 1, 1, 1, 3])
            step[seq], left[seq] = left[seq][:size], left[seq][size:]
        if step:
            steps.append(step)
    return steps


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_a_step_run_again_has_the_bits_of_plain_calls(family: str) -> None:
    decoder = decoder_of(family)
    recorder = recorder_of(decoder)
    plain = PagedDriver(decoder, num_blocks=40)
    again = PagedDriver(decoder, num_blocks=40, recorder=recorder)
    for step in mixed_steps(1):
        expected, got = plain.step(step), again.step(step)
        assert all(torch.equal(got[seq], expected[seq]) for seq in step)
    assert (recorder.replayed > 0) == (family not in PLAIN)
    assert bool(recorder.refused) == (family in PLAIN)


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return decoder_of("llama", threads=2)


def test_steps_over_other_caches_are_recorded_anew(llama: Decoder) -> None:
    recorder = recorder_of(llama)
    tokens = tokens_of(3, 12)
    expected = PagedDriver(llama, num_blocks=4).run(0, tokens, [1] * 12)
    first, second = (PagedDriver(llama, num_blocks=4, seed=seed, recorder=recorder) for seed in (1, 2))
    assert torch.equal(first.run(0, tokens, [1] * 12), expected)
    assert recorder.replayed == 10
    del first
    assert torch.equal(second.run(0, tokens, [1] * 12), expected)
    assert recorder.replayed == 20


def test_a_broken_context_is_refused_with_the_words_of_a_plain_call(llama: Decoder) -> None:
    driver = PagedDriver(llama, num_blocks=4, recorder=recorder_of(llama))
    driver.run(0, tokens_of(4, 4), [1] * 4)
    assert driver.recorder is not None and driver.recorder.replayed == 2  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="token id"):
        driver.step({0: [97]})
    driver._tables[0][0][0] = 99
    with pytest.raises(EngineError, match="block table names a block outside"):
        driver.step({0: [5]})


def test_long_steps_and_large_results_run_by_plain_calls(llama: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = recorder_of(llama)
    driver = PagedDriver(llama, num_blocks=40, recorder=recorder)
    driver.run(0, tokens_of(5, 80), [65, 15])
    assert recorder.replayed == 0 and not recorder.refused
    monkeypatch.setattr(recording, "_MOST_BYTES", 100)
    driver.run(1, tokens_of(5, 4), [1] * 4)
    assert recorder.refused == {(None, 1): "its intermediate results take too much memory"}


def run_often(recorder: StepRecorder, forward: Callable[[], torch.Tensor], times: int = 4) -> list[torch.Tensor]:
    """Steps of two tokens of two sequences without a cache."""
    found = []
    for _ in range(times):
        ctx = StepContext(torch.zeros(2, dtype=torch.int64), torch.tensor([0, 1, 2], dtype=torch.int32),
                          torch.ones(2, dtype=torch.int32), (), ())
        found.append(recorder.run(None, torch.tensor([0, 1]), ctx, [], forward).clone())
    return found


OPERATIONS: dict[str, Callable[[CpuOps, torch.Tensor], torch.Tensor]] = {
    "act": lambda ops, x: ops.act(x, "gelu"),
    "act_mul": lambda ops, x: ops.act_mul(x, "silu"),
    "clamped_act_mul": lambda ops, x: ops.clamped_act_mul(x, 0.7, 1.702),
    "add": lambda ops, x: ops.add(x, x),
    "scale": lambda ops, x: ops.scale(x, 0.3),
    "rms_norm": lambda ops, x: ops.rms_norm(x, torch_weight, 1e-6),
    "layer_norm": lambda ops, x: ops.layer_norm(x, torch_weight, torch_weight, 1e-6),
}
torch_weight = torch.linspace(-1, 1, 20)


@pytest.mark.parametrize("name", OPERATIONS)
def test_every_operation_can_be_recorded(name: str) -> None:
    ops = CpuOps(num_threads=2)
    recorder, x = ops.recorder(), torch.randn(2, 20, generator=torch.Generator().manual_seed(1))
    expected = OPERATIONS[name](ops, x)
    found = run_often(recorder, lambda: OPERATIONS[name](ops, x))
    assert recorder.replayed == 2 and all(torch.equal(each, expected) for each in found)


def test_add_and_scale_have_the_bits_of_torch() -> None:
    ops, x = CpuOps(num_threads=2), torch.randn(37, 555, generator=torch.Generator().manual_seed(2))
    assert torch.equal(ops.add(x, x.flip(0)), x + x.flip(0))
    assert torch.equal(ops.scale(x, 25.298221281347036), x * 25.298221281347036)
    with pytest.raises(EngineError, match="not added"):
        ops.add(x, x[:3])


def test_whatever_torch_computes_refuses_the_step() -> None:
    ops = CpuOps(num_threads=1)
    recorder, x = ops.recorder(), torch.ones(2, 8)
    run_often(recorder, lambda: ops.add(x, x + 1))
    assert recorder.replayed == 0 and "aten.add" in recorder.refused[None, 2]
    recorder = ops.recorder()
    run_often(recorder, lambda: x)
    assert recorder.refused[None, 2] == "its result was not computed by a kernel"


def test_recordings_that_differ_refuse_the_step() -> None:
    """Here by an argument that is another at every step and that nobody declared to be so."""
    ops = CpuOps(num_threads=1)
    recorder, x, factors = ops.recorder(), torch.ones(2, 8), iter(range(100))
    found = run_often(recorder, lambda: ops.scale(x, float(next(factors))))
    assert recorder.refused[None, 2] == "two recordings of it differ"
    assert [each[0, 0].item() for each in found] == [0.0, 1.0, 2.0, 3.0]


def test_calls_of_other_threads_are_not_recorded() -> None:
    ops = CpuOps(num_threads=1)
    recorder, x = ops.recorder(), torch.ones(2, 8)

    def forward() -> torch.Tensor:
        other = threading.Thread(target=lambda: ops.copy_blocks(cache, [0], [1]))
        other.start()
        other.join()
        return ops.scale(x, 2.0)

    cache = ops.allocate_cache(KVSpec.pair(1, 8), 2, 4)
    assert all(torch.equal(each, 2 * x) for each in run_often(recorder, forward))
    assert recorder.replayed == 2


def test_results_that_are_not_needed_together_share_memory() -> None:
    ops = CpuOps(num_threads=1)
    recorder, x = ops.recorder(), torch.ones(2, 16)

    def forward() -> torch.Tensor:
        kept = y = ops.scale(x, 2.0)
        for _ in range(20):
            y = ops.scale(y, 1.5)
        return ops.add(kept, y)

    expected = forward()
    assert all(torch.equal(each, expected) for each in run_often(recorder, forward))
    assert recorder.replayed == 2 and recorder.memory_bytes == 3 * x.nbytes
