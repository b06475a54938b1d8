"""What the text of an answer must match: a forced call in the model's own format, a schema after its thoughts."""

from __future__ import annotations

import json
from typing import Any

from quire.server.conversation.tool_choice import ToolUse
from quire.server.openai_api.parameters import structured
from quire.server.parsers import grammar as g
from quire.server.parsers import harmony
from quire.server.parsers.registry import FORMATS
from quire.server.parsers.thoughts import THOUGHTS
from quire.structured.spec import StructuredOutputs
from quire.tokenizer.tokenizer import Tokenizer

Constraint = tuple[str, StructuredOutputs]
"""The field that asks for a shape, and the shape."""


class Marks:
    """Marks of a model's format as its vocabulary has them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def __call__(self, text: str) -> g.Format:
        token = self._tokenizer.special_id(text)
        return g.text(text) if token is None else {"type": "token", "token": token}


def whole_shape(given: Constraint | None, tools: ToolUse, calls: str, thoughts: str, *, opened: bool, closed: bool,
                mark: g.Mark) -> Constraint | None:
    """The shape of the whole text, from what the client asks of the answer (`given`) and of calls.

    A forced call comes before what the answer should match; where calls are left to the model, the text is calls or
    such an answer. `opened` and `closed` are what the prompt has done to the thoughts.
    """
    form = FORMATS["harmony" if thoughts == "harmony" else calls]
    if tools.forced:
        shape = form.grammar(tools.shapes, tools.several, mark)
    elif given is None:
        return None
    else:
        shape = _format(given[1])
        if form.channels:
            shape = harmony.answer_grammar(shape, mark)
        if tools.mode == "auto":
            shape = g.one_of([form.grammar(tools.shapes, tools.several, mark), shape])
        elif thoughts == "none":
            return given
    field = "tools" if tools.forced or given is None else given[0]
    if thoughts in THOUGHTS and not closed:
        shape = THOUGHTS[thoughts].grammar(shape, opened, mark)
    return field, structured(field, {"structural_tag": {"type": "structural_tag", "format": shape}})


def _format(spec: StructuredOutputs) -> g.Format:
    """What a client asks for as a part of a structural tag."""
    value: Any = getattr(spec, spec.kind)
    if spec.kind == "json":
        return g.schema(json.loads(value))
    if spec.kind == "json_object":
        return g.schema({"type": "object"})
    if spec.kind == "regex":
        return {"type": "regex", "pattern": value}
    if spec.kind == "choice":
        return g.one_of([g.text(each) for each in value])
    if spec.kind == "structural_tag":
        found: g.Format = json.loads(value)["format"]
        return found
    return {"type": "grammar", "grammar": value}
