"""The settings of docs/agents.md hold: commands parse, the toml is toml, the JSON is JSON, the script is a script."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

from quire.cli import serve
from quire.cli.commands import make_parser
from quire.executor.scripted import read_script

PAGE = (Path(__file__).parents[2] / "docs" / "agents.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_commands_are_ones() -> None:
    parser = make_parser(serve, "quire serve")
    for line in "".join(blocks("console")).splitlines():
        words = shlex.split(line.removeprefix("$ "))
        assert words[:2] == ["quire", "serve"]
        parser.parse_args(words[2:])
    for flag in set(re.findall(r"`(--[a-z-]+)", PAGE)):
        assert flag in parser._option_string_actions, flag


def test_the_settings_of_codex_are_toml() -> None:
    (found,) = map(tomllib.loads, blocks("toml"))
    assert found["model_providers"][found["model_provider"]]["wire_api"] == "responses"


def test_the_settings_of_opencode_are_json() -> None:
    found = json.loads(blocks("json")[0])
    provider, _, model = found["model"].partition("/")
    assert model in found["provider"][provider]["models"]


def test_the_script_is_one(tmp_path: Path) -> None:
    path = tmp_path / "script.jsonl"
    path.write_text(blocks("json")[1], encoding="utf-8")
    assert len(read_script(str(path))) == 3
