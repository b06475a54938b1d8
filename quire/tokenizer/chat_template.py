"""Renders chat messages with a model's jinja2 template, in a sandbox with bounds on time, size and memory.

A template comes with a model or even with a request, so it is code of strangers. jinja2's sandbox keeps it
away from Python's internals; the bounds here keep it from running for ever and from building endless texts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.errors import ChatTemplateError

MAX_TEMPLATE_CHARS = 1 << 20
MAX_OUTPUT_CHARS = 16 << 20
MAX_SECONDS = 10.0
MAX_STEPS = 5_000_000
MAX_MESSAGES = 65_536
MAX_BITS = 4_096
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""What clients call the thoughts before an answer. Templates read the first, those of gpt-oss the second."""
_RESULT_ROLES = ("tool", "ipython", "function")
"""Whose content is what a program returned: any JSON, which templates print or turn into text."""
_HUGE_WIDTH = re.compile(r"\d{6,}|\*")


class _Budget:
    """What one rendering has used up; every loop turn, call and concatenation asks it."""

    __slots__ = ("deadline", "steps")

    def __init__(self) -> None:
        self.deadline = time.monotonic() + MAX_SECONDS
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        if self.steps > MAX_STEPS or (self.steps % 256 == 0 and time.monotonic() > self.deadline):
            raise SecurityError("the template runs too long")


# One rendering per context: set while a template runs, so that the sandbox's hooks find their budget.
_budget: ContextVar[_Budget] = ContextVar("chat_template_budget")


def _check_size(size: int) -> None:
    if size > MAX_OUTPUT_CHARS:
        raise SecurityError("the template builds a text or list that is too large")


def _join(parts: Iterable[str]) -> str:
    pieces = list(parts)
    _check_size(sum(map(len, pieces)))
    return "".join(pieces)


def _join_values(values: Iterable[Any]) -> str:
    _budget.get().step()
    return _join(map(str, values))


