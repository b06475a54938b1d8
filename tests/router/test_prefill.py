"""Prompts computed by some servers and answers written by others: whom the router names, and how it signs that."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from pathlib import Path

import httpx
import pytest

from quire.kvcache.secret import derived_secret
from quire.router.replica import Role
from tests.router.fakes import FakeServer, fakes, routed, whole
from tests.router.test_passage import PLAIN, STREAM, breaks, post
from tests.server.real import until


def test_decode_servers_are_told_who_computes_the_prompt(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("a secret of the tests")
    prefill, decode = [FakeServer() for _ in range(3)], [FakeServer() for _ in range(2)]
    with fakes(*prefill, *decode) as urls:
        listed = [(url, Role.PREFILL) for url in urls[:3]] + [(url, Role.DECODE) for url in urls[3:]]
        with routed(listed, kv_secret_file=str(file)) as (address, service):
            for number in range(6):
                assert post(address, STREAM if number % 2 else PLAIN).status_code == 200
            assert [len(each.asked) for each in decode] == [3, 3] and not any(each.asked for each in prefill)
            firsts = set()
            for each in decode:
                for _, headers, _ in each.asked:
                    value = headers["x-quire-prefill"]
                    assert set(value.split(",")) <= set(urls[:3]) and len(value.split(",")) == 2
                    firsts.add(value.split(",")[0])
                    key = derived_secret(b"a secret of the tests", "prefill-header")
                    signed = hmac.new(key, value.encode(), hashlib.sha256).hexdigest()
                    assert headers["x-quire-prefill-signature"] == signed
            assert len(firsts) == 3, "they take turns"
            until(lambda: not any(each.load.in_flight for each in service.fleet))


@pytest.mark.parametrize("body", [PLAIN, STREAM])
def test_a_request_goes_to_another_decode_server_before_its_first_token(body: dict[str, object]) -> None:
    prefill, bad, good = FakeServer(), FakeServer(breaks()), FakeServer()
    with fakes(prefill, bad, good) as urls:
        listed = [(urls[0], Role.PREFILL), (urls[1], Role.DECODE), (urls[2], Role.DECODE)]
        with routed(listed, health_interval=60.0) as (address, service):
            assert [post(address, body).status_code for _ in range(4)] == [200] * 4
            assert len(bad.asked) == 1 and len(good.asked) == 4
            assert "x-quire-prefill-signature" not in good.asked[0][1]
            until(lambda: not any(each.load.in_flight for each in service.fleet))


REFUSALS = [b'{"error":{"message":"the header X-Quire-Prefill names \'http://a\', which is not one of this server\'s '
            b'--kv-peers","type":"invalid_request_error","param":"X-Quire-Prefill","code":"prefill_not_allowed"}}',
            b'{"type":"error","error":{"type":"invalid_request_error","message":"the header X-Quire-Prefill names \'http://a'
            b'\', which is not one"}}']


@pytest.mark.parametrize("refusal", REFUSALS, ids=["openai", "anthropic"])
def test_a_decode_server_that_does_not_know_the_routers_secret_computes_prompts_itself(refusal: bytes) -> None:
    """No client sent that header, so none may be told that it is wrong."""
    prefill, decode = FakeServer(), FakeServer()

    async def minds(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        if "x-quire-prefill" in headers:
            writer.write(whole(refusal, "400 Bad Request"))
            return True
        return await decode.hello(path, headers, body, writer)

    decode.say = minds
    with fakes(prefill, decode) as urls:
        listed = [(urls[0], Role.PREFILL), (urls[1], Role.DECODE)]
        with routed(listed, health_interval=60.0) as (address, service):
            assert [post(address, body).status_code for body in (PLAIN, STREAM, PLAIN)] == [200] * 3
            assert ["x-quire-prefill" in headers for _, headers, _ in decode.asked] == [True, False, False, False]
            until(lambda: not any(each.load.in_flight for each in service.fleet))


def test_what_a_decode_server_minds_of_the_request_itself_is_passed_on() -> None:
    prefill, decode = FakeServer(), FakeServer()

    async def minds(path: str, headers: dict[str, str], body: bytes, writer: asyncio.StreamWriter) -> bool:
        writer.write(whole(b'{"error":{"message":"n: the header X-Quire-Prefill","code":"invalid_value"}}', "400 Bad"))
        return True

    decode.say = minds
    with fakes(prefill, decode) as urls, routed([(urls[0], Role.PREFILL), (urls[1], Role.DECODE)]) as (address, _):
        answers = [post(address, PLAIN) for _ in range(2)]
        assert [each.status_code for each in answers] == [400, 400] and "invalid_value" in answers[0].text
        assert all("x-quire-prefill" in headers for _, headers, _ in decode.asked) and len(decode.asked) == 2


def test_without_a_prefill_server_the_decode_server_computes_the_prompt_itself() -> None:
    prefill, decode = FakeServer(), FakeServer()
    with fakes(prefill) as dead:
        pass
    with fakes(decode) as urls, routed([(dead[0], Role.PREFILL), (urls[0], Role.DECODE)]) as (address, _):
        assert post(address, PLAIN).status_code == 200
        assert "x-quire-prefill" not in decode.asked[0][1]
        assert httpx.get(f"{address}/health").status_code == 200
