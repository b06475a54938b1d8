"""Chat templates render as in transformers, and cannot get out of their sandbox nor eat the machine."""

from __future__ import annotations

import time
import tracemalloc
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import _compile_jinja_template as transformers_template

from quire.errors import ChatTemplateError
from quire.tokenizer import chat_template
from quire.tokenizer.chat_template import ChatTemplate

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
CITY = {"type": "string", "description": 'which <city>, "exactly" & précis'}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "description": "The weather 天气 now",
            "parameters": {
                "type": "object",
                "properties": {"city": CITY, "unit": {"type": "string", "enum": ["c", "f"]}},
                "required": ["city"],
            },
        },
    }
]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


SYSTEM = {"role": "system", "content": "Be <b>brief</b> & kind."}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_abc1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"city": "Zürich"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_abc1", "name": "get_weather", "content": "22 °C"}
CASES: dict[str, dict[str, Any]] = {
    "one": {"messages": [user("Hi")]},
    "system": {"messages": [SYSTEM, user("héllo 世界 🎉")]},
    "turns": {"messages": [SYSTEM, user("a"), assistant("b"), user("c"), assistant("d"), user("e\n\nf")]},
    "no-prompt": {"messages": [user("a"), assistant("b")], "add_generation_prompt": False},
    "tools": {"messages": [SYSTEM, user("weather?")], "tools": TOOLS},
    "call": {"messages": [user("weather?"), CALL, RESULT], "tools": TOOLS},
    "after-call": {"messages": [user("w?"), CALL, RESULT, assistant("22"), user("thanks")], "tools": TOOLS},
    "parts": {"messages": [user([{"type": "text", "text": "x"}])]},
    "documents": {"messages": [user("q")], "documents": [{"title": "t", "text": "body"}]},
    "thinking": {"messages": [user("q")], "enable_thinking": False},
}


@cache
def compiled(source: str) -> tuple[Any, ChatTemplate]:
    return transformers_template(source), ChatTemplate(source)


def outcomes(source: str, case: dict[str, Any]) -> tuple[str | None, str | None]:
    """(transformers' text, ours); None where the template refuses the messages."""
    reference, template = compiled(source)
    values = {"tools": None, "documents": None, "add_generation_prompt": True, **case}
    try:
        theirs = reference.render(**values, **SPECIAL)
    except Exception:
        theirs = None
    named = {key: values.pop(key) for key in ("messages", "tools", "documents", "add_generation_prompt")}
    try:
        ours = template.render(special_tokens=SPECIAL, variables=values, **named)
    except ChatTemplateError:
        ours = None
    return theirs, ours


def test_well_known_templates_render_as_in_transformers(llama_cpp_models: Path) -> None:
    files = sorted((llama_cpp_models / "templates").glob("*.jinja"))
    assert len(files) >= 70
    rendered = 0
    for path in files:
        source = path.read_text(encoding="utf-8")
        for name, case in CASES.items():
            theirs, ours = outcomes(source, case)
            assert ours == theirs, (path.name, name)
            rendered += ours is not None
    assert rendered > 8 * len(files)


def test_messages_reach_a_template_as_through_transformers() -> None:
    """Its tokenizer hands thoughts on under every name that templates read, and a tool's result as it is."""
    from tokenizers import Tokenizer as Backend
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast

    source = "{% for m in messages %}{{ m | tojson(sort_keys=true) }}\n{% endfor %}"
    reference = PreTrainedTokenizerFast(tokenizer_object=Backend(BPE()))
    reference.chat_template = source
    for extra in ("thinking", "reasoning", "reasoning_content"):
        for result in ("22", {"temperature": 22}, 22, [1, {"a": None}], [{"type": "text", "text": "x"}]):
            answer = {**assistant("a"), extra: "because"}
            messages = [user("q"), answer, {"role": "tool", "name": "f", "content": result}]
            messages.append({**assistant("b"), "thinking": None})
            theirs = reference.apply_chat_template(messages, tokenize=False)
            assert ChatTemplate(source).render(messages) == theirs
    with pytest.raises(ChatTemplateError, match="content of type dict"):
        ChatTemplate(source).render([user({"temperature": 22})])


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}\n  {%- if loop.first %}first{% endif %}\n  {{ m.content }}\n{% endfor %}",
        "{{ tools | tojson }}",
        "{{ tools | tojson(indent=2) }}",
        "{{ {'b': 'é<&>', 'a': 1} | tojson(sort_keys=true, ensure_ascii=true) }}",
        "{% for m in messages %}{% if loop.index0 > 0 %}{% break %}{% endif %}{{ loop.length }}{% endfor %}",
        "{% for m in messages %}{{ loop.last }}{{ loop.previtem.role }}{{ loop.nextitem.role }}{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ loop.revindex }}{% else %}none{% endfor %}",
        "{% generation %}{{ messages[0].content }}{% endgeneration %}!",
        "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
        "{{ dict(a=1, b=2) | length }}{{ bos_token ~ eos_token }}",
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(1) ~ f('a') }}{% call f(2) %}{% endcall %}",
        "{% set x %}a{{ messages | length }}{% endset %}{{ x * 3 }}",
        "{{ 'abc'.replace('b', 'xx') }}{{ 'a-b'.split('-') | join('+') }}{{ '%s|%5d' % ('x', 3) }}",
        "{{ messages | map(attribute='content') | join(', ') }}{{ 'x' | indent(4, true) }}",
        "{{ undefined_thing }}|{{ undefined_thing is defined }}",
        "{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}{{ 7 // 2 }}{{ 2 ** 10 }}{{ 7 % 4 }}",
        "{{ raise_exception('no system role') }}",
        "{{ nothing.at.all }}",
        "{{ [3, 1, 2] | sort | first }}{{ messages[-1]['content'][:1] | upper }}{{ 'a\nb'.splitlines() }}",
        "{% for a in [[1, [2]], [3]] recursive %}{{ loop(a) if a is iterable else a }}{% endfor %}",
    ],
)
def test_features_render_as_in_transformers(source: str) -> None:
    theirs, ours = outcomes(source, {"messages": [SYSTEM, user("hi")], "tools": TOOLS})
    assert ours == theirs


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render([user("hi")], variables=variables)


