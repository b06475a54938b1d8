"""Every route: its path, what it takes, what it answers, and the function that does it."""

from __future__ import annotations

import asyncio
from importlib import resources
from typing import Any

from quire.server.answer import encode, send_json
from quire.server.api_error import ApiError, refusal
from quire.server.body import read_body
from quire.server.cluster.disaggregation import kv_bootstrap
from quire.server.cluster.kv_events import kv_events
from quire.server.conversation.chat_prompt import render
from quire.server.generation import until_disconnect
from quire.server.long_texts.text_process import do_text_job
from quire.server.messages_api.answer import count_tokens, error_body, message
from quire.server.messages_api.protocol import CountBody, MessagesBody
from quire.server.openai_api import responses
from quire.server.openai_api.chat import chat_completion
from quire.server.openai_api.chat_protocol import ChatBody, TokenizeBody
from quire.server.openai_api.completions import completion
from quire.server.openai_api.model_card import model_card
from quire.server.openai_api.protocol import CompletionBody, DetokenizeBody
from quire.server.responses_api.answer import response
from quire.server.responses_api.protocol import ResponsesBody
from quire.server.route import Route
from quire.server.service import LONG_TEXT, RequestRecord, Service
from quire.version import __version__

_FRESH_SECONDS = 0.25
_METRICS_TYPE = [(b"content-type", b"text/plain; version=0.0.4; charset=utf-8")]
_HTML = [(b"content-type", b"text/html; charset=utf-8"),
         (b"content-security-policy", b"default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
                                      b"connect-src 'self'; frame-ancestors 'none'")]


