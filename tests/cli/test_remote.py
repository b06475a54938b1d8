"""`quire complete` and `quire chat --url` against a stub of a server."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from quire.cli.main import main
from tests.client.stub import Stub, text
from tests.client.stub import serving as serving


async def answer(body: dict[str, Any]) -> AsyncIterator[Any]:
    if body.get("max_tokens") == 0:
        yield 400, {"error": {"message": "max_tokens must be at least 1"}}
    for word in ("Paris", " is", " it"):
        yield {"choices": [{"delta": {"content": word}, "finish_reason": None}]} if "messages" in body else text(word)
    yield {"choices": [{"delta": {}, "finish_reason": "stop"}]} if "messages" in body else text("", "stop")
    yield "[DONE]"


def test_complete_writes_what_the_server_says(serving: Callable[..., Stub], capsys: pytest.CaptureFixture[str]) -> None:
    stub = serving(answer)
    words = ["complete", "The capital", "--url", stub.url + "/v1/", "--temperature", "0.5", "--logit-bias", "5=1.5"]
    assert main(words) == 0
    assert capsys.readouterr().out == "Paris is it\n"
    body = stub.bodies[0]
    assert (body["prompt"], body["temperature"], body["logit_bias"]) == ("The capital", 0.5, {"5": 1.5})
    assert "top_p" not in body  # what was not asked for is the server's choice


def test_a_refusal_is_one_line_with_the_servers_words(
    serving: Callable[..., Stub], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["complete", "x", "--url", serving(answer).url, "--max-tokens", "0"]) == 1
    shown = capsys.readouterr()
    assert "max_tokens must be at least 1" in shown.err and shown.err.count("\n") == 1
    assert shown.out == ""


def test_a_piped_chat_whose_question_is_refused_goes_on_and_says_so_in_the_end(
    serving: Callable[..., Stub], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def picky(body: dict[str, Any]) -> AsyncIterator[Any]:
        if body["messages"][-1]["content"] == "Bad?":
            yield 400, {"error": {"message": "not this one"}}
        async for chunk in answer(body):
            yield chunk

    stub = serving(picky)
    for asked, code in (("Where?\n", 0), ("Bad?\nWhere?\n", 1)):
        monkeypatch.setattr("sys.stdin", io.StringIO(asked))
        assert main(["chat", "--url", stub.url]) == code
        shown = capsys.readouterr()
        assert shown.out == "Paris is it\n" and ("not this one" in shown.err) == (code == 1)


def test_a_chat_with_a_server_remembers_what_was_said(
    serving: Callable[..., Stub], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stub = serving(answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("Where?\nSure?\n/reset\nAgain\n"))
    assert main(["chat", "--url", stub.url, "--system", "Be brief."]) == 0
    roles = [[message["role"] for message in body["messages"]] for body in stub.bodies]
    assert roles == [["system", "user"], ["system", "user", "assistant", "user"], ["system", "user"]]
    assert stub.bodies[1]["messages"][2]["content"] == "Paris is it"
    assert capsys.readouterr().out.count("Paris is it") == 3


def test_an_option_of_the_engine_is_refused_beside_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", "127.0.0.1:9", "--max-num-seqs", "4"]) == 1
    assert "--max-num-seqs is for the server to decide" in capsys.readouterr().err


def test_a_shape_of_the_answer_is_one_field_of_the_request(serving: Callable[..., Stub]) -> None:
    stub = serving(answer)
    assert main(["complete", "x", "--url", stub.url, "--choice", "yes", "--choice", "no"]) == 0
    assert stub.bodies[0]["structured_outputs"] == {"choice": ["yes", "no"]}
