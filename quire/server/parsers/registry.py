"""Every format of tool calls and thoughts, by name; which one a model uses is told by its chat template."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.server.parsers import deepseek, harmony, hermes, json_array, kimi, llama, mistral, pythonic, xml
from quire.server.parsers import grammar as g
from quire.server.parsers.pieces import call_id, short_call_id
from quire.server.parsers.reader import OutputParser, Reader, Steps, ToolSchemas
from quire.server.parsers.thoughts import THOUGHTS, ThoughtMarks


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls."""

    read: Callable[[Reader], Steps[None]]
    grammar: Callable[[Sequence[g.ToolShape], bool, g.Mark], g.Format]
    """The shape of one call, or of several, to these tools: what a forced call must match."""
    signs: tuple[tuple[str, ...], ...]
    """A chat template that has all texts of one of these is of this format; the first format that fits is taken."""
    special: bool = False
    """Its marks are special tokens, which must be kept in the text."""
    make_id: Callable[[], str] = call_id
    channels: bool = False
    """Calls and thoughts are parts of one format."""


FORMATS: dict[str, CallFormat] = {
    "harmony": CallFormat(harmony.read, harmony.grammar, (("<|channel|>", "<|message|>"),), special=True,
                          channels=True),
    "kimi_k2": CallFormat(kimi.read, kimi.grammar, (("<|tool_calls_section_begin|>",),), special=True),
    "deepseek_v32": CallFormat(xml.read_deepseek_v32, xml.deepseek_v32_grammar, (("｜DSML｜",),), special=True),
    "deepseek_v3": CallFormat(deepseek.read, deepseek.v3_grammar, (("<｜tool▁sep｜>", "```json"),), special=True),
    "deepseek_v31": CallFormat(deepseek.read, deepseek.v31_grammar, (("<｜tool▁sep｜>",),), special=True),
    "glm45": CallFormat(xml.read_glm, xml.glm_grammar, (("<arg_key>",),), special=True),
    "qwen3_coder": CallFormat(xml.read_qwen_coder, xml.qwen_coder_grammar, (("<function=",),)),
    "mistral_v11": CallFormat(mistral.read, mistral.named_grammar, (("[TOOL_CALLS]", "[ARGS]"),), special=True,
                              make_id=short_call_id),
    "mistral": CallFormat(mistral.read, mistral.grammar, (("[TOOL_CALLS]",),), special=True, make_id=short_call_id),
    "hermes": CallFormat(hermes.read, hermes.grammar, (("<tool_call>",),)),
    "granite": CallFormat(json_array.read_granite, json_array.granite_grammar,
                          (("<|tool_call|>", "<|start_of_role|>"),), special=True),
    "phi4": CallFormat(json_array.read_phi4, json_array.phi4_grammar, (("<|tool|>",), ("<|tool_call|>",)),
                       special=True),
    "pythonic": CallFormat(llama.read, pythonic.grammar, (("[func_name1(",), ("<|python_start|>",)), special=True),
    "llama3": CallFormat(llama.read, llama.grammar, (("<|python_tag|>",), ('"parameters": dictionary',)), special=True),
}
CALL_FORMATS = tuple(sorted(FORMATS))
THOUGHT_FORMATS = (*sorted(THOUGHTS), "harmony")


def call_format_of(template: str | None) -> str:
    """The format that a chat template speaks of; Hermes' is what models without one are asked for."""
    for name, form in FORMATS.items():
        if template is not None and any(all(sign in template for sign in signs) for signs in form.signs):
            return name
    return "hermes"


def thought_format_of(template: str | None) -> str:
    """The name of the marks that a chat template has for thoughts, or "none"."""
    if template is None:
        return "none"
    if any(all(sign in template for sign in signs) for signs in FORMATS["harmony"].signs):
        return "harmony"
    return next((name for name, marks in THOUGHTS.items() if marks.close in template), "none")


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """What to look for in the text of one request."""

    calls: str | None
    """The format of calls; None: there are no tools, and no text is a call."""
    thoughts: str
    opened: bool = False
    """The prompt has opened the thoughts."""
    tools: ToolSchemas | None = None
    most: int | None = None
    forced: bool = False
    """The answer is calls and nothing else."""

    @property
    def plain(self) -> bool:
        """Every character is content."""
        return self.calls is None and self.thoughts == "none"

    @property
    def keeps_special_tokens(self) -> bool:
        return self.thoughts == "harmony" or (self.calls is not None and FORMATS[self.calls].special)

    def parser(self) -> OutputParser:
        """A fresh one: every choice needs its own."""
        form = None if self.calls is None else FORMATS[self.calls]
        if self.thoughts == "harmony":
            form = FORMATS["harmony"]
        reader = Reader(self.tools or {}, most=self.most, only_calls=self.forced,
                        make_id=call_id if form is None else form.make_id)
        marks = THOUGHTS.get(self.thoughts)
        return OutputParser(lambda found: _steps(found, form, marks, self.opened), reader)


def _steps(reader: Reader, form: CallFormat | None, marks: ThoughtMarks | None, opened: bool) -> Steps[None]:
    if marks is not None:
        yield from marks.read(reader, opened)
    if form is not None:
        yield from form.read(reader)
