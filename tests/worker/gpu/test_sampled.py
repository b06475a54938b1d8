"""The sampling kernels inside an engine, run by Triton's interpreter: the tokens and reports of the full sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire.kernels.sampled_row import Wants
from quire.sampling.params import SamplingParams
from quire.scheduler.plan import RowStart
from quire.scheduler.request import Request
from quire.worker.gpu import sampled_steps
from quire.worker.gpu.sampled_stage import RepeatedStage, RowSettings, SampledRows, SampledStage
from quire.worker.gpu.sampled_steps import SampledSteps, TokenCounts
from tests.worker.gpu import engines
from tests.worker.gpu.drafting import accepted
from tests.worker.gpu.head_cases import asked, faint
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


def _sampled(core: Any, failing: tuple[int, ...], pool: Any = None) -> tuple[list[int], SampledSteps]:
    """Let the kernels draw in the engine's worker; returns the rows of each of their passes, as they come. Those
    numbered `failing` find no memory. `pool`: of graphs."""
    from quire.kernels.triton import sample
    from quire.worker.gpu.draws import SpecialDraws

    passes: list[int] = []

    def sample_rows(step: Any, rows: int, *rest: Any) -> None:
        passes.append(rows)
        if len(passes) in failing:
            raise torch.OutOfMemoryError("out of memory")
        sample.sample_rows(step, rows, *rest)

    kernels: Any = SimpleNamespace(SampleScratch=sample.SampleScratch, SampledStep=sample.SampledStep,
                                   sample_rows=sample_rows)
    launches, table = core.executor._worker._runner.launches, core.executor._worker.table
    steps = SampledSteps(kernels, table, launches.buffers.logits, launches.drawn, launches.drawn.shape[1], pool)
    core.executor._worker._runner.draws = SpecialDraws(table, False, steps)
    return passes, steps


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
    passes, _ = _sampled(core, failing)
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


class Launched:
    """`GraphCache` without a GPU: what would be replayed is launched."""

    def __init__(self, device: Any, launch: Any, pool: Any) -> None:
        self.run = lambda key: launch(key, False)

    def holds(self, key: Any) -> bool:
        return True

    def close(self) -> None:
        pass


def test_a_step_of_the_same_rows_sends_nothing_and_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("by the interpreter; `test_sample.py` looks at what the compiled kernel leaves")
    monkeypatch.setattr(sampled_steps, "GraphCache", Launched)

    def requests() -> list[Request]:
        """Of several lengths: rows leave the batch, and others come."""
        return [Request(f"r{i}", [(5 * i + j) % 61 for j in range(2 + i)],
                        SamplingParams(max_tokens=6 + 3 * (i % 3), ignore_eos=True, **KINDS[i % 3]), seed=i,
                        arrival_time=0.0) for i in range(8)]  # fmt: skip

    found, sent = [], []
    for pool in (None, "pool"):
        core = engines.make_engine(CONFIG, device=True, depth=2)
        passes, steps = _sampled(core, (), pool)
        send = steps._send
        steps._send = lambda words, send=send: (sent.append(words), send(words))  # type: ignore[method-assign]
        found.append(engines.run(core, requests()))
        assert pool is None or len(sent) < 0.6 * len(passes)
        sent.clear()
    assert found[0] == found[1]


@pytest.mark.parametrize("pool", [None, "pool"])
def test_nodes_of_trees_draw_at_positions_that_the_device_alone_knows(monkeypatch: pytest.MonkeyPatch, pool: Any
                                                                      ) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    monkeypatch.setattr(sampled_steps, "GraphCache", Launched)
    kinds = [KINDS[0], {"temperature": 0.9, "top_k": 7, "logprobs": 3}, KINDS[2],
             {"temperature": 0.8, "logit_bias": {5: 2.0, 9: 2.0}}]

    def requests() -> list[Request]:
        return [Request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(3 + i)],
                        SamplingParams(max_tokens=8, ignore_eos=True, **kind), seed=i, arrival_time=0.0)
                for i, kind in enumerate(kinds)]

    want = engines.run(engines.make_engine(CONFIG, device=True, weights=faint), requests())
    more = asked("eagle", tree={"width": 2, "depth": 3, "nodes": 5})
    core = engines.make_engine(CONFIG, device=True, budget=80, **more)
    passes, _ = _sampled(core, (), pool)
    got = engines.run(core, requests())
    assert {name: found[0] for name, found in got.items()} == {name: found[0] for name, found in want.items()}
    for name, (_, logprobs, _, error) in want.items():
        assert error is None
        told = [(one.token_id, one.top_ids) for one in got[name][1]]
        assert told == [(one.token_id, one.top_ids) for one in logprobs]
    assert accepted(core)[0] > 0 and max(passes) >= 4 * 6


def test_rows_of_a_later_pass_may_be_the_first_with_penalties(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("by the interpreter")
    monkeypatch.setattr(sampled_steps, "AT_ONCE", 2)
    penalised = {"temperature": 0.8, "presence_penalty": 0.7}

    def requests() -> list[Request]:
        return [Request(f"r{i}", [i + 1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True, **chosen), seed=i,
                        arrival_time=0.0) for i, chosen in enumerate([KINDS[0], KINDS[0], penalised])]  # fmt: skip

    core = engines.make_engine(CONFIG, device=True, depth=2)
    passes, _ = _sampled(core, ())
    found = engines.run(core, requests())
    assert found == engines.run(engines.make_engine(CONFIG, device=False), requests())
    assert passes and max(passes) <= 2


def _rows(*numbers: tuple[int, int, int], **more: Any) -> SampledRows:
    """Of (place, table row, position)."""
    places, owners, positions = np.array(numbers, np.int32).T
    return SampledRows(places, owners, positions, **more)


def test_counts_of_a_row_start_again_with_the_next_sequence() -> None:
    ages = np.array([1, 1, 1, 1])
    bits = np.where(np.arange(4) != 2, int(Wants.PENALTIES), int(Wants.TOP_P))
    table: Any = SimpleNamespace(bits=bits.__getitem__, ages=ages.__getitem__)
    counts = TokenCounts(4)

    def step(*places: tuple[int, int]) -> tuple[list[int], list[int], list[int]]:
        rows = _rows(*((0, *place) for place in places))
        fresh = counts.place(rows, table)
        assert rows.slots is not None and rows.counted is not None
        return fresh, rows.slots.tolist(), rows.counted.tolist()

    assert step((3, 10), (2, 5), (1, 7)) == ([0, 1], [0, -1, 1], [0, 0, 0])
    assert step((1, 8), (3, 11)) == ([], [1, 0], [7, 10])
    ages[1] += 1
    assert step((1, 4), (0, 9)) == ([1, 2], [1, 2], [0, 0])
    assert counts.size == 3
    counts.forget(_rows((0, 3, 11)))
    assert step((3, 12), (1, 5)) == ([0], [0, 1], [0, 4])
    unpenalised = _rows((0, 2, 6))
    assert counts.place(unpenalised, table) == [] and unpenalised.slots is None


def test_some_rows_and_rows_one_by_one() -> None:
    rows = _rows((0, 4, 2), (1, 3, 7), (2, 5, 9), masks=[b"a", b"", b"c"])
    assert [one.mask for one in rows.apart()] == [b"a", b"", b"c"]
    for some in (rows.part(np.array([True, False, True])), rows.part(np.array([0, 2]))):
        assert [(one.place, one.row, one.position, one.mask) for one in some.apart()] == [
            (0, 4, 2, b"a"), (2, 5, 9, b"c")]
    assert rows.part(slice(1, 3)).masks == [b"", b"c"] and len(rows.part(slice(0))) == 0


def test_a_step_of_the_same_rows_is_staged_as_if_it_were_new() -> None:
    def settings(**chosen: Any) -> RowSettings:
        return RowSettings.of(RowStart(0, [1, 2], 2, SamplingParams(max_tokens=9, **chosen), 5, 0, stop_ids=[0],
                                       bad_words=[]), 61)

    def counted(count: int) -> dict[str, Any]:
        return {"slots": np.array([-1, 0], np.int32), "counted": np.array([0, count], np.int32)}

    rows = _rows((0, 4, 2), (2, 1, 7), **counted(6))
    later = _rows((1, 4, 3), (3, 1, 8), **counted(7))
    masked = _rows((1, 4, 4), (3, 1, 8), masks=[b"\xff" * 8, b""], **counted(7))
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
