"""Forced calls and schemas after thoughts, in every family's format: whatever may be drawn is parsed as it should be.

A model of noise walks at random through what the grammar allows; its text goes through the family's parser.
"""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from tokenizers import AddedToken

from quire.server.conversation.shapes import Marks, whole_shape
from quire.server.conversation.tool_choice import ToolUse
from quire.server.parsers.grammar import ToolShape
from quire.server.parsers.pieces import CallDelta, Content, Thought
from quire.server.parsers.registry import FORMATS, OutputFormat
from quire.structured.compiler import GrammarCompiler
from quire.structured.spec import StructuredOutputs
from quire.structured.vocabulary import read_vocabulary
from quire.tokenizer.tokenizer import Tokenizer
from tests.server.conftest import byte_backend

pytest.importorskip("xgrammar")
CITY = {"type": "object", "properties": {"name": {"enum": ["Oslo", "Zürich"]}, "big": {"type": "boolean"},
                                         "near": {"$ref": "#/$defs/town"}},
        "required": ["name", "big"], "additionalProperties": False, "$defs": {"town": {"enum": ["a", "b"]}}}
DAY = {"type": "object", "properties": {"day": {"type": "integer", "minimum": 1, "maximum": 31}}, "required": ["day"],
       "additionalProperties": False}
TOOLS = (ToolShape("city", CITY), ToolShape("calendar.day", DAY))
SPECIAL = {
    "harmony": ["<|start|>", "<|end|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"],
    "mistral": ["[TOOL_CALLS]"], "mistral_v11": ["[TOOL_CALLS]", "[ARGS]"], "phi4": ["<|tool_call|>", "<|/tool_call|>"],
    "granite": ["<|tool_call|>"],
    "kimi_k2": ["<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>"],
}
LONGEST = 1500
STARTS = {
    "think": ["<think>hm {</think>", "{"], "mistral": ["[THINK]hm {[/THINK]", "{"],
    "granite": ["Here is my thought process:hm {Here is my response:", "{"],
    "harmony": ["<|channel|>analysis<|message|>hm {<|end|><|start|>assistant<|channel|>comment", "<|channel|>comment"],
}
"""Thoughts, and none: left to itself, noise would think for ever."""


class Noise:
    """Draws at random from what a grammar allows, and rather ends than goes on."""

    def __init__(self, special: list[str]) -> None:
        backend = byte_backend()
        backend.add_special_tokens([AddedToken(text, special=True) for text in special])
        self.tokenizer = Tokenizer(backend, special_tokens={"bos_token": "<s>", "eos_token": "</s>"})
        self._end = self.tokenizer.eos_token_id
        size = self.tokenizer.vocab_size
        self._compiler = GrammarCompiler(lambda: read_vocabulary(self.tokenizer, size, [self._end or 0]))

    def text(self, shape: StructuredOutputs, seed: int, start: str = "") -> str:
        """A text that begins with `start`."""
        pending = self._compiler.submit(shape)
        pending.wait(30.0)
        grammar = pending.result().start(frozenset({self._end or 0}))
        rng, output = random.Random(seed), self.tokenizer.encode(start, False)
        while len(output) < LONGEST:
            words = np.frombuffer(grammar.mask(output), np.uint32)
            allowed = [token for token in range(self.tokenizer.vocab_size) if words[token >> 5] >> (token & 31) & 1]
            assert allowed, self.tokenizer.decode(output, skip_special_tokens=False)
            if self._end in allowed and (len(allowed) == 1 or rng.random() < 0.5):
                return self.tokenizer.decode(output, skip_special_tokens=False)
            marks = [token for token in allowed
                     if token != self._end and self.tokenizer.token_bytes(token)[-1] in b"\"}]),<>\n"]
            choices = [token for token in allowed if token != self._end]
            output.append(rng.choice(marks if marks and rng.random() < 0.5 else choices))
        pytest.fail("it never ended")


