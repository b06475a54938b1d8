"""Every example of docs/serving.md runs against a server of the default model; every command line there is one."""

from __future__ import annotations

import re
import runpy
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire import AsyncLLM
from tests.server.scripted import running

PAGE = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def address(smollm2: str) -> Iterator[str]:
    async def start() -> AsyncLLM:
        return await AsyncLLM.start(smollm2, num_threads=1, device="cpu", max_model_len=1024)

    with running(start) as (found, _):
        yield found


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_python_examples_run(address: str, number: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = blocks("python")[number]
    assert ADDRESS in code
    script = tmp_path / "example.py"
    script.write_text(code.replace(ADDRESS, address), encoding="utf-8")
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("number", range(len(blocks("bash"))))
def test_the_shell_examples_run(address: str, number: int) -> None:
    script = blocks("bash")[number].replace(ADDRESS, address).replace("curl ", "curl -sS --fail-with-body ")
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], capture_output=True, text=True, timeout=120,
                          check=False)
    assert done.returncode == 0 and done.stdout.strip(), done.stdout + done.stderr


def test_the_commands_are_ones() -> None:
    from quire.cli import serve
    from quire.cli.commands import make_parser

    lines = [line for block in blocks("console") for line in block.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        words = shlex.split(line.removeprefix("$ "), comments=True)
        assert words[:2] == ["quire", "serve"]
        make_parser(serve, "quire serve").parse_args(words[2:])


def test_every_option_and_field_that_the_page_names_exists() -> None:
    from quire.cli import serve
    from quire.cli.commands import make_parser
    from quire.server.messages_api.protocol import MessagesBody
    from quire.server.openai_api.chat_protocol import ChatBody
    from quire.server.openai_api.protocol import CompletionBody
    from quire.server.responses_api.protocol import ResponsesBody

    known = make_parser(serve, "quire serve")._option_string_actions
    for flag in set(re.findall(r"`(--[a-z-]+)", PAGE)):
        assert flag in known, flag
    sections = {title.partition("\n")[0]: title for title in PAGE.split("\n### ")}
    for body, page in ((ChatBody, PAGE), (CompletionBody, PAGE), (ResponsesBody, sections["Responses"]),
                       (MessagesBody, sections["Messages"])):
        for field in body.model_fields:
            assert f"`{field}`" in page or f"`{field} " in page or f"`{field}:" in page, (body, field)
