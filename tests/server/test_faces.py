"""Requests that a fuzzer found: each was a server error once."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.conftest import Served


@pytest.mark.parametrize(("path", "body"), [
    ("/v1/messages", {"max_tokens": 1, "messages": [
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}),
    ("/v1/messages/count_tokens", {"messages": [
        {"role": "assistant", "content": [{"type": "redacted_thinking", "data": ""}]}]}),
    ("/v1/responses", {"input": [{"type": "reasoning", "summary": []}]}),
    ("/v1/responses", {"input": "x", "top_logprobs": False}),
    ("/v1/responses", {"input": "x", "tools": [{"type": "namespace", "name": "n" * 100, "tools": [
        {"type": "function", "name": "f" * 100}]}]}),
    ("/v1/responses", {"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": "["}]}),
])
def test_what_a_fuzzer_found_is_refused(server: Served, path: str, body: Any) -> None:
    found = server.http.post(path, json=body)
    assert found.status_code == 400 and found.json()["error"]["message"], found.text
