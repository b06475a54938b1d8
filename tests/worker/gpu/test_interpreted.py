"""The fused forward pass and both attention kernels inside an engine, run by Triton's interpreter: slow, so
short."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from quire.sampling.params import SamplingParams
from quire.scheduler.request import Request
from quire.worker.gpu.options import DeviceOptions
from tests.worker.gpu import engines

pytest.importorskip("triton")
CONFIG = {**engines.QWEN3, "num_hidden_layers": 1, "vocab_size": 61}
UNPADDED = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=engines.SEQS, max_num_batched_tokens=40,
                         max_model_len=engines.MAX_LEN, pad_mixed=False)  # fmt: skip
"""Small mixed steps as they come: padded ones always take our tiles."""


def _requests() -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    return [
        Request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(n)], params, seed=i, arrival_time=0.0)
        for i, n in enumerate((9, 2))
    ]


@pytest.mark.parametrize("options", [{}, {"deterministic": True}], ids=["plain", "deterministic"])
def test_an_engine_on_the_kernels_gives_the_cpu_engines_tokens(options: dict[str, bool]) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.ops.triton import TritonOps

    plain = engines.run(engines.make_engine(CONFIG, device=False), _requests())
    ops = TritonOps("cpu", torch.float32, **options)
    assert engines.run(engines.make_engine(CONFIG, device=True, depth=2, ops=ops), _requests()) == plain


def test_fresh_prompts_may_be_attended_to_by_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.attention import triton as backend
    from quire.attention.prefill_libraries import Borrowed
    from quire.ops.triton import TritonOps
    from tests.attention.test_prefill_libraries import causal

    monkeypatch.setattr(backend, "_RAGGED_TOKENS", 2)
    taken: list[int] = []

    def counted(q, k, v, run, scale):  # type: ignore[no-untyped-def]
        taken.append(run.tokens)
        return causal(q, k, v, run, scale)

    ops = TritonOps("cpu", torch.float32)
    ops.attention.prefill_library = Borrowed("mine", counted)
    plain = engines.run(engines.make_engine(CONFIG, device=False), _requests())
    core = engines.make_engine(CONFIG, device=True, depth=2, ops=ops, options=UNPADDED)
    assert engines.run(core, _requests()) == plain
    assert taken == [11]


@pytest.mark.parametrize(
    ("change", "fused"),
    [({}, True), ({"fuse_rope": False}, False), ({"drafts": 2}, True), ({"deterministic": True}, False)],
    ids=["as it is", "switched off", "drafts", "deterministic"],
)
def test_decode_steps_rotate_inside_their_attention_unless_they_hold_drafts(
    monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], fused: bool
) -> None:
    """A draft sees keys of its own step, which another program of the same launch would have to write first."""
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.attention import triton as backend
    from quire.ops.triton import TritonOps

    launched: list[int] = []
    kernel = backend.rope_decode_attention

    def counted(qkv: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        launched.append(qkv.shape[0])
        return kernel(qkv, *args, **options)

    monkeypatch.setattr(backend, "rope_decode_attention", counted)
    config = {**CONFIG, "head_dim": 32}
    drafts = change.get("drafts", 0)
    settings = DeviceOptions(
        device="cpu", dtype="float32", max_num_seqs=engines.SEQS, max_num_batched_tokens=40,
        max_model_len=engines.MAX_LEN, draft_rows=drafts * engines.SEQS, fuse_rope=change.get("fuse_rope", True),
    )
    ops = TritonOps("cpu", torch.float32, deterministic=change.get("deterministic", False))
    core = engines.make_engine(config, device=True, depth=2, options=settings, ops=ops, drafts=drafts)
    # Two steps at least after the prompt, so that a key which one of them wrote is read by another.
    params = SamplingParams(temperature=0.0, max_tokens=4 if drafts else 3, ignore_eos=True)
    mine, other = ([Request("r0", [7, 8, 9, 10] * (4 if drafts else 1), params, 0, 0.0)] for _ in range(2))
    assert engines.run(core, mine) == engines.run(engines.make_engine(config, device=False), other)
    assert bool(launched) is fused
    if drafts:
        # One sequence: steps of more rows hold drafts.
        assert set(launched) == {1}
        assert core.scheduler.speculator is not None and sum(core.scheduler.speculator.stats.offered) > 0


@pytest.mark.parametrize("drafts", [0, 2])
def test_deterministic_decode_steps_on_hopper_rotate_inside_their_attention(
    monkeypatch: pytest.MonkeyPatch, drafts: int
) -> None:
    """Steps with drafts do not, and `fuse_rope=False` switches it off; all give the same tokens."""
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
    from quire.kernels.triton import hopper_prefill
    from quire.ops.triton import TritonOps
    from tests.kernels.triton.gluon_interpreter import interpreting

    monkeypatch.setattr(hopper_prefill, "available", lambda device: True)
    monkeypatch.setattr(hopper_prefill, "multiprocessors", lambda device: 3)
    kernel, launched = hopper_prefill.hopper_prefill, list[tuple[int, bool]]()

    def counted(qkv: torch.Tensor, *args: Any, raw: Any = None, **options: Any) -> None:
        launched.append((qkv.shape[0], raw is not None))
        kernel(qkv, *args, raw=raw, **options)

    monkeypatch.setattr(hopper_prefill, "hopper_prefill", counted)
    config = {**CONFIG, "head_dim": 128, "num_attention_heads": 4}
    params = SamplingParams(temperature=0.0, max_tokens=4 if drafts else 3, ignore_eos=True)
    found, steps = [], []
    for fused in (True, False):
        settings = DeviceOptions(
            device="cpu", dtype="bfloat16", max_num_seqs=engines.SEQS, max_num_batched_tokens=40,
            max_model_len=engines.MAX_LEN, draft_rows=drafts * engines.SEQS, fuse_rope=fused, pad_mixed=False,
        )
        ops = TritonOps("cpu", torch.bfloat16, deterministic=True)
        core = engines.make_engine(config, device=True, depth=2, options=settings, ops=ops, drafts=drafts)
        launched.clear()
        with interpreting():
            found.append(engines.run(core, [Request("r0", [7, 8, 9, 10] * (4 if drafts else 1), params, 0, 0.0)]))
        steps.append(set(launched))
    assert found[0] == found[1] and all(not raw for _, raw in steps[1])
    assert {rows for rows, raw in steps[0] if raw} <= {1}
    assert (2, False) in steps[0] if drafts else (1, True) in steps[0]


def test_drafts_on_the_kernels_give_the_cpu_engines_tokens() -> None:
    """Of the target without a layer: its own steps, and those that judge."""
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.ops.triton import TritonOps
    from tests.worker.gpu.drafting import accepted, speculation

    config = {**CONFIG, "num_hidden_layers": 2}
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)

    def requests() -> list[Request]:
        return [Request("r", [3, 8, 5], params, seed=0, arrival_time=0.0)]

    plain = engines.run(engines.make_engine(config, device=False), requests())
    core = engines.make_engine(config, device=True, depth=2, ops=TritonOps("cpu", torch.float32),
                               **speculation("skip_layers", 1))
    assert engines.run(core, requests()) == plain
    assert accepted(core)[1] > 0


def test_prompts_may_be_attended_to_out_of_their_steps_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those without context that fill a tile; chunks that go on, and shorter ones, read the cache as ever."""
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.attention import triton as backend
    from quire.kernels.triton.attention_mixed import MixedShape
    from quire.ops.triton import TritonOps

    monkeypatch.setattr(backend, "_ROWS", MixedShape(32, 16, 4, 2))
    monkeypatch.setattr(backend, "fresh_fits", lambda shape, dtype: True)
    taken: list[int] = []
    kernel = backend.fresh_attention

    def counted(qkv: torch.Tensor, starts: Any, seqs: torch.Tensor, *args: Any, **options: Any) -> torch.Tensor:
        taken.append(seqs.unique().numel())
        return kernel(qkv, starts, seqs, *args, **options)

    monkeypatch.setattr(backend, "fresh_attention", counted)

    def requests() -> list[Request]:
        params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
        return [Request(f"r{i}", [(7 * i + 3 * j) % 61 for j in range(n)], params, seed=i, arrival_time=0.0)
                for i, n in enumerate((17, 2, 19, 60))]

    plain = engines.run(engines.make_engine(CONFIG, device=False), requests())
    ops = TritonOps("cpu", torch.float32, prompt_rows=True)
    core = engines.make_engine(CONFIG, device=True, depth=2, ops=ops, options=UNPADDED)
    assert engines.run(core, requests()) == plain
    assert taken == [2]