def parsed(text: str, form: str, thoughts: str, opened: bool = False) -> tuple[str, str, list[tuple[str, Any]]]:
    parser = OutputFormat(form, thoughts, opened, {tool.name: tool.schema for tool in TOOLS}).parser()
    names: list[str] = []
    arguments: list[str] = []
    thought = content = ""
    for piece in parser.push(text) + parser.finish():
        if isinstance(piece, CallDelta):
            if piece.name is not None:
                names.append(piece.name)
                arguments.append("")
            arguments[piece.index] += piece.arguments
        elif isinstance(piece, Thought):
            thought += piece.text
        else:
            assert isinstance(piece, Content)
            content += piece.text
    return thought, content, [(name, json.loads(text)) for name, text in zip(names, arguments)]


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_forced_call_is_a_right_one_in_every_family(form: str, special: bool) -> None:
    if special and form not in SPECIAL:
        pytest.skip("its marks are plain text")
    noise = Noise(SPECIAL[form] if special else [])
    thoughts = "harmony" if form == "harmony" else "none"
    for several in (False, True):
        shape = whole_shape(None, ToolUse(None, "required", TOOLS, several), form, thoughts, opened=False, closed=False,
                            mark=Marks(noise.tokenizer))
        assert shape is not None and shape[0] == "tools"
        for seed in range(4):
            text = noise.text(shape[1], seed, STARTS["harmony"][seed % 2] if form == "harmony" else "")
            _, content, calls = parsed(text, form, thoughts)
            assert content == "" and calls and (several or len(calls) == 1), text
            for name, arguments in calls:
                jsonschema.validate(arguments, dict(next(tool.schema for tool in TOOLS if tool.name == name)))


@pytest.mark.parametrize("opened", [False, True])
@pytest.mark.parametrize("thoughts", ["think", "mistral", "granite", "harmony"])
def test_a_schema_holds_after_the_thoughts_and_not_in_them(thoughts: str, opened: bool) -> None:
    if thoughts == "harmony" and opened:
        pytest.skip("its prompts open no thoughts")
    noise = Noise(SPECIAL["harmony"] if thoughts == "harmony" else [])
    given = ("response_format", StructuredOutputs(json=CITY))
    shape = whole_shape(given, ToolUse(), "hermes", thoughts, opened=opened, closed=False, mark=Marks(noise.tokenizer))
    assert shape is not None and shape[0] == "response_format"
    starts = STARTS[thoughts]
    if thoughts == "harmony":
        starts = [start.replace("comment", "final<|message|>") for start in starts]
    if opened:
        starts = [starts[0].split("]" if thoughts == "mistral" else ">" if thoughts == "think" else ":", 1)[1]]
    for start in starts:
        for seed in range(4):
            text = noise.text(shape[1], seed, start)
            thought, content, calls = parsed(text, "hermes", thoughts, opened)
            jsonschema.validate(json.loads(content), CITY)
            assert not calls and thought == ("hm {" if "hm {" in start else "")


def test_free_text_goes_on_until_the_mark_and_then_the_schema_begins() -> None:
    noise = Noise([])
    given = ("response_format", StructuredOutputs(json=DAY))
    shape = whole_shape(given, ToolUse(), "hermes", "think", opened=True, closed=False, mark=Marks(noise.tokenizer))
    assert shape is not None
    pending = noise._compiler.submit(shape[1])
    pending.wait(30.0)

    def accepts(text: str) -> bool:
        grammar = pending.result().start(frozenset({257}))
        mask = grammar.mask(noise.tokenizer.encode(text, False))
        return any(mask)

    assert accepts('hm {"day": "x"} </thin') and accepts('hm</think>\n\n{"day": 3}')
    assert not accepts('hm</think>\n\n{"day": "x') and not accepts("hm</think>\n\nwell")


def test_with_tools_and_a_schema_the_text_is_calls_or_an_answer() -> None:
    noise = Noise([])
    given = ("response_format", StructuredOutputs(json=DAY))
    shape = whole_shape(given, ToolUse(None, "auto", TOOLS), "hermes", "none", opened=False, closed=False,
                        mark=Marks(noise.tokenizer))
    assert shape is not None
    kinds = set()
    for seed in range(12):
        _, content, calls = parsed(noise.text(shape[1], seed), "hermes", "none")
        if not calls:
            jsonschema.validate(json.loads(content), DAY)
        kinds.add(bool(calls))
    assert kinds == {True, False}
