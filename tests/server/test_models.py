"""/v1/models tells the limits and capabilities of the model, to OpenAI's client and to Anthropic's."""

from __future__ import annotations

import anthropic

from tests.server.conftest import Serve, Served


def test_limits_and_capabilities_are_told(server: Served) -> None:
    (card,) = server.http.get("/v1/models").json()["data"]
    assert card == server.http.get("/v1/models/scripted").json()
    assert card["limits"]["max_model_len"] == card["max_model_len"] == 4096 and card["limits"]["max_n"] == 16
    can = card["capabilities"]
    assert can["chat"] and can["tools"] and can["structured_outputs"] and not can["reasoning"] and not can["images"]
    assert (card["tool_call_parser"], card["reasoning_parser"]) == ("hermes", "none")


def test_parsers_are_told_by_the_template_or_by_name(serve: Serve) -> None:
    (card,) = serve(template="{{ tools }} [TOOL_CALLS] [/THINK]").http.get("/v1/models").json()["data"]
    assert (card["tool_call_parser"], card["reasoning_parser"]) == ("mistral", "mistral")
    (card,) = serve(tool_call_parser="kimi_k2", reasoning_parser="think").http.get("/v1/models").json()["data"]
    assert (card["tool_call_parser"], card["reasoning_parser"]) == ("kimi_k2", "think")
    assert card["capabilities"]["reasoning"]


def test_both_clients_list_the_model(server: Served) -> None:
    assert [model.id for model in server.openai.models.list()] == ["scripted"]
    client = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)
    (model,) = client.models.list()
    assert model.id == "scripted" and model.display_name == "scripted" and client.models.retrieve("scripted").id
