"""From a request to /v1/messages to the chat that it means."""

from __future__ import annotations

import json
from typing import Any

from quire.server.api_error import refusal
from quire.server.conversation.chat_prompt import knows
from quire.server.conversation.face import Turns
from quire.server.messages_api.protocol import (
    AssistantTurn,
    CountBody,
    MessagesBody,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
    UserTurn,
)
from quire.server.openai_api.chat_protocol import (
    ChatBody,
    FunctionDefinition,
    Message,
    NamedFunction,
    NamedTool,
    SystemMessage,
    Tool,
    ToolMessage,
    UserMessage,
)
from quire.server.openai_api.protocol import JsonSchemaFormat, ResponseFormatJsonSchema

WORDS = {"stop": "stop_sequences", "response_format": "output_config.format",
         "reasoning_effort": "output_config.effort"}
_SAME = ("model", "temperature", "top_p", "stream", "seed", "min_p", "priority", "cache_salt", "timeout")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


def chat_of(body: CountBody, template: str | None) -> ChatBody:
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name, None) is not None}
    if body.tools:
        fields["tools"] = [Tool(type="function", function=FunctionDefinition(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict))
            for tool in body.tools]
    if body.tool_choice is not None:
        fields["tool_choice"] = _choice(body)
        fields["parallel_tool_calls"] = not body.tool_choice.disable_parallel_tool_use
    fields.update(_thinking(body, template))
    if isinstance(body, MessagesBody):
        if isinstance(body.messages[-1], AssistantTurn):
            raise refusal("messages", "end with the assistant's: this server does not continue what it is said to have "
                                      "said")
        fields.update(max_completion_tokens=body.max_tokens, stop=body.stop_sequences or None,
                      top_k=body.top_k or None)
    if body.output_config is not None and body.output_config.format is not None:
        given = body.output_config.format.schema_
        schema = JsonSchemaFormat(name="output", schema=given, description=None, strict=None)
        fields["response_format"] = ResponseFormatJsonSchema(type="json_schema", json_schema=schema)
    return ChatBody(messages=messages_of(body), **fields)


def _choice(body: CountBody) -> Any:
    choice = body.tool_choice
    assert choice is not None
    if choice.type == "tool":
        if choice.name is None:
            raise refusal("tool_choice.name", "is missing: type tool names one")
        return NamedTool(type="function", function=NamedFunction(name=choice.name))
    return _CHOICES[choice.type] if body.tools or choice.type == "any" else None


def _thinking(body: CountBody, template: str | None) -> dict[str, Any]:
    """What of the wishes about thinking the model's chat template knows."""
    found: dict[str, Any] = {}
    variables = dict(getattr(body, "chat_template_kwargs", None) or {})
    if body.thinking is not None and knows(template, "enable_thinking"):
        variables.setdefault("enable_thinking", body.thinking.type != "disabled")
    if variables:
        found["chat_template_kwargs"] = variables
    effort = None if body.output_config is None else body.output_config.effort
    if effort in _EFFORTS and knows(template, "reasoning_effort"):
        found["reasoning_effort"] = effort
    return found


def messages_of(body: CountBody) -> list[Message]:
    turns = Turns()
    system = _text(body.system)
    if system:
        turns.add(SystemMessage(role="system", content=system))
    for place, turn in enumerate(body.messages):
        if isinstance(turn, UserTurn):
            _user(turns, turn, place)
        elif isinstance(turn, AssistantTurn):
            _assistant(turns, turn)
        else:
            turns.add(SystemMessage(role="system", content=_text(turn.content)))
    turns.end()
    if not turns.messages:
        raise refusal("messages", "say nothing that could be answered")
    return turns.messages


def _user(turns: Turns, turn: UserTurn, place: int) -> None:
    """Results of calls are messages of their own, before what the user says."""
    if isinstance(turn.content, str):
        turns.add(UserMessage(role="user", content=turn.content))
        return
    if not turn.content:
        raise refusal(f"messages[{place}].content", "is empty")
    for block in turn.content:
        if isinstance(block, ToolResultBlock):
            text = _text(block.content)
            turns.add(ToolMessage(role="tool", tool_call_id=block.tool_use_id,
                                  content=f"Error: {text}" if block.is_error else text))
    texts = [block.text for block in turn.content if isinstance(block, TextBlock)]
    if texts:
        turns.add(UserMessage(role="user", content="\n".join(texts)))


def _assistant(turns: Turns, turn: AssistantTurn) -> None:
    if isinstance(turn.content, str):
        turns.says(turn.content)
        return
    for block in turn.content:
        if isinstance(block, TextBlock):
            turns.says(block.text)
        elif isinstance(block, ThinkingBlock):
            turns.thinks(block.thinking)
        elif isinstance(block, ToolUseBlock):
            turns.calls(block.id, block.name, json.dumps(block.input, ensure_ascii=False))


def _text(content: str | list[TextBlock] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(block.text for block in content)