@jinja2.pass_context
def _counted(context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
    """Every `for` goes through this filter."""
    budget = _budget.get()
    for item in iterable:
        budget.step()
        yield item


class _BoundedCode(CodeGenerator):
    """jinja2's compiler, with `~` going through the bounds."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.join_values((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


def _is_text_or_list(value: Any) -> bool:
    return isinstance(value, str | list | tuple)


def _check_multiply(left: Any, right: Any) -> None:
    for sequence, count in ((left, right), (right, left)):
        if _is_text_or_list(sequence) and isinstance(count, int):
            _check_size(len(sequence) * max(count, 0))
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > MAX_BITS:
        raise SecurityError("the template computes a number that is too large")


def _check_width(text: Any, *args: Any) -> None:
    """No `'%999999999d' % 1` nor `'{:999999999}'.format(1)`."""
    if isinstance(text, str) and _HUGE_WIDTH.search(text):
        raise SecurityError("the template asks for a field that is too wide")
    _check_size(sum(len(a) for a in args if isinstance(a, str)) + (len(text) if isinstance(text, str) else 0))


def _check_replace(text: str, old: str, new: str) -> None:
    if len(new) > len(old):
        _check_size(len(text) + (len(text) // max(len(old), 1) + 1) * len(new))


def _check_join(separator: str, values: Any) -> None:
    if hasattr(values, "__len__"):
        _check_size(len(values) * len(separator))


def _check_numbers(*args: Any) -> None:
    for argument in args:
        if isinstance(argument, int):
            _check_size(argument)


class _Sandbox(ImmutableSandboxedEnvironment):
    """The environment of transformers' chat templates, bounded."""

    code_generator_class = _BoundedCode
    concat = staticmethod(_join)
    join_values = staticmethod(_join_values)
    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = nodes.Filter(
                loop.iter, "_counted", [], [], None, None, lineno=loop.lineno, environment=self
            )
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        _budget.get().step()
        if operator == "*":
            _check_multiply(left, right)
        elif operator == "**":
            if (
                not isinstance(right, int | float)
                or abs(right) > 1024
                or (isinstance(left, int) and abs(left) > 1 << 64)
            ):
                raise SecurityError("the template computes a power that is too large")
        elif operator == "%":
            _check_width(left)
        elif _is_text_or_list(left) and _is_text_or_list(right):
            _check_size(len(left) + len(right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # Named as in the base class, so that a template may pass self= or context=.
        _budget.get().step()
        method = getattr(__obj, "__wrapped__", __obj)  # the sandbox wraps str.format
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str):
            if name == "replace" and len(args) >= 2 and all(isinstance(a, str) for a in args[:2]):
                _check_replace(owner, args[0], args[1])
            elif name == "join" and args:
                _check_join(owner, args[0])
            elif name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
                _check_numbers(*args, *kwargs.values())
            elif name in ("format", "format_map"):
                _check_width(owner)
        return super().call(__context, __obj, *args, **kwargs)


class _GenerationTag(Extension):
    """`{% generation %}` marks what the assistant wrote, for training; when rendering it is its content."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


class _Namespace(Namespace):
    """A namespace that holds no names of Python's own."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *rest = args
        values = dict(*rest, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(
            f"a chat template may not set {name!r} on a namespace: it starts with an underscore"
        )


class _Dict:
    """`dict(...)` without the type itself, whose attributes lead out of the sandbox."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args, **kwargs)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON. jinja2's own filter escapes HTML, which a prompt must not."""
    if isinstance(indent, int):
        _check_size(indent * 1024)
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    _check_size(len(text))
    return text


def _now(pattern: str) -> str:
    _check_width(pattern)
    return datetime.now().strftime(pattern)


def _guard(function: Callable[..., Any], check: Callable[..., None], takes: int = 0) -> Callable[..., Any]:
    """`function` as a filter that looks at its arguments first; what jinja2 passes to it by itself stays."""

    def guarded(*args: Any, **kwargs: Any) -> Any:
        _budget.get().step()
        check(*args[takes:], *kwargs.values())
        return function(*args, **kwargs)

    marker = getattr(function, "jinja_pass_arg", None)
    if marker is not None:
        guarded.jinja_pass_arg = marker  # type: ignore[attr-defined]
    return guarded


def _check_replace_filter(text: Any, old: Any = "", new: Any = "", *rest: Any) -> None:
    _check_replace(str(text), str(old), str(new))


def _check_join_filter(values: Any, separator: Any = "", *rest: Any) -> None:
    _check_join(str(separator), values)


def _environment() -> _Sandbox:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
    filters = environment.filters
    filters["_counted"] = _counted
    filters["tojson"] = _tojson
    filters["replace"] = _guard(filters["replace"], _check_replace_filter, takes=1)
    filters["join"] = _guard(filters["join"], _check_join_filter, takes=1)
    filters["format"] = _guard(filters["format"], _check_width)
    for name in ("center", "indent", "wordwrap", "batch", "slice", "round"):
        filters[name] = _guard(filters[name], _check_numbers)
    environment.globals.update(raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace)
    environment.globals.pop("lipsum", None)
    return environment


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str) -> None:
        if not isinstance(source, str):
            raise ChatTemplateError(f"a chat template must be text, not {type(source).__name__}")
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ChatTemplateError(f"the chat template is longer than {MAX_TEMPLATE_CHARS} characters")
        self.source = source
        token = _budget.set(_Budget())  # constant expressions run while compiling
        try:
            self._template = _environment().from_string(source)
        except Exception as error:
            raise ChatTemplateError(f"the chat template cannot be compiled: {_reason(error)}") from error
        finally:
            _budget.reset(token)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        special_tokens: Mapping[str, str] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt for these messages; ChatTemplateError carries whatever the template raised."""
        values: dict[str, Any] = {
            **(special_tokens or {}),
            **(variables or {}),
            "messages": checked_messages(messages),
            "tools": _checked_objects(tools, "tools"),
            "documents": _checked_objects(documents, "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        token = _budget.set(_Budget())
        try:
            pieces, size = [], 0
            for piece in self._template.generate(**values):
                size += len(piece)
                _check_size(size)
                pieces.append(piece)
            return "".join(pieces)
        except Exception as error:
            raise ChatTemplateError(f"the chat template refused the messages: {_reason(error)}") from error
        finally:
            _budget.reset(token)


def _reason(error: BaseException) -> str:
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"{error.message} (line {error.lineno})"
    if isinstance(error, TemplateError):
        return error.message or type(error).__name__
    return f"{type(error).__name__}: {error}"


def checked_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages as plain dicts, or ChatTemplateError that says which one is wrong and how."""
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ChatTemplateError(
            "messages must be a list such as [{'role': 'user', 'content': 'Hello'}]", "messages"
        )
    if not messages:
        raise ChatTemplateError("messages is empty: give at least one", "messages")
    if len(messages) > MAX_MESSAGES:
        raise ChatTemplateError(f"more than {MAX_MESSAGES} messages", "messages")
    return [_checked_message(message, index) for index, message in enumerate(messages)]


def _checked_message(message: Any, index: int) -> dict[str, Any]:
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not all(isinstance(key, str) for key in message):
        raise ChatTemplateError(f"{where} must be an object with 'role' and 'content'", where)
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        raise ChatTemplateError(f"{where} needs a 'role' that is text, such as 'user'", f"{where}.role")
    if content is None:
        if role == "user" or role == "system":
            raise ChatTemplateError(f"{where} (role {role!r}) needs a 'content'", f"{where}.content")
    elif not isinstance(content, str) and role not in _RESULT_ROLES:
        _check_parts(content, where)
    given = {name: value for name, value in message.items() if value is not None}  # as transformers does since 5.23
    thoughts = next((given[name] for name in _REASONING if name in given), None)
    if thoughts is None:
        return given
    return {"thinking": thoughts, **given, "reasoning_content": thoughts}


def _check_parts(content: Any, where: str) -> None:
    """Content may be a list of parts, as in [{'type': 'text', 'text': 'Hello'}]."""
    if not isinstance(content, list):
        raise ChatTemplateError(
            f"{where} has content of type {type(content).__name__}; give text", f"{where}.content"
        )
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("type"), str):
            raise ChatTemplateError(f"{where} has a content part without a 'type'", f"{where}.content")
        if part["type"] == "text" and not isinstance(part.get("text"), str):
            raise ChatTemplateError(f"{where} has a text part without 'text'", f"{where}.content")


def _checked_objects(values: Any, field: str) -> list[dict[str, Any]] | None:
    if values is None:
        return None
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Sequence):
        raise ChatTemplateError(f"{field} must be a list of objects", field)
    if not all(isinstance(value, Mapping) for value in values):
        raise ChatTemplateError(f"{field} must be a list of objects", field)
    return [dict(value) for value in values]
