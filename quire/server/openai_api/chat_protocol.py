"""The body of a chat completion: messages, tools, formats."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from quire.server.openai_api.protocol import GenerationBody, JsonObject, PromptIds, ResponseFormat, Strict, Text

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]


CalledName = Annotated[str, Field(min_length=1)]
"""Of a call in an earlier turn: whatever the model wrote, who may have called what does not exist."""


class TextPart(Strict):
    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: JsonObject | None = Field(None, description="no effect")


class RefusalPart(Strict):
    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
Parts = Annotated[list[ContentPart], Field(min_length=1)]


class CalledFunction(Strict):
    name: CalledName
    arguments: str = Field(description="JSON")


class ToolCall(Strict):
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction
    index: int | None = Field(None, description="no effect")


class SystemMessage(Strict):
    role: Literal["system", "developer"]
    content: Text | Parts
    name: str | None = None


class UserMessage(Strict):
    role: Literal["user"]
    content: Text | Parts
    name: str | None = None


class AssistantMessage(Strict):
    role: Literal["assistant"]
    content: Text | Parts | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    reasoning_content: Text | None = Field(None, description="what the model thought; shown to its template")
    reasoning: Text | None = Field(None, description="the same under its other name")
    refusal: str | None = Field(None, description="no effect")
    annotations: list[Any] | None = Field(None, description="no effect")
    audio: None = None
    function_call: None = None


class ToolMessage(Strict):
    role: Literal["tool"]
    content: Text | Parts
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


class FunctionDefinition(Strict):
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = Field(None, description="no effect: forced calls always follow the schema")


class Tool(Strict):
    type: Literal["function"]
    function: FunctionDefinition


class NamedFunction(Strict):
    name: FunctionName


class NamedTool(Strict):
    type: Literal["function"]
    function: NamedFunction


class ChatBody(GenerationBody):
    messages: list[Message] | None = Field(None, min_length=1, max_length=65536)
    prompt_token_ids: PromptIds | None = Field(
        None, description="Quire: the prompt itself, in place of messages, which may then be left out")
    max_completion_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    best_of: int | None = Field(None, ge=1, description="Quire: draw this many and return the n likeliest")
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0)
    response_format: ResponseFormat | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="for models whose chat template knows it; refused otherwise")
    chat_template_kwargs: JsonObject | None = Field(None, description="Quire: variables of the chat template")
    add_generation_prompt: bool | None = Field(None, description="Quire: default true")
    # No effect on the output.
    prediction: JsonObject | None = Field(None, description="no effect")
    # A text model cannot.
    modalities: list[Literal["text"]] | None = Field(None, description='only ["text"]')
    verbosity: Literal["medium"] | None = Field(None, description="only medium, the default")
    audio: None = None
    web_search_options: None = None
    functions: None = Field(None, description="not supported: use tools")
    function_call: None = Field(None, description="not supported: use tool_choice")


class TokenizeBody(Strict):
    """A text, or a conversation as the chat template renders it."""

    model: str | None = Field(None, max_length=1024)
    prompt: Text | None = None
    messages: list[Message] | None = Field(None, max_length=65536)
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = Field(None, description="default: true for a prompt, false for messages")
    add_generation_prompt: bool | None = Field(None, description="for messages; default: true")
    return_token_strs: bool | None = Field(None, description="the text of each token too")
