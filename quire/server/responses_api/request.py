"""From a request to /v1/responses to the chat that it means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from quire.server.api_error import refusal
from quire.server.conversation.chat_prompt import knows
from quire.server.conversation.face import Turns
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
from quire.server.openai_api.protocol import (
    JsonSchemaFormat,
    ResponseFormat,
    ResponseFormatJsonObject,
    ResponseFormatJsonSchema,
)
from quire.server.responses_api.protocol import (
    ChosenFunction,
    ContentPart,
    FunctionCallItem,
    FunctionOutputItem,
    FunctionTool,
    InputItem,
    InputText,
    JsonObjectFormat,
    MessageItem,
    NamespaceTool,
    ReasoningItem,
    ResponsesBody,
    SchemaFormat,
)

WORDS = {"messages": "input", "max_tokens": "max_output_tokens", "response_format": "text.format",
         "reasoning_effort": "reasoning.effort"}
_SAME = ("model", "temperature", "top_p", "stream", "parallel_tool_calls", "seed", "stop", "top_k", "min_p", "priority",
         "cache_salt", "timeout", "chat_template_kwargs")


def items_of(body: ResponsesBody) -> list[InputItem]:
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=body.input)]
    return list(body.input)


def chat_of(body: ResponsesBody, items: Sequence[InputItem], template: str | None) -> ChatBody:
    """`items`: those of earlier responses, and the request's own."""
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME if getattr(body, name) is not None}
    effort = None if body.reasoning is None else body.reasoning.effort
    if effort is not None and knows(template, "reasoning_effort"):
        fields["reasoning_effort"] = effort
    tools = tools_of(body)
    if tools:
        fields["tools"] = tools
    choice = body.tool_choice
    if tools or choice in ("required",) or isinstance(choice, ChosenFunction):
        fields["tool_choice"] = (NamedTool(type="function", function=NamedFunction(name=choice.name))
                                 if isinstance(choice, ChosenFunction) else choice)
    return ChatBody(messages=messages_of(body.instructions, items), max_completion_tokens=body.max_output_tokens,
                    response_format=_format(body), **fields)


def messages_of(instructions: str | None, items: Sequence[InputItem]) -> list[Message]:
    turns = Turns()
    if instructions:
        turns.add(SystemMessage(role="system", content=instructions))
    for item in items:
        if isinstance(item, FunctionCallItem):
            turns.calls(item.call_id, full_name(item.namespace, item.name), item.arguments)
        elif isinstance(item, FunctionOutputItem):
            turns.add(ToolMessage(role="tool", tool_call_id=item.call_id, content=_text(item.output)))
        elif isinstance(item, ReasoningItem):
            turns.thinks("".join(part.text for part in item.content or []))
        elif item.role == "assistant":
            turns.says(_text(item.content))
        elif item.role == "user":
            turns.add(UserMessage(role="user", content=_text(item.content)))
        else:
            turns.add(SystemMessage(role="system", content=_text(item.content)))
    turns.end()
    if not turns.messages:
        raise refusal("input", "has no message")
    return turns.messages


def full_name(namespace: str | None, name: str) -> str:
    return name if namespace is None else f"{namespace}.{name}"


def tools_of(body: ResponsesBody) -> list[Tool]:
    """The functions among the tools, those of namespaces under their full names."""
    found: list[Tool] = []
    for tool in body.tools or []:
        if isinstance(tool, FunctionTool):
            found.append(_tool(tool, tool.name))
        elif isinstance(tool, NamespaceTool):
            found += [_tool(each, full_name(tool.name, each.name)) for each in tool.tools]
    return found


def namespaces_of(body: ResponsesBody) -> dict[str, str]:
    """By full name of a tool: its namespace."""
    return {full_name(tool.name, each.name): tool.name for tool in body.tools or [] if isinstance(tool, NamespaceTool)
            for each in tool.tools}


def _tool(tool: FunctionTool, name: str) -> Tool:
    return Tool(type="function", function=FunctionDefinition(name=name, description=tool.description,
                                                             parameters=tool.parameters, strict=tool.strict))


def _format(body: ResponsesBody) -> ResponseFormat | None:
    wanted = None if body.text is None else body.text.format
    if isinstance(wanted, JsonObjectFormat):
        return ResponseFormatJsonObject(type="json_object")
    if isinstance(wanted, SchemaFormat):
        schema = JsonSchemaFormat(name=wanted.name, schema=wanted.schema_, description=None, strict=wanted.strict)
        return ResponseFormatJsonSchema(type="json_schema", json_schema=schema)
    return None


def _text(content: str | list[ContentPart]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.text if isinstance(part, InputText) else part.refusal for part in content)