async def _completions(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    body = await read_body(scope, receive, CompletionBody, service.config)
    async with until_disconnect(receive, lambda: False):
        answer = await completion(service, record, body)
    await answer(scope, receive, send)


async def _chat(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    body = await read_body(scope, receive, ChatBody, service.config)
    async with until_disconnect(receive, lambda: False):
        answer = await chat_completion(service, record, body)
    await answer(scope, receive, send)


async def _responses(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    body = await read_body(scope, receive, ResponsesBody, service.config)
    async with until_disconnect(receive, lambda: False):
        answer = await response(service, record, body)
    await answer(scope, receive, send)


def _response_name(path: str) -> str:
    name = path.removeprefix("/v1/responses/")
    if "/" in name:  # what OpenAI has below a response
        raise ApiError(404, f"there is no {path:.200} on this server; GET /docs lists what there is",
                       code="unknown_path")
    return name


async def _stored(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    name = _response_name(scope["path"])
    await send_json(send, 200, encode(service.responses.get(record.tenant, name, "response_id").body))


async def _forget(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    name = _response_name(scope["path"])
    service.responses.remove(record.tenant, name)
    await send_json(send, 200, encode({"id": name, "object": "response.deleted", "deleted": True}))


async def _messages(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    body = await read_body(scope, receive, MessagesBody, service.config)
    async with until_disconnect(receive, lambda: False):
        answer = await message(service, record, body)
    await answer(scope, receive, send)


async def _count_tokens(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    body = await read_body(scope, receive, CountBody, service.config)
    async with until_disconnect(receive, lambda: False):
        count = await count_tokens(service, record.tenant, body)
    await send_json(send, 200, encode({"input_tokens": count}))


async def _models(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    name = service.model_name
    await send_json(send, 200, encode({"object": "list", "data": [model_card(service)], "has_more": False,
                                       "first_id": name, "last_id": name}))


async def _model(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    service.check_model(scope["path"].removeprefix("/v1/models/"))
    await send_json(send, 200, encode(model_card(service)))


async def _tokenize(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    body = await read_body(scope, receive, TokenizeBody, service.config)
    service.check_model(body.model)
    tokenizer = service.needs_tokenizer("prompt")
    if (body.prompt is None) == (body.messages is None):
        raise refusal("prompt", "or messages is wanted, and not both")
    if body.prompt is not None:
        for name in ("tools", "add_generation_prompt"):
            if getattr(body, name) is not None:
                raise refusal(name, "needs messages")
    job: dict[str, Any] = {"do": "tokenize", "special": bool(body.add_special_tokens),
                           "strings": bool(body.return_token_strs), "max_model_len": service.engine.max_model_len}
    async with until_disconnect(receive, lambda: False):
        if body.prompt is not None:
            job |= {"text": body.prompt, "special": body.add_special_tokens is not False}
        else:
            job["text"] = await asyncio.to_thread(_rendered, service, body)
        if len(job["text"]) < LONG_TEXT:
            found = do_text_job(tokenizer, job)
        elif service.text_work is None:
            found = await asyncio.to_thread(do_text_job, tokenizer, job)
        else:
            found = await service.text_work.do(record.tenant, job)
    await send_json(send, 200, found)


def _rendered(service: Service, body: TokenizeBody) -> str:
    """The prompt of a conversation, as a chat completion would make it."""
    shown = [tool.model_dump(exclude_none=True) for tool in body.tools] if body.tools else None
    return render(service.needs_tokenizer("messages"), body.messages or [], tools=shown, variables=None,
                  add_generation_prompt=body.add_generation_prompt is not False)


async def _detokenize(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    body = await read_body(scope, receive, DetokenizeBody, service.config)
    service.check_model(body.model)
    tokenizer = service.needs_tokenizer("tokens")
    highest = max(body.tokens, default=0)
    if highest >= tokenizer.vocab_size:
        raise refusal("tokens", f"holds {highest}; the vocabulary ends at {tokenizer.vocab_size - 1}")
    async with until_disconnect(receive, lambda: False):
        text = await service.decode(body.tokens, bool(body.skip_special_tokens), record.tenant)
    await send_json(send, 200, encode({"prompt": text}))


async def _health(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    """True liveness: the engine's own process answers for it, by its steps."""
    if service.draining:
        raise ApiError(503, "the server is closing", code="closing", retry_after=1.0)
    try:
        async with asyncio.timeout(5.0):
            await service.engine.check_health()
    except Exception as error:
        reason = str(error) or "the engine does not answer"
        raise ApiError(503, reason, code="engine_dead", retry_after=1.0) from error
    await send_json(send, 200, encode({"status": "ok"}))


async def _metrics(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    try:
        await service.engine.check_health()
        engine = await _engine_metrics(service)
    except Exception:
        engine = None  # said by quire:engine_up; the server's own counters are there all the same
    await send_json(send, 200, service.metrics.render(engine), _METRICS_TYPE)


async def _engine_metrics(service: Service) -> dict[str, Any]:
    """As of now; where a long step keeps the engine from answering, as of its last report."""
    try:
        async with asyncio.timeout(_FRESH_SECONDS):
            found: dict[str, Any] = await service.engine.metrics(refresh=True)
    except TimeoutError:
        found = await service.engine.metrics()
    return found


async def _version(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    await send_json(send, 200, encode({"version": __version__}))


async def _openapi(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    from quire.server.openai_api.openapi import document

    if service.document is None:
        service.document = encode(document(ROUTES, needs_key=len(service.keys) > 0))
    await send_json(send, 200, service.document)


async def _docs(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    page = resources.files("quire.server").joinpath("docs_page.html").read_bytes()
    await send_json(send, 200, page, _HTML)


ROUTES: tuple[Route, ...] = (
    Route("POST", "/v1/chat/completions", "Answer a conversation", _chat, ChatBody, responses.ChatCompletion,
          works=True, streams=True),
    Route("POST", "/v1/completions", "Continue texts", _completions, CompletionBody, responses.Completion, works=True,
          streams=True),
    Route("POST", "/v1/responses", "Answer a conversation, as agents of OpenAI's ask", _responses, ResponsesBody,
          responses.Response, works=True, streams=True),
    Route("GET", "/v1/responses/{response}", "A response that was stored", _stored, None, responses.Response),
    Route("DELETE", "/v1/responses/{response}", "Forget a response", _forget, None, responses.Deleted),
    Route("POST", "/v1/messages", "Answer a conversation, as Anthropic's clients ask", _messages, MessagesBody,
          responses.AnthropicMessage, works=True, streams=True, error_body=error_body),
    Route("POST", "/v1/messages/count_tokens", "The tokens of a conversation", _count_tokens, CountBody,
          responses.CountedTokens, error_body=error_body),
    Route("GET", "/v1/models", "The served model, as a list", _models, None, responses.ModelList),
    Route("GET", "/v1/models/{model}", "The served model", _model, None, responses.ModelCard),
    Route("POST", "/tokenize", "From text or messages to tokens", _tokenize, TokenizeBody, responses.Tokens),
    Route("POST", "/detokenize", "From tokens to text", _detokenize, DetokenizeBody, responses.Detokenized),
    Route("GET", "/v1/kv/events", "Which prefixes the engine holds, and each change", kv_events,
          media="text/event-stream", also=("400", "401", "404", "429")),
    Route("GET", "/health", "200 while the engine makes steps, 503 when it is dead", _health, None, responses.Health,
          open=True, also=("503",)),
    Route("GET", "/v1/kv/bootstrap", "Where other engines reach this one", kv_bootstrap, None, responses.Bootstrap,
          open=True, also=("400", "401", "404", "429")),
    Route("GET", "/metrics", "Prometheus metrics", _metrics, media="text/plain"),
    Route("GET", "/version", "Quire's version", _version, None, responses.Version),
    Route("GET", "/openapi.json", "This document", _openapi),
    Route("GET", "/docs", "This document, to read", _docs, media="text/html"),
)
