"""Servers that compute prompts for one another: the header that names them, the bootstrap route, one stream."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.async_llm import AsyncLLM
from quire.kvcache.secret import derived_secret
from quire.server.cluster.disaggregation import PrefillHeader
from tests.checkpoints import make_checkpoint
from tests.peers.pairs import SECRET
from tests.server.scripted import running

PROMPT = list(range(3, 80))
OPTIONS: dict[str, Any] = {"skip_tokenizer_init": True, "num_kv_blocks": 60, "max_model_len": 256, "num_threads": 1}


@pytest.fixture(autouse=True)
def secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_KV_SECRET", SECRET)


def starts(model: Path, **options: Any) -> Any:
    async def start() -> AsyncLLM:
        return await AsyncLLM.start(str(model), **OPTIONS, **options)

    return start


def signed(value: str) -> dict[str, str]:
    key = derived_secret(SECRET.encode(), "prefill-header")
    return {"X-Quire-Prefill": value,
            "X-Quire-Prefill-Signature": hmac.new(key, value.encode(), hashlib.sha256).hexdigest()}


def test_two_servers_answer_as_one_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama")
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, "seed": 5, "logprobs": 2, "ignore_eos": True}
    keys = tmp_path / "keys"
    keys.write_text("somebody a-key-of-the-tests\n")
    with running(starts(tmp_path, kv_role="prefill"), api_key_file=str(keys)) as (first, _), \
            running(starts(tmp_path, kv_role="decode", kv_peers=first)) as (second, _):
        assert httpx.get(f"{first}/v1/kv/bootstrap").status_code == 401, "it needs the key"
        told = httpx.get(f"{first}/v1/kv/bootstrap", headers={"Authorization": "Bearer a-key-of-the-tests"}).json()
        assert told["host"] == "127.0.0.1" and told["port"] > 0
        assert httpx.get(f"{second}/v1/kv/bootstrap").status_code == 404, "it computes for nobody"
        name = httpx.get(f"{second}/v1/models").json()["data"][0]["id"]
        found = {}
        for kind, headers in (("default", {}), ("allowed", {"X-Quire-Prefill": f"{first}/"}), ("signed", signed(first)),
                              ("here", {"X-Quire-Prefill": ""})):
            salted = {**body, "model": name, "cache_salt": kind}
            answer = httpx.post(f"{second}/v1/completions", json=salted, headers=headers, timeout=120)
            assert answer.status_code == 200, answer.text
            found[kind] = (answer.json()["choices"][0]["logprobs"], answer.json()["choices"][0]["text"])
        assert len(set(map(str, found.values()))) == 1, found
        metrics = httpx.get(f"{second}/metrics").text
        line = next(line for line in metrics.splitlines() if line.startswith("quire:kv_prompts_arrived_total"))
        assert line.endswith(" 3.0")


@pytest.mark.parametrize(("headers", "reason"), [
    ([(b"x-quire-prefill", b"http://evil:1")], "not one of this server's --kv-peers"),
    ([(b"x-quire-prefill", b"http://a:1, http://evil:1")], "evil"),
    ([(b"x-quire-prefill", b"http://a:1"), (b"x-quire-prefill", b"http://a:1")], "more than once"),
    ([(b"x-quire-prefill", b"http://evil:1"), (b"x-quire-prefill-signature", b"00" * 32)], "kv-peers"),
    ([(b"x-quire-prefill", b",".join(b"http://a:1" for _ in range(20)))], "at most"),
])
def test_a_header_that_names_whom_it_may_not_is_refused(headers: list[tuple[bytes, bytes]], reason: str) -> None:
    from quire.config import EngineConfig
    from quire.server.api_error import ApiError

    header = PrefillHeader(EngineConfig.create(model="m", kv_role="decode", kv_peers="http://a:1"))
    for spelling in (b"HTTP://A:1/", b"http://a:1//", b" http://a:1 ,"):
        assert header.named([(b"x-quire-prefill", spelling)]) == ("http://a:1",), "one link, however it is spelled"
    with pytest.raises(ApiError, match=reason) as caught:
        header.named(headers)
    assert caught.value.status == 400 and caught.value.code == "prefill_not_allowed"
    with pytest.raises(ApiError, match="asks none"):
        PrefillHeader(EngineConfig.create(model="m")).named(headers[:1])
