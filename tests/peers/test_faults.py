"""Engines in two processes, killed or stopped in the middle: a pause for the client, and no block lost anywhere."""

from __future__ import annotations

import random
import signal
from typing import Any

import pytest

from quire import LLM, SamplingParams
from tests.checkpoints import make_checkpoint
from tests.peers.engine_process import EngineProcess, eventually
from tests.peers.pairs import SECRET, PrefillEngine

PROMPT = random.Random(7).choices(range(3, 97), k=400)
PARAMS: dict[str, Any] = {"seed": 3, "max_tokens": 12, "temperature": 1.0, "logprobs": 1, "ignore_eos": True}
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 80, "max_model_len": 512}
SLOWLY: dict[str, Any] = {"max_num_batched_tokens": 1}
"""A prompt takes hundreds of steps: there is a middle to be hit."""
LEASE = 1.0


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, "llama", max_position_embeddings=512)
    return str(folder)


@pytest.fixture(scope="module")
def expected(model: str) -> Any:
    with LLM(model, **OPTIONS) as llm:
        return finish(llm, begin(llm))


def begin(llm: LLM, **more: Any) -> str:
    llm.add_request("r", PROMPT, SamplingParams(**PARAMS), **more)
    return "r"


def finish(llm: LLM, name: str) -> Any:
    while True:
        for output in llm.step():
            if output.finished and output.request_id == name:
                assert output.error is None
                return output.outputs[0].token_ids, output.outputs[0].logprobs


def prefill(**more: Any) -> dict[str, Any]:
    return {**OPTIONS, "kv_transfer": {"role": "prefill", "lease": LEASE, "transports": "tcp"}, **more}


def decode(*peers: str, **more: Any) -> dict[str, Any]:
    return {**OPTIONS, "kv_transfer": {"role": "decode", "peers": list(peers), "lease": LEASE, "transports": "tcp",
                                       "least_tokens": 1}, **more}


def in_the_middle(llm: LLM) -> bool:
    llm.step()
    return llm.metrics()["kv_tokens_received"] > 0


def all_free(found: dict[str, Any]) -> bool:
    return (found["kv_blocks_used"] == found["kv_leases"] == found["kv_reservations"] == 0
            and found["kv_prefills_open"] == found["kv_prompts_open"] == 0)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_prefill_that_dies_or_hangs_in_the_middle_costs_a_pause(model: str, expected: Any, how: signal.Signals) -> None:
    with EngineProcess(model, **prefill(**SLOWLY)) as other, LLM(model, **decode(other.address)) as llm:
        name = begin(llm)
        eventually(lambda: in_the_middle(llm), "nothing came")
        other.signal(how)
        assert finish(llm, name) == expected
        found = llm.metrics()
        assert found["kv_prompts_computed_here"] == 1 and found["kv_tokens_received"] < len(PROMPT)
        assert found["kv_blocks_used"] == 0
        llm.check()
        if how is signal.SIGSTOP:
            other.signal(signal.SIGCONT)
            eventually(lambda: all_free(other.metrics()), "the one that woke up holds blocks")
            llm.clear_prefix_cache()
            eventually(lambda: _arrives(llm, expected), "the one that woke up is not asked again")
        llm.check()


def _arrives(llm: LLM, expected: Any) -> bool:
    llm.clear_prefix_cache()
    before = llm.metrics()["kv_prompts_arrived"]
    assert finish(llm, begin(llm)) == expected
    return llm.metrics()["kv_prompts_arrived"] > before


def test_the_next_prefill_server_goes_on_where_the_first_one_died(model: str, expected: Any) -> None:
    second = PrefillEngine(model, **{**OPTIONS, "kv_transfer": {"lease": LEASE}})
    with EngineProcess(model, **prefill(**SLOWLY)) as first, \
            LLM(model, **decode(first.address, second.address)) as llm:
        name = begin(llm, prefill=[first.address, second.address])
        eventually(lambda: in_the_middle(llm), "nothing came")
        first.signal(signal.SIGKILL)
        assert finish(llm, name) == expected
        found = llm.metrics()
        assert (found["kv_prompts_failed"], found["kv_prompts_arrived"]) == (1, 1)
        assert found["kv_tokens_received"] == len(PROMPT), "what the first one sent is not sent again"
        llm.check()
    assert all_free(second.stop())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_decode_that_dies_or_hangs_leaves_no_block_behind(model: str, expected: Any, how: signal.Signals) -> None:
    other = PrefillEngine(model, **{**prefill(**SLOWLY), "kv_transfer": {"lease": LEASE}})
    try:
        with EngineProcess(model, **decode(other.address)) as asker:
            asker.ask(do="generate", prompt=PROMPT, params=PARAMS)
            stats = other.llm._engine.peers.stats  # type: ignore[union-attr]
            eventually(lambda: stats.tokens_sent > 0, "nothing was sent")
            asker.signal(how)
            # Whichever is noticed first: that its KV cannot be sent, or that nothing is heard of it.
            eventually(lambda: stats.prefills_cancelled + stats.prefills_failed > 0, "it computes on for the dead")
            if how is signal.SIGSTOP:
                asker.signal(signal.SIGCONT)
                assert asker.answer()["tokens"] == list(expected[0])
                eventually(lambda: all_free(asker.metrics()), "the one that woke up holds blocks")
    finally:
        found = other.stop()
    assert all_free(found) and found["kv_prefills_done"] <= 1


def test_an_address_where_nobody_listens_and_a_wrong_secret_are_a_pause_only(
        model: str, expected: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", "another secret, which is as long")
    other = PrefillEngine(model, **OPTIONS)
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)
    try:
        with LLM(model, **decode("kv://127.0.0.1:1", other.address)) as llm:
            assert finish(llm, begin(llm)) == expected
            assert llm.metrics()["kv_prompts_failed"] == 2
    finally:
        other.stop()
    assert "the secret is another one" in caplog.text


def test_smollm2_in_two_processes_gives_the_bits_of_one_engine(smollm2: str) -> None:
    options: dict[str, Any] = {"num_kv_blocks": 60, "max_model_len": 512}
    prompt, params = list(range(1000, 1150)), {**PARAMS, "logprobs": 5, "max_tokens": 8}
    with LLM(smollm2, **options) as llm:
        alone = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)[0].outputs[0]
        expected = (list(alone.token_ids), [sorted([t, x.logprob] for t, x in place.items())
                                            for place in alone.logprobs or []])
    transfer = {"lease": 30.0, "transports": "tcp"}
    with EngineProcess(smollm2, **options, max_num_batched_tokens=64, block_size=32,
                       kv_transfer={"role": "prefill", **transfer}) as first, \
            EngineProcess(smollm2, **options,
                          kv_transfer={"role": "decode", "peers": first.address, **transfer}) as second:
        second.ask(do="generate", prompt=prompt, params=params)
        found = second.answer()
        assert (found["tokens"], found["logprobs"]) == expected
        assert second.metrics()["kv_prompts_arrived"] == 1 and first.metrics()["kv_prefills_done"] == 1
