"""The sampling kernels inside an engine, run by Triton's interpreter: the tokens and reports of the full sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.sampling.params import SamplingParams
from quire.scheduler.plan import RowStart
from quire.scheduler.request import Request
from quire.worker.gpu.sampled_stage import RepeatedStage, RowSettings, SampledRow, SampledStage
from tests.worker.gpu import engines
from tests.worker.gpu.test_grammars import Grammars

pytest.importorskip("triton")
CONFIG = {**engines.QWEN3, "num_hidden_layers": 1, "vocab_size": 61}
KINDS: list[dict[str, Any]] = [
    {"temperature": 0.9, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 7, "presence_penalty": 0.5, "repetition_penalty": 1.2, "logprobs": 3},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.8, "min_tokens": 3, "logit_bias": {5: 2.0}, "frequency_penalty": 0.4},
    {"temperature": 0.8},
    {"temperature": 0.7, "top_p": 0.9, "structured_outputs": {"choice": ["a"]}, "logprobs": 1},
]


def _requests() -> list[Request]:
    return [Request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(3 + i)],
                    SamplingParams(max_tokens=4, ignore_eos=True, **kind), seed=i, arrival_time=0.0,
                    bad_words=[[3], [1, 2]] if i == 3 else [])
            for i, kind in enumerate(KINDS)]


def _sampled(core: Any, failing: tuple[int, ...]) -> list[int]:
    """Let the kernels draw in the engine's worker; returns the rows of each of their passes, as they come. Those
    numbered `failing` find no memory."""
    from quire.kernels.triton import sample
    from quire.worker.gpu.draws import SpecialDraws
    from quire.worker.gpu.sampled_steps import SampledSteps

    passes: list[int] = []

    def sample_rows(step: Any, rows: int, *rest: Any) -> None:
        passes.append(rows)
        if len(passes) in failing:
            raise torch.OutOfMemoryError("out of memory")
        sample.sample_rows(step, rows, *rest)

    kernels: Any = SimpleNamespace(SampleScratch=sample.SampleScratch, SampledStep=sample.SampledStep,
                                   sample_rows=sample_rows)
    launches, table = core.executor._worker._runner.launches, core.executor._worker.table
    steps = SampledSteps(kernels, table, launches.buffers.logits, launches.drawn, launches.drawn.shape[1])
    core.executor._worker._runner.draws = SpecialDraws(table, False, steps)
    return passes


@pytest.mark.parametrize(("depth", "failing"), [(1, ()), (2, ()), (2, (2, 4))])
def test_an_engine_with_the_sampling_kernels_gives_the_plain_engines_tokens(
    depth: int, failing: tuple[int, ...]
) -> None:
    """Where memory runs short the full sampler draws, and counts of tokens begin again after it."""
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    plain = engines.make_engine(CONFIG, device=False)
    core = engines.make_engine(CONFIG, device=True, depth=depth)
    plain.grammars = core.grammars = Grammars(61)  # type: ignore[assignment]
    passes = _sampled(core, failing)
    want = engines.run(plain, _requests())
    got = engines.run(core, _requests())
    assert {name: found[0] for name, found in got.items()} == {name: found[0] for name, found in want.items()}
    for name, (_, logprobs, _, error) in want.items():
        assert error is None
        assert [(one.token_id, one.rank, one.top_ids) for one in got[name][1]] == [
            (one.token_id, one.rank, one.top_ids) for one in logprobs]
        for mine, one in zip(got[name][1], logprobs, strict=True):
            assert [mine.logprob, *mine.top_logprobs] == pytest.approx([one.logprob, *one.top_logprobs], abs=2e-5)
    # One pass for all rows of a step, whatever they ask for.
    assert passes and len(passes) <= 12


def test_counts_of_a_row_start_again_with_the_next_sequence() -> None:
    from quire.worker.gpu.sampled_stage import SampledRow
    from quire.worker.gpu.sampled_steps import TokenCounts

    infos = {row: SimpleNamespace(params=SimpleNamespace(penalised=row != 2)) for row in range(4)}
    table: Any = SimpleNamespace(info=infos.__getitem__)
    counts = TokenCounts()

    def step(*places: tuple[int, int]) -> tuple[list[int], list[tuple[int, int]]]:
        rows = [SampledRow(0, row, position) for row, position in places]
        return counts.place(rows, table), [(row.slot, row.counted) for row in rows]

    assert step((3, 10), (2, 5), (1, 7)) == ([0, 1], [(0, 0), (-1, 0), (1, 0)])
    assert step((1, 8), (3, 11)) == ([], [(1, 7), (0, 10)])
    infos[1] = SimpleNamespace(params=SimpleNamespace(penalised=True))
    assert step((1, 4), (0, 9)) == ([1, 2], [(1, 0), (2, 0)])
    assert counts.size == 3
    counts.forget([SampledRow(0, 3, 11)])
    assert step((3, 12), (1, 5)) == ([0], [(0, 0), (1, 4)])


def test_a_step_of_the_same_rows_is_staged_as_if_it_were_new() -> None:
    def settings(**chosen: Any) -> RowSettings:
        return RowSettings.of(RowStart(0, [1, 2], 2, SamplingParams(max_tokens=9, **chosen), 5, 0, stop_ids=[0],
                                       bad_words=[]), 61)

    rows = [SampledRow(0, 4, 2), SampledRow(2, 1, 7, slot=0, counted=6)]
    later = [SampledRow(1, 4, 3), SampledRow(3, 1, 8, slot=0, counted=7)]
    masked = [SampledRow(1, 4, 4, mask=b"\xff" * 8), later[1]]
    plain = [settings(top_p=0.5), settings(presence_penalty=1.0, logit_bias={3: 1.0}, allowed_token_ids=[3, 4])]
    banned = [plain[0], settings(min_tokens=2, logit_bias={3: 1.0})]
    repeated = RepeatedStage(61)
    for step, (mine, chosen, size) in enumerate([
        (rows, plain, 2), (later, plain, 2), (later, plain, 4), (masked, plain, 4), (rows, plain, 4),
        (rows, banned, 4), (later, banned, 4), (rows, list(reversed(plain)), 4),
    ]):
        stage = SampledStage(mine, chosen, 61)
        expected = stage.words(size, step)
        words, wants = repeated.words(mine, list(chosen), size, step)
        assert words.tolist() == expected.tolist() and wants == stage.wants
