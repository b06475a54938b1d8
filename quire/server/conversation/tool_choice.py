"""What `tools` and `tool_choice` ask for: what the prompt shows, and what must be called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from quire.server.api_error import refusal
from quire.server.openai_api.chat_protocol import ChatBody, NamedTool, Tool
from quire.server.parsers.grammar import ToolShape
from quire.server_config import ServerConfig


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools."""

    shown: list[dict[str, Any]] | None = None
    """The tools as the chat template gets them."""
    mode: str = "none"
    """none, auto, required or named."""
    shapes: tuple[ToolShape, ...] = ()
    """Those that may be called."""
    several: bool = True
    """More than one call may be made."""

    @property
    def forced(self) -> bool:
        return self.mode in ("required", "named")


def tool_use(body: ChatBody, config: ServerConfig) -> ToolUse:
    tools, choice = body.tools or [], body.tool_choice
    if not tools:
        if body.tools is not None:
            raise refusal("tools", "is empty: give at least one tool, or leave it out")
        if choice not in (None, "none"):
            raise refusal("tool_choice", "needs at least one tool in tools")
        return ToolUse()
    if len(tools) > config.max_tools:
        raise refusal("tools", f"holds {len(tools)} tools; this server takes at most {config.max_tools}")
    names = tuple(tool.function.name for tool in tools)
    if len(set(names)) < len(names):
        raise refusal("tools", "holds two functions of one name")
    for place, tool in enumerate(tools):
        kind = (tool.function.parameters or {}).get("type", "object")
        if kind != "object":
            raise refusal(f"tools[{place}].function.parameters",
                          f"must be the schema of an object, not of {kind!r:.80}")
    if choice == "none":
        return ToolUse()
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    shapes = tuple(map(_shape, tools))
    several = body.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise refusal("tool_choice", f"names the function {choice.function.name!r}, which is not in tools")
        return ToolUse(shown, "named", (shapes[names.index(choice.function.name)],), several=False)
    return ToolUse(shown, "required" if choice == "required" else "auto", shapes, several)


def _shape(tool: Tool) -> ToolShape:
    """The arguments are an object, whatever the schema says or leaves out."""
    return ToolShape(tool.function.name, {"type": "object", **(tool.function.parameters or {})})
