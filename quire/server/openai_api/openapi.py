"""The OpenAPI document, made from the table of routes and the shapes of their bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from quire.server.openai_api.responses import AnthropicError, ErrorBody
from quire.server.route import Route
from quire.version import __version__

_REFERENCE = "#/components/schemas/{model}"
_ERRORS = {
    "400": "the request cannot be served as asked; `error.param` names the field",
    "401": "a valid API key is needed",
    "404": "there is no such model or path",
    "408": "the body came too slowly",
    "413": "the body is too large",
    "415": "the body is not application/json",
    "429": "too many requests wait; come back after Retry-After seconds",
    "500": "the engine failed",
    "503": "the server is closing, or the engine is being started anew",
    "504": "the request took longer than it may",
}


def document(routes: Sequence[Route], needs_key: bool) -> dict[str, Any]:
    models: set[type[BaseModel]] = {ErrorBody, AnthropicError}
    for route in routes:
        models.update(model for model in (route.takes, route.gives) if model is not None)
    ordered = sorted(models, key=lambda model: model.__name__)
    _, schemas = models_json_schema([(model, "validation") for model in ordered], ref_template=_REFERENCE)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Quire", "version": __version__,
                 "description": "The OpenAI API and Anthropic's Messages API, served by Quire. Fields marked Quire are "
                                "its own."},
        "paths": {path: {route.method.lower(): _operation(route, needs_key) for route in routes if route.path == path}
                  for path in dict.fromkeys(route.path for route in routes)},
        "components": {"schemas": schemas["$defs"],
                       "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, needs_key: bool) -> dict[str, Any]:
    content: dict[str, Any] = {route.media: {"schema": _schema(route)}}
    if route.streams:
        content["text/event-stream"] = {}  # chunks, as OpenAI defines them; the last event is [DONE]
    answers: dict[str, Any] = {"200": {"description": "what was asked for", "content": content}}
    for status in _possible(route, needs_key):
        shape = "ErrorBody" if route.error_body is None else "AnthropicError"
        answers[status] = {"description": _ERRORS[status],
                           "content": {"application/json": {"schema": {"$ref": f"#/components/schemas/{shape}"}}}}
    operation: dict[str, Any] = {"summary": route.summary, "operationId": route.handler.__name__.strip("_"),
                                 "responses": answers}
    if needs_key and not route.open:
        operation["security"] = [{"key": []}]
    if route.takes is not None:
        reference = {"$ref": f"#/components/schemas/{route.takes.__name__}"}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": reference}}}
    if "{" in route.path:
        name = route.path[route.path.index("{") + 1:-1]
        operation["parameters"] = [{"name": name, "in": "path", "required": True,
                                    "schema": {"type": "string", "minLength": 1}}]
    return operation


def _schema(route: Route) -> dict[str, Any]:
    if route.gives is None:
        return {"type": "object"} if route.media == "application/json" else {"type": "string"}
    return {"$ref": f"#/components/schemas/{route.gives.__name__}"}


def _possible(route: Route, needs_key: bool) -> list[str]:
    found = ["401"] if needs_key and not route.open else []
    if route.takes is not None:
        found += ["400", "404", "408", "413", "415"]
    if "{" in route.path:
        found.append("404")
    if route.works:
        found += ["429", "500", "503", "504"]
    return sorted({*found, *route.also})