@pytest.mark.parametrize("max_num_seqs", [3, 6, 8, 40])
def test_every_graph_that_is_captured_is_one_that_steps_replay(max_num_seqs: int) -> None:
    """Whatever number of sequences and drafts: shapes off the ladder have no division of their keys."""
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.ops.triton import TritonOps
    from quire.worker.gpu.batches import rung_for
    from quire.worker.gpu.padded import MixedRungs

    options = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=max_num_seqs, max_num_batched_tokens=64,
                            max_model_len=engines.MAX_LEN, draft_rows=3 * max_num_seqs)  # fmt: skip
    core = engines.make_engine(CONFIG, device=True, options=options, ops=TritonOps("cpu", torch.float32), drafts=3)
    runner = core.executor._worker._runner  # type: ignore[attr-defined]
    captured: dict[bool, list[int]] = {False: [], True: []}

    class Graphs:
        def capture(self, rungs: list[int], separate_rope: bool = False) -> None:
            captured[separate_rope] += rungs

    # Padded steps hold no drafts.
    assert runner.padded.rungs.decode_counts == MixedRungs(max_num_seqs, 64, 8, False).decode_counts
    runner.graphs, runner.padded = Graphs(), None
    runner.capture(max_num_seqs)
    assert set(captured[False]) == {rung_for(runner.rungs, count) for count in range(1, max_num_seqs + 1)}
    assert captured[True] == runner.rungs
    assert set(runner.rungs) <= runner.contexts.reserved


