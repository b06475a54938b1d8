"""Links over TCP: whatever somebody sends to an engine's port, the engine goes on."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.errors import ConfigError, PeerError
from quire.peers import sockets
from quire.peers.bootstrap import split_address
from quire.peers.messages import Prefill, parse
from quire.sampling.params import MAX_BAD_WORDS, MAX_STOP_LENGTH
from tests.checkpoints import make_checkpoint
from tests.peers.engine_process import eventually
from tests.peers.pairs import SECRET, PrefillEngine

PROMPT = list(range(3, 60))
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 40, "max_model_len": 128}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("llama")
    make_checkpoint(folder, "llama")
    return str(folder)


@pytest.fixture(scope="module")
def engines(model: str) -> Iterator[tuple[PrefillEngine, LLM]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_KV_SECRET", SECRET)
        other = PrefillEngine(model, **OPTIONS)
        with LLM(model, **OPTIONS, kv_transfer={"role": "decode", "peers": other.address, "transports": "tcp",
                                                "least_tokens": 1}) as llm:
            yield other, llm
        other.stop()


def served(llm: LLM) -> None:
    """The pair still works."""
    llm.clear_prefix_cache()
    before = llm.metrics()["kv_prompts_arrived"]
    assert llm.generate([PROMPT], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)[0].error is None
    assert llm.metrics()["kv_prompts_arrived"] == before + 1


JUNK = [b"", b"\0", b"GET / HTTP/1.1\r\n\r\n", struct.pack(">I", 1 << 31), struct.pack(">I", 5) + b"{}{}{",
        struct.pack(">I", 2) + b"[]", struct.pack(">I", 4) + b"null", struct.pack(">I", 60_000) + b"[" * 60_000,
        *(bytes(random.Random(seed).randbytes(200)) for seed in range(4))]


@pytest.mark.parametrize("junk", JUNK, ids=range(len(JUNK)))
def test_junk_on_the_port_closes_that_link_and_nothing_else(engines: tuple[PrefillEngine, LLM], junk: bytes) -> None:
    other, llm = engines
    where = split_address(other.address)
    with contextlib.suppress(ConnectionError, OSError), \
            socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as made:
        made.sendall(junk)
        made.shutdown(socket.SHUT_WR)
        while made.recv(4096):
            pass
    served(llm)


def test_a_stranger_who_says_a_byte_now_and_then_is_cut_off(engines: tuple[PrefillEngine, LLM],
                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    """256 of them would otherwise keep everybody else out for hours."""
    other, llm = engines
    served(llm)
    monkeypatch.setattr(sockets, "HANDSHAKE_SECONDS", 0.5)
    where = split_address(other.address)
    with socket.create_connection((where.hostname or "", where.port or 0), timeout=10) as made:
        made.settimeout(0.1)
        made.sendall(struct.pack(">I", 4000))
        eventually(lambda: _drip(made), "it may go on for ever", seconds=30)
    served(llm)


def _drip(made: socket.socket) -> bool:
    """Say one byte more; true when the other side does not listen any more."""
    try:
        made.sendall(b" ")
        while made.recv(4096):
            pass
    except TimeoutError:
        return False
    except OSError:
        return True
    return True


def _good() -> dict[str, Any]:
    params = SamplingParams(max_tokens=3, logit_bias={5: 1.0})
    return Prefill(7, PROMPT, True, params, 1, [2], [[4, 5]], b"k", 0, "t", 0, [0], len(PROMPT),
                   {"transfer": 7}).to_data()


def test_a_prompt_survives_the_wire() -> None:
    found = parse(json.loads(json.dumps(_good())))
    assert isinstance(found, Prefill) and found.tokens == PROMPT and found.params.logit_bias == {5: 1.0}


def test_the_longest_word_that_a_request_may_forbid_survives_the_wire() -> None:
    """1,024 characters that the tokenizer spells in four bytes each, behind a space."""
    found = parse({**_good(), "bad_words": [[5] * (4 * MAX_STOP_LENGTH + 1)] * (2 * MAX_BAD_WORDS)})
    assert isinstance(found, Prefill) and len(found.bad_words[0]) == 4097


WRONG: list[dict[str, Any]] = [
    {"tokens": "abc"}, {"tokens": [1, "2"]}, {"tokens": [-1]}, {"tokens": [1 << 40]}, {"tokens": [True]}, {"end": 99},
    {"end": -1}, {"start": 58}, {"starts": [0.5]}, {"starts": [0] * 1000}, {"params": {"n": 0}}, {"params": 3},
    {"params": {"unknown": 1}}, {"params": {"logit_bias": [1]}}, {"seed": -1}, {"seed": 1.5}, {"transfer": -1},
    {"transfer": 1 << 70}, {"cache_key": "zz"}, {"tenant": "x" * 1000}, {"ticket": []}, {"bad_words": [["a"]]},
    {"first_token": 1}, {"priority": None}, {"kind": "unknown"}, {"kind": None}, {"eos": [[1]]}]


@pytest.mark.parametrize("change", WRONG, ids=str)
def test_a_message_that_is_none_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(PeerError):
        parse({**_good(), **change})


@pytest.mark.parametrize("change", [
    {"tokens": [], "end": 0}, {"tokens": [500], "end": 1}, {"starts": [0, 0]}, {"starts": []},
    {"tokens": [1] * 5000, "end": 5000}, {"params": {"stop_token_ids": [10**6]}}, {"ticket": {}}, {"ticket": {"a": 1}},
    {"starts": [10**6]}, {"seed": -1}, {"bad_words": [["a"]]}, {"params": {"n": 0}}], ids=str)
def test_a_prompt_that_cannot_be_served_is_refused_alone(engines: tuple[PrefillEngine, LLM],
                                                        change: dict[str, Any]) -> None:
    """Sent by an engine that has the secret and is mad."""
    other, llm = engines
    served(llm)
    peers = llm._engine.peers  # type: ignore[union-attr]
    stats = other.llm._engine.peers.stats  # type: ignore[union-attr]
    before, links = stats.prefills_refused + stats.prefills_failed, llm.metrics()["kv_links_lost"]
    peers.link_to(other.address).send({**_good(), "transfer": random.getrandbits(40), **change})  # type: ignore[union-attr]
    eventually(lambda: stats.prefills_refused + stats.prefills_failed > before, "nobody minded")
    served(llm)
    assert llm.metrics()["kv_links_lost"] == links, "others would have lost their prompts"


@pytest.mark.parametrize("message", [
    {"kind": "first", "transfer": 1, "token": 5, "logprobs": None, "prompt_logprobs": None},
    {"kind": "failed", "transfer": 1, "reason": "no"}, {"kind": "sent", "transfer": 2},
    {"kind": "abort", "transfer": 3},
    {"kind": "first", "transfer": 1, "token": 5, "logprobs": [[1, float("nan"), 1, [], []]], "prompt_logprobs": None},
    {"kind": "first", "transfer": 1, "token": 5, "logprobs": [[1, -0.5, 1 << 40, [], []]], "prompt_logprobs": None}])
def test_answers_to_what_nobody_asked_are_dropped(engines: tuple[PrefillEngine, LLM], message: dict[str, Any]) -> None:
    other, llm = engines
    served(llm)
    for link in list(other.llm._engine.peers._open):  # type: ignore[union-attr]
        link.send(message)
    served(llm) if message.get("logprobs") is None else eventually(lambda: _works(llm), "it does not recover")


def _works(llm: LLM) -> bool:
    try:
        served(llm)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("options", [
    {"kv_role": "prefill"}, {"kv_transfer": {"role": "maybe"}},
    {"kv_transfer": {"role": "decode", "listen": "nowhere"}}, {"kv_peers": "kv://127.0.0.1:1"},
    {"kv_transfer": {"role": "decode", "lease": 0.0}}, {"kv_transfer": 3}])
def test_options_that_cannot_be_are_refused(model: str, options: dict[str, Any],
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    if options != {"kv_role": "prefill"}:
        monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)
    else:
        monkeypatch.delenv("QUIRE_KV_SECRET", raising=False)
    with pytest.raises(ConfigError):
        LLM(model, **OPTIONS, **options)


def test_an_engine_that_accepts_and_says_nothing_costs_one_lease(model: str, monkeypatch: pytest.MonkeyPatch,
                                                                 caplog: pytest.LogCaptureFixture) -> None:
    """Finding it, connecting and the handshake have one bound together, and not five seconds each."""
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)
    with socket.create_server(("127.0.0.1", 0)) as mute, \
            LLM(model, **OPTIONS, kv_transfer={"role": "decode", "lease": 2.0, "least_tokens": 1}) as llm:
        silent = f"http://127.0.0.1:{mute.getsockname()[1]}"
        llm.add_request("r", PROMPT, SamplingParams(max_tokens=2, ignore_eos=True), prefill=[silent])
        while llm.has_unfinished_requests():
            llm.step()
        found = llm.metrics()
    assert found["kv_prompts_failed"] == found["kv_prompts_computed_here"] == 1
    assert "it has not introduced itself within 2 s" in caplog.text
