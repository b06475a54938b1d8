"""Groups of sequences, beams and the host tier through the device worker: as through the plain one."""

from __future__ import annotations

from typing import Any

import pytest

from quire.sampling.params import BeamSearchParams, SamplingParams
from quire.scheduler.beam import BeamSearch
from quire.scheduler.plan import HOST, BlockCopy, BlockMove, StepPlan, TransferReport, TransferStart
from quire.scheduler.request import Request
from tests.worker.gpu.engines import GEMMA3, QWEN3, make_engine


def groups() -> list[Request]:
    """Samples of several sequences with and without more than a temperature, beams, and a plain one."""
    prompt = [3, 9, 27, 81, 101, 41, 2, 7, 7, 60, 11]
    beams = BeamSearchParams(beam_width=3, max_tokens=9)
    return [
        Request("n", prompt, SamplingParams(n=3, temperature=0.9, max_tokens=9, ignore_eos=True), 5, 0.0),
        Request("alone", prompt[3:], SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True), 6, 0.0),
        Request("special", prompt[:5], SamplingParams(
            n=2, temperature=0.8, top_k=9, repetition_penalty=1.2, logprobs=2, max_tokens=7, ignore_eos=True), 7, 0.0),
        Request("beams", prompt[2:], SamplingParams(n=3, temperature=0.0, max_tokens=9), 8, 0.0,
                beams=BeamSearch(beams, frozenset({5}))),
    ]


def outcome(config: dict[str, Any], **options: Any) -> dict[str, Any]:
    requests = groups()
    core = make_engine(config, **options)
    for request in requests:
        core.add(request)
    while core.has_work:
        core.step()
    core.close()
    found: dict[str, Any] = {r.request_id: [(s.tokens, s.error) for s in r.sequences] for r in requests[:3]}
    found["beams"] = [(s.tokens, s.error) for s in requests[3].sequences]
    return found


@pytest.mark.parametrize("config", [QWEN3, GEMMA3], ids=["qwen3", "gemma3"])
@pytest.mark.parametrize("depth", [1, 2])
def test_samples_and_beams_are_those_of_the_plain_worker(config: dict[str, Any], depth: int) -> None:
    plain = outcome(config, device=False)
    assert len(plain["n"]) == 3 and len({tuple(tokens) for tokens, _ in plain["n"]}) > 1
    assert outcome(config, device=True, depth=depth) == plain


def test_blocks_go_to_the_host_and_come_back() -> None:
    import torch

    from quire.worker.cache_engine import CacheEngine

    core = make_engine(QWEN3, device=True)
    worker: Any = core.executor._worker  # type: ignore[attr-defined]
    engine = CacheEngine(worker.decoder, worker.ops, 6, 8, num_host_blocks=4)
    for layer in engine.layers:
        layer.k.copy_(torch.rand_like(layer.k))
    before = [layer.k[2].clone() for layer in engine.layers]
    for start in (TransferStart(1, HOST, True, [BlockMove(0, 2, 3)]),
                  TransferStart(2, HOST, False, [BlockMove(0, 5, 3)])):
        engine.start_transfers(StepPlan(start.number, transfers=[start]))
        assert engine.arrivals.wait(10.0)
        assert engine.arrivals.take() == [TransferReport(start.number, 1, finished=True)]
        engine.copy([BlockCopy(0, 4, 2)])
    engine.close()
    assert all(torch.equal(layer.k[5], was) for layer, was in zip(engine.layers, before, strict=True))
    core.close()
