"""The body of a request to /v1/responses. What is not declared is refused by name; "no effect" means just that."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag

from quire.server.conversation.face import never
from quire.server.openai_api.chat_protocol import CalledName, FunctionName
from quire.server.openai_api.protocol import JsonObject, Strict, Text

Ignored = Field(None, description="no effect")


class InputText(Strict):
    type: Literal["input_text", "output_text", "text"]
    text: Text
    annotations: list[Any] | None = Ignored
    logprobs: list[Any] | None = Ignored
    prompt_cache_breakpoint: JsonObject | None = Ignored


class RefusalText(Strict):
    type: Literal["refusal"]
    refusal: str


ContentPart = Annotated[InputText | RefusalText, Field(discriminator="type")]


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Text | list[ContentPart]
    id: str | None = Ignored
    status: str | None = Ignored
    phase: str | None = Ignored


class FunctionCallItem(Strict):
    type: Literal["function_call"]
    call_id: str
    name: CalledName
    arguments: str = Field(description="JSON")
    namespace: str | None = Field(None, description="of the tool, where it is one of a namespace's")
    id: str | None = Ignored
    status: str | None = Ignored


class FunctionOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: Text | list[ContentPart]
    name: str | None = Ignored
    id: str | None = Ignored
    status: str | None = Ignored


class ReasoningText(Strict):
    type: Literal["reasoning_text", "summary_text", "text"]
    text: Text


class ReasoningItem(Strict):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = Field(None, description="what the model thought; shown to its template")
    summary: list[ReasoningText] | None = Ignored
    encrypted_content: str | None = Ignored
    id: str | None = Ignored
    status: str | None = Ignored


def _kind(item: Any) -> str:
    """Messages may leave their type out."""
    found = item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", "message")
    return found if isinstance(found, str) else "message"


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")] | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")] | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_kind)]


class FunctionTool(Strict):
    type: Literal["function"]
    name: FunctionName
    description: str | None = None
    parameters: JsonObject | None = Field(None, description="JSON schema of the arguments")
    strict: bool | None = Field(None, description="no effect: forced calls always follow the schema")


class NamespaceTool(Strict):
    """Functions under a common name; the model sees each as namespace.name."""

    type: Literal["namespace"]
    name: FunctionName
    description: str | None = None
    tools: list[FunctionTool]


class WebSearchTool(Strict):
    """No effect: this server searches nothing, and the model is not told of it."""

    type: Literal["web_search", "web_search_preview"]
    external_web_access: bool | None = None
    search_context_size: str | None = None
    user_location: JsonObject | None = None
    filters: JsonObject | None = None


ToolParam = Annotated[FunctionTool | NamespaceTool | WebSearchTool, Field(discriminator="type")]


class ChosenFunction(Strict):
    type: Literal["function"]
    name: FunctionName


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class SchemaFormat(Strict):
    type: Literal["json_schema"]
    name: str = Field(min_length=1, max_length=64)
    schema_: JsonObject = Field(alias="schema")
    description: str | None = Ignored
    strict: bool | None = Field(None, description="no effect: the schema always holds")


class TextOptions(Strict):
    format: Annotated[TextFormat | JsonObjectFormat | SchemaFormat, Field(discriminator="type")] | None = None
    verbosity: Literal["low", "medium", "high"] | None = Ignored


class ReasoningOptions(Strict):
    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = Field(
        None, description="for models whose chat template knows it; no effect otherwise")
    summary: Literal["auto", "concise", "detailed"] | None = Field(None, description="no effect: thoughts come whole")
    generate_summary: str | None = Ignored
    context: str | None = Ignored


class ResponseStreamOptions(Strict):
    include_obfuscation: bool | None = Field(None, description="no effect: events are never padded")


class ResponsesBody(Strict):
    model: str | None = Field(None, description="the served model; may be left out", max_length=1024)
    input: Text | Annotated[list[InputItem], Field(min_length=1, max_length=65536)] = Field(
        description="a text, or items: messages, calls, results of calls, reasoning")
    instructions: Text | None = Field(None, description="a system message before the input; not kept for later turns")
    previous_response_id: str | None = Field(None, max_length=128, description="go on after a stored response")
    store: bool | None = Field(None, description="keep the response for previous_response_id (default: true)")
    tools: list[ToolParam] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=1 << 31)
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    truncation: Literal["disabled"] | None = Field(None, description="only disabled: nothing is cut silently")
    background: Annotated[bool, AfterValidator(never)] | None = Field(None, description="only false")
    top_logprobs: int | None = Field(None, ge=0, le=0,
                                     description="only 0: chat completions give log-probabilities")
    include: list[Literal["reasoning.encrypted_content", "web_search_call.action.sources",
                          "file_search_call.results"]] | None = Field(
        None, description="no effect: reasoning items hold their text")
    # No effect on the output.
    metadata: dict[str, str] | None = Ignored
    client_metadata: JsonObject | None = Ignored
    user: str | None = Ignored
    service_tier: str | None = Ignored
    safety_identifier: str | None = Ignored
    prompt_cache_key: str | None = Field(None, description="no effect: prefixes are found by their content")
    prompt_cache_retention: str | None = Ignored
    prompt_cache_options: JsonObject | None = Ignored
    context_management: Any = Ignored
    # This server cannot.
    conversation: None = None
    prompt: None = None
    max_tool_calls: None = None
    moderation: None = None
    # Quire's own.
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63, description="Quire")
    stop: str | list[str] | None = Field(None, description="Quire")
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="Quire")
    min_p: float | None = Field(None, ge=0, le=1, description="Quire")
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31, description="Quire")
    cache_salt: str | None = Field(None, min_length=1, max_length=1024, description="Quire")
    timeout: float | None = Field(None, gt=0, description="Quire")
    chat_template_kwargs: JsonObject | None = Field(None, description="Quire: variables of the chat template")
