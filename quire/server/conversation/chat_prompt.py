"""From the messages of a chat request to the text that the model continues."""

from __future__ import annotations

import contextlib
import json
from typing import Any

from quire.errors import InvalidRequestError
from quire.server.api_error import ApiError, refusal
from quire.server.body import MAX_ELEMENTS, most_weight, weights
from quire.server.openai_api.chat_protocol import AssistantMessage, Message, TextPart, ToolMessage
from quire.server.parsers.pieces import json_value
from quire.tokenizer.tokenizer import Tokenizer

_RESERVED = frozenset({"messages", "tools", "documents", "chat_template", "add_generation_prompt", "bos_token",
                       "eos_token", "unk_token", "pad_token", "self"})
_MOST_IN_ARGUMENTS = MAX_ELEMENTS // 2
_TOOLS_PROMPT = """You may call functions to help with the user's request. Here they are, one per line, as JSON:
<tools>
{tools}
</tools>
To call a function, answer with a JSON object with its name and arguments between tags:
<tool_call>
{{"name": <function name>, "arguments": <arguments as a JSON object>}}
</tool_call>"""


def knows(template: str | None, word: str) -> bool:
    return template is not None and word in template


def render(tokenizer: Tokenizer, messages: list[Message], *, tools: list[dict[str, Any]] | None,
           variables: dict[str, Any] | None, add_generation_prompt: bool) -> str:
    """The prompt. Templates that know no tools get them as part of the system message."""
    for name in variables or {}:
        if name in _RESERVED or not name.isidentifier() or name.startswith("_"):
            raise refusal("chat_template_kwargs", f"may not hold {name!r:.80}")
    _check_arguments(messages)
    plain = [_plain(message, place) for place, message in enumerate(messages)]
    if tokenizer.tool_template is None:
        plain, tools = _without_tools(plain, tools), None

    def apply(plain: list[dict[str, Any]]) -> str:
        return tokenizer.apply_chat_template(plain, tools=tools, add_generation_prompt=add_generation_prompt,
                                             **(variables or {}))

    try:
        return apply(plain)
    except InvalidRequestError as error:
        if _wants_text(error) and any("tool_calls" in message for message in plain):
            with contextlib.suppress(InvalidRequestError):
                return apply([_with_text_arguments(message) for message in plain])
        raise ApiError(400, str(error), param=error.field or "messages") from error


def _wants_text(error: InvalidRequestError) -> bool:
    """Has the template put arguments between texts? Some families' templates take them as JSON text."""
    return "can only concatenate str" in str(error)


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if "tool_calls" not in message:
        return message
    return {**message, "tool_calls": [
        {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"],
                                                                         ensure_ascii=False)}}
        for call in message["tool_calls"]]}


def _plain(message: Message, place: int) -> dict[str, Any]:
    """The message as templates know it: text, arguments as objects, no fields that are not there."""
    found: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text if isinstance(part, TextPart) else part.refusal for part in content)
    found["content"] = content if content is not None else ""
    if message.name is not None:
        found["name"] = message.name
    if isinstance(message, ToolMessage):
        found["tool_call_id"] = message.tool_call_id
    if isinstance(message, AssistantMessage):
        thoughts = message.reasoning_content if message.reasoning_content is not None else message.reasoning
        if thoughts is not None:
            found["reasoning_content"] = thoughts
        if message.tool_calls:
            found["tool_calls"] = [
                {"id": call.id, "type": "function",
                 "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
                for call in message.tool_calls]
        elif content is None:
            raise ApiError(400, f"messages[{place}] has neither content nor tool_calls",
                           param=f"messages[{place}].content")
    return found


def _check_arguments(messages: list[Message]) -> None:
    """Arguments of calls are JSON in a text, of which the check of the body knows nothing."""
    texts = [(place, call.function.arguments.encode("utf-8", "surrogatepass"))
             for place, message in enumerate(messages) if isinstance(message, AssistantMessage)
             for call in message.tool_calls or ()]
    if sum(most_weight(text) for _, text in texts) <= _MOST_IN_ARGUMENTS:
        return
    total = 0
    for place, text in texts:
        weight = 0
        for weight in weights(text):
            if total + weight > _MOST_IN_ARGUMENTS:
                raise ApiError(413, "the arguments of tool calls have too many elements: send less in one request",
                               param=f"messages[{place}].tool_calls", code="body_too_complex")
        total += weight


def _arguments(text: str) -> dict[str, Any]:
    """An object, as templates want it. A model sometimes writes none, and its conversation must be able to go on: what
    it wrote is then the one argument that the template sees."""
    try:
        value = json_value(text or "{}")
    except (ValueError, RecursionError):
        value = None
    return value if isinstance(value, dict) else {"arguments": text}


def _without_tools(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The same conversation in words that any template takes: calls and results become texts with tags."""
    found: list[dict[str, Any]] = []
    for message in messages:
        message = dict(message)
        calls = message.pop("tool_calls", None)
        if calls:
            texts = [f"<tool_call>\n{json.dumps(call['function'], ensure_ascii=False)}\n</tool_call>" for call in calls]
            message["content"] = "\n".join(filter(None, [message["content"], *texts]))
        if message["role"] == "tool":
            message = {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}
        found.append(message)
    if tools:
        lines = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
        text = _TOOLS_PROMPT.format(tools=lines)
        if found and found[0]["role"] == "system":
            found[0]["content"] = f"{found[0]['content']}\n\n{text}"
        else:
            found.insert(0, {"role": "system", "content": text})
    return found