def test_the_date_is_given() -> None:
    assert render("{{ strftime_now('%Y') }}") == time.strftime("%Y")


def test_what_a_template_says_reaches_the_user() -> None:
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        render("{{ raise_exception('System role not supported') }}")


@pytest.mark.parametrize(
    "source", ["{% for %}", "{{ 'a' ", "{% if x %}", "{% nosuchtag %}", "{{ x | nosuchfilter }}"]
)
def test_a_broken_template_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="cannot be compiled"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__ }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ (messages | map(attribute='__class__') | list)[0].mro }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ dict.__class__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
        "{{ raise_exception.__globals__ }}",
    ],
)
def test_the_sandbox_gives_nothing_of_python(source: str) -> None:
    try:
        text = render(source)
    except ChatTemplateError:
        return
    assert text.strip() in ("", "()")


def sixty_times(start: str, step: str) -> str:
    """A loop that sets ns.x to `step` of itself."""
    return (
        f"{{% set ns = namespace(x={start}) %}}{{% for i in range(60) %}}{step}{{% endfor %}}{{{{ ns.x }}}}"
    )


BOMBS = [
    "{{ 'a' * 1000000000 }}",
    "{{ ['a'] * 1000000000 }}",
    "{{ 1000000000 * 'ab' }}",
    sixty_times("'aaaaaaaa'", "{% set ns.x = ns.x ~ ns.x %}"),
    sixty_times("'aaaaaaaa'", "{% set ns.x = ns.x + ns.x %}"),
    sixty_times("[1]", "{% set ns.x = ns.x + ns.x %}"),
    sixty_times("9", "{% set ns.x = ns.x * ns.x %}"),
    sixty_times("'ab'", "{% set ns.x = ns.x.replace('', ns.x) %}"),
    sixty_times("'ab'", "{% set ns.x = ns.x | replace('a', ns.x) %}"),
    sixty_times("'ab'", "{% set ns.x = ns.x | join(ns.x) %}"),
    sixty_times("'ab'", "{% set ns.x = ns.x.join(ns.x) %}"),
    sixty_times("'ab'", "{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}{% set ns.x = y %}"),
    "{{ 'a'.center(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a'.zfill(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%1000000000d' | format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ 10 ** (10 ** 10) }}",
    "{{ 10 ** 10 ** 10 ** 10 ** 10 ** 10 ** 10 }}",
    "{{ range(1000000000) | list }}",
    "{{ messages | tojson(indent=1000000000) }}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxxxxxxxxxxxxxxx{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{{ lipsum(100000) }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_cannot_run_or_grow_without_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 1.0)
    tracemalloc.start()
    start = time.monotonic()
    try:
        with pytest.raises(ChatTemplateError, match="refused the messages"):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < 256 << 20
    finally:
        tracemalloc.stop()
    assert time.monotonic() - start < 60


def test_a_template_has_a_longest_length() -> None:
    with pytest.raises(ChatTemplateError, match="longer than"):
        ChatTemplate("x" * (chat_template.MAX_TEMPLATE_CHARS + 1))
    with pytest.raises(ChatTemplateError, match="must be text"):
        ChatTemplate(b"x")  # type: ignore[arg-type]


def test_long_conversations_render() -> None:
    source = "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content + eos_token }}{% endfor %}"
    messages = [user("word " * 200), assistant("reply " * 200)] * 300
    text = ChatTemplate(source).render(messages, special_tokens=SPECIAL)
    assert len(text) > 600_000 and text.count("</s>") == 600


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ("hi", "must be a list"),
        ({"role": "user", "content": "x"}, "must be a list"),
        (None, "must be a list"),
        ([], "empty"),
        (["hi"], r"messages\[0\] must be an object"),
        ([{"content": "x"}], r"messages\[0\] needs a 'role'"),
        ([user("a"), {"role": 3, "content": "x"}], r"messages\[1\] needs a 'role'"),
        ([{"role": "user"}], "needs a 'content'"),
        ([user(None)], "needs a 'content'"),
        ([user(5)], "content of type int"),
        ([user(["x"])], "part without a 'type'"),
        ([user([{"type": "text"}])], "part without 'text'"),
        ([{1: 2, "role": "user", "content": "x"}], "must be an object"),
    ],
)
def test_malformed_messages_are_named(messages: Any, match: str) -> None:
    with pytest.raises(ChatTemplateError, match=match):
        ChatTemplate("{{ messages }}").render(messages)


@pytest.mark.parametrize("tools", ["x", {"name": "f"}, [1], 3])
def test_malformed_tools_are_refused(tools: Any) -> None:
    with pytest.raises(ChatTemplateError, match="tools"):
        ChatTemplate("x").render([user("hi")], tools=tools)


def test_a_template_does_not_change_the_callers_messages() -> None:
    messages = [user("hi")]
    render("{% set m = messages[0] %}{{ m.content }}")
    assert messages == [user("hi")]


def test_variables_cannot_stand_in_for_the_messages() -> None:
    assert render("{{ messages | length }}", messages=[1, 2, 3]) == "1"
