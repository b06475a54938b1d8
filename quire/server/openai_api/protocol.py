"""The bodies of requests, as the OpenAI API defines them, with Quire's own fields beside.

A field that is declared here is honoured, or refused by name where it asks for what a text model cannot do; the ones
under "no effect" cannot change the output. What is not declared is refused as unknown.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

JsonObject = dict[str, Any]
TokenId = Annotated[int, Field(ge=0, lt=1 << 31)]
LogitBias = dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]]
Text = Annotated[str, Field(max_length=1 << 24)]

# A wrong list is refused at its first wrong item: a million complaints would hold up everybody else's streams.
TokenIds = Annotated[list[TokenId], Field(fail_fast=True, max_length=1 << 20)]
Prompt = Annotated[str, Field(min_length=1, max_length=1 << 24)]
PromptIds = Annotated[list[TokenId], Field(fail_fast=True, min_length=1, max_length=1 << 20)]
Prompts = Annotated[list[Prompt], Field(fail_fast=True, min_length=1, max_length=4096)]
PromptsIds = Annotated[list[PromptIds], Field(fail_fast=True, min_length=1, max_length=4096)]


class Strict(BaseModel):
    """Nothing is converted, nothing is ignored."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Strict):
    include_usage: bool | None = Field(None, description="a last chunk with the usage of the whole request")
    continuous_usage_stats: bool | None = Field(
        None, description="with include_usage, every chunk has the usage so far (vLLM's extension)")
    include_obfuscation: bool | None = Field(None, description="no effect: chunks are never padded")


class ResponseFormatText(Strict):
    type: Literal["text"]


class ResponseFormatJsonObject(Strict):
    type: Literal["json_object"]


class JsonSchemaFormat(Strict):
    name: str = Field(min_length=1, max_length=64)
    description: str | None = Field(None, description="no effect")
    schema_: JsonObject | None = Field(None, alias="schema")
    strict: bool | None = Field(None, description="no effect: the schema always holds")


class ResponseFormatJsonSchema(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchemaFormat


ResponseFormat = Annotated[
    ResponseFormatText | ResponseFormatJsonObject | ResponseFormatJsonSchema, Field(discriminator="type")]


class StructuredOutputsBody(Strict):
    """Exactly one of them: the text is made to match it."""

    json_: JsonObject | str | None = Field(None, alias="json", description="a JSON schema")
    json_object: bool | None = Field(None, description="any JSON object")
    regex: str | None = None
    choice: list[str] | None = Field(None, description="one of these texts", max_length=1024)
    grammar: str | None = Field(None, description="a context-free grammar in EBNF")
    structural_tag: JsonObject | str | None = Field(None, description="texts, tokens and schemas put together")


class GenerationBody(Strict):
    """What completions and chat completions have in common."""

    model: str | None = Field(None, description="the served model; may be left out", max_length=1024)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: LogitBias | None = Field(None, description="from token ids to what is added to their logits")
    max_tokens: int | None = Field(None, ge=0, lt=1 << 31)
    n: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    # No effect on the output.
    user: str | None = Field(None, description="no effect")
    metadata: dict[str, str] | None = Field(None, description="no effect")
    store: bool | None = Field(None, description="no effect: nothing is stored")
    service_tier: Literal["auto", "default", "flex", "priority", "scale", "fast"] | None = Field(
        None, description="no effect")
    safety_identifier: str | None = Field(None, description="no effect")
    prompt_cache_key: str | None = Field(None, description="no effect: prefixes are found by their content")
    prompt_cache_retention: str | None = Field(None, description="no effect")
    prompt_cache_options: JsonObject | None = Field(None, description="no effect")
    # Quire's own.
    top_k: int | None = Field(None, ge=-1, lt=1 << 31, description="Quire: draw from this many likeliest tokens")
    min_p: float | None = Field(None, ge=0, le=1, description="Quire: drop tokens below this share of the likeliest")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100, description="Quire")
    min_tokens: int | None = Field(None, ge=0, lt=1 << 31, description="Quire: fewest tokens before an end")
    stop_token_ids: Annotated[TokenIds, Field(max_length=1024)] | None = Field(
        None, description="Quire: end at these tokens")
    include_stop_str_in_output: bool | None = Field(None, description="Quire: keep the stop text")
    ignore_eos: bool | None = Field(None, description="Quire: go on after the end-of-text token")
    bad_words: list[str] | None = Field(None, description="Quire: never generate these texts", max_length=1024)
    allowed_token_ids: TokenIds | None = Field(None, description="Quire: draw from these only")
    skip_special_tokens: bool | None = Field(None, description="Quire: leave special tokens out of the text")
    priority: int | None = Field(None, ge=-(1 << 31), lt=1 << 31, description="Quire: lower goes first")
    cache_salt: str | None = Field(None, min_length=1, max_length=1024,
                                   description="Quire: share cached prefixes only with requests of the same salt")
    timeout: float | None = Field(None, gt=0, description="Quire: seconds until the request is given up")
    use_beam_search: bool | None = Field(None, description="Quire: the n best of beam_width beams")
    beam_width: int | None = Field(None, ge=1, description="Quire: beams (default: n)")
    length_penalty: float | None = Field(None, ge=-10, le=10, description="Quire: of beam search")
    early_stopping: bool | Literal["never"] | None = Field(None, description="Quire: of beam search")
    structured_outputs: StructuredOutputsBody | None = Field(None, description="Quire: what the text must match")
    guided_json: JsonObject | str | None = Field(None, description="Quire: structured_outputs.json")
    guided_regex: str | None = Field(None, description="Quire: structured_outputs.regex")
    guided_choice: list[str] | None = Field(None, description="Quire: structured_outputs.choice", max_length=1024)
    guided_grammar: str | None = Field(None, description="Quire: structured_outputs.grammar")
    return_token_ids: bool | None = Field(None, description="Quire: the token ids of prompt and output")


class CompletionBody(GenerationBody):
    prompt: Prompt | Prompts | PromptIds | PromptsIds | None = Field(
        None, description="text, token ids, or a list of either")
    prompt_token_ids: PromptIds | None = Field(None, description="Quire: the prompt as token ids, in place of prompt")
    best_of: int | None = Field(None, ge=1)
    echo: bool | None = Field(None, description="the prompt before its completion")
    logprobs: int | None = Field(None, ge=0)
    suffix: str | None = Field(None, description="not supported: only null or an empty text")
    response_format: ResponseFormat | None = Field(None, description="Quire: as in chat completions")
    add_special_tokens: bool | None = Field(None, description="Quire: let the tokenizer add its own (default: true)")


class DetokenizeBody(Strict):
    model: str | None = Field(None, max_length=1024)
    tokens: TokenIds
    skip_special_tokens: bool | None = Field(None, description="default: false")
