"""The body of a request to /v1/messages. What is not declared is refused by name; "no effect" means just that."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from quire.server.conversation.face import never
from quire.server.openai_api.chat_protocol import CalledName, FunctionName
from quire.server.openai_api.protocol import JsonObject, Strict, Text

Ignored = Field(None, description="no effect")


class Block(Strict):
    cache_control: JsonObject | None = Field(None, description="no effect: prefixes are found by their content")


class TextBlock(Block):
    type: Literal["text"]
    text: Text
    citations: list[Any] | None = Ignored


class ToolUseBlock(Block):
    type: Literal["tool_use"]
    id: str
    name: CalledName
    input: JsonObject
    caller: JsonObject | None = Ignored


class ToolResultBlock(Block):
    type: Literal["tool_result"]
    tool_use_id: str
    content: Text | list[TextBlock] | None = None
    is_error: bool | None = Field(None, description="an error is told to the model as such")


class ThinkingBlock(Block):
    type: Literal["thinking"]
    thinking: Text
    signature: str | None = Ignored


class RedactedThinkingBlock(Block):
    """Has no effect: only its maker can decrypt it."""

    type: Literal["redacted_thinking"]
    data: str


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | ToolUseBlock | ThinkingBlock | RedactedThinkingBlock,
                           Field(discriminator="type")]


class UserTurn(Strict):
    role: Literal["user"]
    content: Text | list[UserBlock]


class AssistantTurn(Strict):
    role: Literal["assistant"]
    content: Text | list[AssistantBlock]


class SystemTurn(Strict):
    """Instructions in the middle of a conversation."""

    role: Literal["system"]
    content: Text | list[TextBlock]


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class ToolParam(Block):
    type: Literal["custom"] | None = None
    name: FunctionName
    description: str | None = None
    input_schema: JsonObject
    strict: bool | None = Field(None, description="no effect: forced calls always follow the schema")
    eager_input_streaming: bool | None = Ignored
    defer_loading: bool | None = Ignored
    input_examples: list[JsonObject] | None = Ignored
    allowed_callers: list[str] | None = Ignored


class ToolChoice(Strict):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = Field(None, description="with type tool")
    disable_parallel_tool_use: bool | None = None


class Thinking(Strict):
    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = Field(None, ge=1, description="no effect")
    display: str | None = Ignored


class JsonOutput(Strict):
    type: Literal["json_schema"]
    schema_: JsonObject = Field(alias="schema")


class OutputConfig(Strict):
    effort: str | None = Field(None, description="for models whose chat template knows reasoning_effort; no effect "
                                                 "otherwise")
    format: JsonOutput | None = None
    task_budget: JsonObject | None = Ignored


class CountBody(Strict):
    """A conversation whose tokens are counted."""

    model: str | None = Field(None, description="the served model; may be left out", max_length=1024)
    messages: list[Turn] = Field(min_length=1, max_length=65536)
    system: Text | list[TextBlock] | None = None
    tools: list[ToolParam] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = Field(None, description="enabled or adaptive: thoughts come as thinking blocks; "
                                                        "otherwise they are left out")
    output_config: OutputConfig | None = None
    cache_control: JsonObject | None = Ignored
    context_management: JsonObject | None = Ignored
    betas: list[str] | None = Ignored
    mcp_servers: Annotated[list[JsonObject], AfterValidator(never)] | None = Field(None, description="only empty")


class MessagesBody(CountBody):
    max_tokens: int = Field(ge=1, lt=1 << 31)
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_k: int | None = Field(None, ge=-1, lt=1 << 31)
    top_p: float | None = Field(None, ge=0, le=1)
    metadata: JsonObject | None = Ignored
    service_tier: str | None = Ignored
    speed: str | None = Ignored
    inference_geo: str | None = Ignored
    diagnostics: JsonObject | None = Ignored
    container: None = None
    # Quire's own.
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63, description="Quire")
    min_p: float | None = Field(None, ge=0, le=1, description="Quire")
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31, description="Quire")
    cache_salt: str | None = Field(None, min_length=1, max_length=1024, description="Quire")
    timeout: float | None = Field(None, gt=0, description="Quire")
    chat_template_kwargs: JsonObject | None = Field(None, description="Quire: variables of the chat template")
