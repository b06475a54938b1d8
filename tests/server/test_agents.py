"""Real agents play a session with a scripted model: files made and edited, commands run, an answer."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from tests.server.agents import CONTEXT, TASK, call, greeting, play, program, scripted_server

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("smollm2")]
WRONG, RIGHT = 'print("greeting", 6 * 6)\n', 'print("greeting", 6 * 7)\n'
ANSWER = "The program greet.py prints **greeting 42**."


def test_codex_makes_runs_and_edits_a_file(tmp_path: Path) -> None:
    codex = program("codex")
    lines = [
        {"after": TASK, "say": "<think>\nA small program.\n</think>\n\nI write the program. " + call(
            "exec_command", cmd="printf 'print(\"greeting\", 6 * 6)\\n' > greet.py && echo written-$((40+1))")},
        {"after": "written-41", "say": "Now I run it. " + call("exec_command", cmd="python3 greet.py")},
        {"after": "greeting 36", "say": "36 is wrong. " + call(
            "exec_command", cmd="sed -i 's/6 \\* 6/6 * 7/' greet.py && echo edited-$((40+2))")
            + call("exec_command", cmd="echo looked-$((40+3))")},
        {"after": "looked-43", "say": ANSWER},
    ]
    with scripted_server(tmp_path, lines) as server:
        home = tmp_path / "home" / ".codex"
        home.mkdir(parents=True)
        (home / "config.toml").write_text(
            'model = "scripted"\nmodel_provider = "quire"\n[model_providers.quire]\nname = "quire"\n'
            f'base_url = "{server.address}/v1"\nwire_api = "responses"\n')
        done = play("codex", server, tmp_path,
                    [codex, "exec", "--skip-git-repo-check", "-s", "danger-full-access", TASK], CODEX_HOME=str(home))
    assert greeting(done.work) == "greeting 42\n" and ANSWER in done.output and "edited-42" in done.output
    asked = done.requests("/v1/responses")
    assert len(asked) == 4 and all(each["status"] == 200 and each["stream"] for each in asked)
    # What was said before is not computed again.
    assert all(later["cached_tokens"] > 0.9 * earlier["prompt_tokens"] for earlier, later in pairwise(asked))


def test_claude_code_makes_runs_and_edits_a_file(tmp_path: Path) -> None:
    claude, file = program("claude"), str(tmp_path / "work" / "greet.py")
    lines = [
        {"after": TASK, "say": "<think>\nA small program.\n</think>\n\nI write the program. "
            + call("Write", file_path=file, content=WRONG)},
        {"after": "File created successfully", "say": "Now I run it. "
            + call("Bash", command="python3 greet.py", description="Run it")},
        {"after": "greeting 36", "say": "36 is wrong. " + call("Edit", file_path=file, old_string="6 * 6",
                                                              new_string="6 * 7")
            + call("Bash", command="echo looked-$((40+3))", description="Look")},
        {"after": "looked-43", "say": ANSWER},
    ]
    with scripted_server(tmp_path, lines) as server:
        done = play("claude", server, tmp_path,
                    [claude, "-p", TASK, "--permission-mode", "acceptEdits", "--allowedTools", "Bash Write Edit",
                     "--output-format", "stream-json", "--verbose"],
                    ANTHROPIC_BASE_URL=server.address, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL="scripted",
                    ANTHROPIC_DEFAULT_HAIKU_MODEL="scripted", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
                    DISABLE_AUTOUPDATER="1", DISABLE_TELEMETRY="1")
    assert greeting(done.work) == "greeting 42\n"
    said = [json.loads(line) for line in done.output.splitlines() if line.startswith("{")]
    assert said[-1]["result"] == ANSWER and said[-1]["is_error"] is False
    blocks = [block for each in said if each["type"] == "assistant" for block in each["message"]["content"]]
    assert [block["type"] for block in blocks] == ["thinking", "text", "tool_use", "text", "tool_use", "text",
                                                   "tool_use", "tool_use", "text"]
    asked = done.requests("/v1/messages")
    assert len(asked) == 4 and all(each["status"] == 200 and each["stream"] for each in asked)
    assert all(later["cached_tokens"] > 0.9 * earlier["prompt_tokens"] for earlier, later in pairwise(asked))


def test_claude_code_asks_for_less_output_where_the_context_is_small(tmp_path: Path) -> None:
    """Its 32,000 tokens of output do not fit: it reads the numbers of the refusal and tries again."""
    claude = program("claude")
    with scripted_server(tmp_path, [{"after": TASK, "say": ANSWER}], "--max-model-len", "32768") as server:
        done = play("claude", server, tmp_path, [claude, "-p", TASK, "--output-format", "json"],
                    ANTHROPIC_BASE_URL=server.address, ANTHROPIC_API_KEY="none", ANTHROPIC_MODEL="scripted",
                    ANTHROPIC_DEFAULT_HAIKU_MODEL="scripted", CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
                    DISABLE_AUTOUPDATER="1", DISABLE_TELEMETRY="1")
    assert json.loads(done.output)["result"] == ANSWER
    assert [each["status"] for each in done.requests("/v1/messages")] == [400, 200]


def test_opencode_makes_runs_and_edits_a_file(tmp_path: Path) -> None:
    opencode, file = program("opencode"), str(tmp_path / "work" / "greet.py")
    lines = [
        {"after": TASK, "say": "<think>\nA small program.\n</think>\n\nI write the program. "
            + call("write", filePath=file, content=WRONG)},
        {"after": "Wrote file", "say": "Now I run it. "
            + call("bash", command="python3 greet.py", description="Run it")},
        {"after": "greeting 36", "say": "36 is wrong. " + call("edit", filePath=file, oldString="6 * 6",
                                                              newString="6 * 7")
            + call("bash", command="echo looked-$((40+3))", description="Look")},
        {"after": "looked-43", "say": ANSWER},
    ]
    with scripted_server(tmp_path, lines) as server:
        (tmp_path / "work").mkdir()
        (tmp_path / "work" / "opencode.json").write_text(json.dumps({
            "model": "quire/scripted", "small_model": "quire/scripted", "autoupdate": False, "share": "disabled",
            "provider": {"quire": {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{server.address}/v1"},
                                   "models": {"scripted": {"limit": {"context": CONTEXT, "output": 8192}}}}}}))
        done = play("opencode", server, tmp_path, [opencode, "run", TASK], OPENCODE_DISABLE_AUTOUPDATE="1",
                    OPENCODE_DISABLE_MODELS_FETCH="1", OPENCODE_DISABLE_LSP_DOWNLOAD="1",
                    OPENCODE_DISABLE_DEFAULT_PLUGINS="1")
    assert greeting(done.work) == "greeting 42\n" and ANSWER in done.output and "looked-43" in done.output
    asked = done.requests("/v1/chat/completions")
    assert len(asked) == 5 and all(each["status"] == 200 and each["stream"] for each in asked)
    # The title of the session is asked for beside the four turns, whichever comes first.
    turns = [each for each in asked if each["prompt_tokens"] > 2000]
    assert len(turns) == 4
    assert all(later["cached_tokens"] > 0.9 * earlier["prompt_tokens"] for earlier, later in pairwise(turns))


def test_aider_makes_a_file_and_mends_what_its_test_finds(tmp_path: Path) -> None:
    aider = program("aider")
    block = "greet.py\n```python\n<<<<<<< SEARCH\n{}=======\n{}>>>>>>> REPLACE\n```\n"
    lines = [{"after": TASK, "say": "I write the program.\n\n" + block.format("", WRONG)},
             {"after": "expected 42, not 36", "say": "It should be 42.\n\n" + block.format(WRONG, RIGHT)}]
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "check.py").write_text(
        "import subprocess, sys\n"
        "found = subprocess.run([sys.executable, 'greet.py'], capture_output=True, text=True).stdout.split()[-1]\n"
        "assert found == '42', 'expected' + ' 42, not ' + found\n")
    prices = tmp_path / "home" / ".aider" / "caches" / "model_prices_and_context_window.json"
    prices.parent.mkdir(parents=True)
    prices.write_text("{}")  # what it would fetch
    with scripted_server(tmp_path, lines) as server:
        done = play("aider", server, tmp_path, [
            aider, "--model", "openai/scripted", "--openai-api-base", f"{server.address}/v1", "--openai-api-key",
            "none", "--no-git", "--yes-always", "--no-check-update", "--no-show-model-warnings", "--analytics-disable",
            "--edit-format", "diff", "--no-pretty", "--no-auto-lint", "--auto-test", "--test-cmd", "python3 check.py",
            "--map-tokens", "0", "--message", TASK, "greet.py"], LITELLM_LOCAL_MODEL_COST_MAP="True")
    assert greeting(done.work) == "greeting 42\n" and "Applied edit to greet.py" in done.output
    asked = done.requests("/v1/chat/completions")
    assert len(asked) == 2 and all(each["status"] == 200 for each in asked)