def test_the_warm_up_compiles_the_kernels_of_steps_that_no_graph_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.ops.triton import TritonOps

    options = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=4, max_num_batched_tokens=512,
                            max_model_len=64)  # fmt: skip
    core = engines.make_engine(CONFIG, device=True, options=options, ops=TritonOps("cpu", torch.float32))
    worker = core.executor._worker  # type: ignore[attr-defined]
    runner = worker._runner
    padded, eager, mixed = [], [], runner.launches.mixed
    monkeypatch.setattr(runner.padded, "run", lambda rung, *_: padded.append(rung))
    monkeypatch.setattr(runner.launches, "mixed", lambda *args: eager.append(1) or mixed(*args))
    with torch.inference_mode():
        worker._warm_up(1)
    assert (padded, eager) == ([], [1])
    assert runner.padded is not None


def test_a_head_on_the_kernels_gives_the_cpu_engines_tokens() -> None:
    """The target's steps keep its hidden states, the head's read them; two rows of a sequence in one of its passes."""
    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    from quire.ops.triton import TritonOps
    from tests.worker.gpu.drafting import accepted
    from tests.worker.gpu.head_cases import asked

    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    found = []
    for ops in (None, TritonOps("cpu", torch.float32)):
        core = engines.make_engine(CONFIG, device=True, ops=ops, **asked("eagle3", 1))
        told = engines.run(core, [Request("r", [3, 6], params, seed=0, arrival_time=0.0)])
        found.append((told["r"][0], told["r"][3], accepted(core)))
    assert found[0] == found[1]
    assert found[0][2][0] > 0
