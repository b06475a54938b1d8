"""What /v1/models says of the served model: its limits, and what it can do."""

from __future__ import annotations

import importlib.util
from datetime import UTC, datetime
from typing import Any

from quire.options import parse_bytes
from quire.server.service import Service


def model_card(service: Service) -> dict[str, Any]:
    """OpenAI's fields, Anthropic's beside them, and ours: `limits`, `capabilities` and the parsers in use."""
    config, longest = service.config, service.engine.max_model_len
    created = datetime.fromtimestamp(service.created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": service.model_name, "object": "model", "created": service.created, "owned_by": "quire",
        "max_model_len": longest,
        "type": "model", "display_name": service.model_name, "created_at": created,
        "max_input_tokens": longest, "max_tokens": longest,
        "limits": {"max_model_len": longest, "max_prompts": config.max_prompts, "max_n": config.max_n,
                   "max_logprobs": config.max_logprobs, "max_stops": config.max_stops, "max_tools": config.max_tools,
                   "max_body_size": parse_bytes(config.max_body_size, "max_body_size"),
                   "max_schema_size": parse_bytes(config.max_schema_size, "max_schema_size")},
        "capabilities": _capabilities(service),
        "tool_call_parser": service.call_format, "reasoning_parser": service.thought_format,
    }


def _capabilities(service: Service) -> dict[str, bool]:
    """Of this model on this server. Any chat model is told of tools: in its template's words, or in the system's."""
    chats = service.tokenizer is not None and service.tokenizer.chat_template is not None
    return {"completions": True, "chat": chats, "responses": chats, "messages": chats, "tools": chats,
            "reasoning": service.thought_format != "none",
            "structured_outputs": service.tokenizer is not None and importlib.util.find_spec("xgrammar") is not None,
            "logprobs": True, "token_ids": True, "images": False, "audio": False, "embeddings": False}
