"""What `tools` and `tool_choice` ask for: what the prompt shows, what the grammar allows, who parses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from quire.config import ServerConfig
from quire.server.api_error import refusal
from quire.server.chat_protocol import ChatBody, NamedTool, Tool
from quire.server.parameters import check_size
from quire.server.tool_parser import FORCED_FORMAT, FORMATS, ForcedCall, ToolParser


@dataclass(frozen=True, slots=True)
class ToolUse:
    """How one request uses tools."""

    shown: list[dict[str, Any]] | None = None
    """The tools as the chat template gets them."""
    constraint: tuple[str, dict[str, Any]] | None = None
    mode: str = "none"
    """none, auto, required or named."""
    format: str = "hermes"
    names: tuple[str, ...] = field(default=())
    several: bool = True
    """More than one call may be made."""

    def parser(self) -> ToolParser | ForcedCall | None:
        """A fresh one; each choice needs its own."""
        mistral = self.format == "mistral"
        if self.mode == "named":
            return ForcedCall(self.names[0], mistral)
        if self.mode == "required":
            return ToolParser(FORCED_FORMAT, self.names, mistral_ids=mistral)
        if self.mode == "none":
            return None
        return ToolParser(FORMATS[self.format], self.names, mistral_ids=mistral, most=None if self.several else 1)

    @property
    def opening(self) -> str:
        """The start of the call that is forced, as the model would have written it: the arguments come more easily."""
        return FORMATS[self.format].forced % self.names[0] if self.mode == "named" else ""

    @property
    def keeps_special_tokens(self) -> bool:
        return self.mode == "auto" and FORMATS[self.format].special


def tool_use(body: ChatBody, form: str, config: ServerConfig) -> ToolUse:
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
    check_size("tools", [tool.function.parameters for tool in tools], config)
    shown = [tool.model_dump(exclude_none=True) for tool in tools]
    if isinstance(choice, NamedTool):
        if choice.function.name not in names:
            raise refusal("tool_choice", f"names the function {choice.function.name!r}, which is not in tools")
        chosen = tools[names.index(choice.function.name)]
        return ToolUse(shown, ("tools", {"json": _parameters(chosen)}), "named", form, (chosen.function.name,))
    if choice == "required":
        schema = _calls_schema(tools, several=body.parallel_tool_calls is not False)
        return ToolUse(shown, ("tools", {"json": schema}), "required", form, names)
    return ToolUse(shown, None, "auto", form, names, several=body.parallel_tool_calls is not False)


def _parameters(tool: Tool) -> dict[str, Any]:
    """The schema of the arguments, which are an object whatever it says or leaves out."""
    return {"type": "object", **(tool.function.parameters or {})}


def _calls_schema(tools: list[Tool], several: bool) -> dict[str, Any]:
    """An array of calls, each with the arguments of the function it names."""
    shared: dict[str, Any] = {}
    calls = []
    for place, tool in enumerate(tools):
        name = f"tool{place}"
        shared[name] = _moved(_parameters(tool), f"#/$defs/{name}")
        calls.append({
            "type": "object",
            "properties": {"name": {"type": "string", "enum": [tool.function.name]},
                           "arguments": {"$ref": f"#/$defs/{name}"}},
            "required": ["name", "arguments"],
            "additionalProperties": False,
        })
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    bounds = {"minItems": 1} if several else {"minItems": 1, "maxItems": 1}
    return {"type": "array", "items": items, **bounds, "$defs": shared}


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself hold when it stands at `root` of another."""
    if isinstance(schema, dict):
        return {key: _rooted(value, root) if key == "$ref" and isinstance(value, str) else _moved(value, root)
                for key, value in schema.items()}
    return [_moved(item, root) for item in schema] if isinstance(schema, list) else schema


def _rooted(reference: str, root: str) -> str:
    return root + reference[1:] if reference.startswith("#") else reference
