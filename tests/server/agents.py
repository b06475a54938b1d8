"""Real coding agents, as their registries have them, pointed at a server of ours and at nothing else."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from quire.config import default_cache_dir
from tests.server.real import ServeProcess, quire_serve

FOLDER = default_cache_dir() / "agents"
"""Where `make agents` puts them."""
PATIENCE = 240.0
CONTEXT = 65536
TASK = "Make a program greet.py that prints a greeting and 42."
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "tie_word_embeddings": False, "hidden_act": "silu", "vocab_size": 49152, "eos_token_id": 2,
}


def program(name: str) -> str:
    """The path of an agent; the test is skipped where it is not installed."""
    for folder in (FOLDER / "node_modules" / ".bin", FOLDER / "opencode" / "node_modules" / ".bin",
                   FOLDER / "aider" / "bin"):
        if (folder / name).exists():
            return str(folder / name)
    pytest.skip(f"no {name} in {FOLDER}: `make agents` installs it, where its registry can be reached")


def call(name: str, **arguments: Any) -> str:
    """A tool call as the scripted model writes it."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@contextlib.contextmanager
def scripted_server(folder: Path, lines: list[dict[str, str]], *words: str) -> Iterator[ServeProcess]:
    """`quire serve` with a model that says the lines of a script, and a context of 64k."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(CONFIG))
    script = folder / "script.jsonl"
    script.write_text("\n".join(map(json.dumps, [{"say": "There is no line for this."}, *lines])), encoding="utf-8")
    with quire_serve(model, folder / "server.log", "--load-format", "dummy", "--tokenizer", "smollm2-135m",
                     "--executor", "dummy", "--dummy-script", str(script), "--reasoning-parser", "think",
                     "--served-model-name", "scripted", "--max-model-len", str(CONTEXT), "--kv-cache-memory", "64MiB",
                     *words) as server:
        yield server


@dataclass
class Session:
    """What an agent did."""

    output: str
    work: Path
    log: Path

    def requests(self, path: str) -> list[dict[str, Any]]:
        """The server's log of requests to a path, in their order."""
        lines = [json.loads(line) for line in self.log.read_text().splitlines() if line.startswith("{")]
        return [line for line in lines if line.get("event") == "request" and line["path"] == path]


def play(name: str, server: ServeProcess, folder: Path, words: list[str], **environment: str) -> Session:
    """Run an agent in a folder of its own until it ends. Only this machine can be reached."""
    work, home = folder / "work", folder / "home"
    work.mkdir(exist_ok=True)
    home.mkdir(exist_ok=True)
    nowhere = "http://127.0.0.1:9"
    kept = {key: value for key, value in os.environ.items() if key in ("PATH", "LANG", "LC_ALL", "TMPDIR")}
    done = subprocess.run(
        words, cwd=work, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={**kept, "HOME": str(home), "HTTP_PROXY": nowhere, "HTTPS_PROXY": nowhere, "http_proxy": nowhere,
             "https_proxy": nowhere, "NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
             **environment})
    output = done.stdout + done.stderr
    kept_in = os.environ.get("QUIRE_TRANSCRIPTS")
    if kept_in:
        Path(kept_in).mkdir(parents=True, exist_ok=True)
        (Path(kept_in) / f"{name}.txt").write_text(output, encoding="utf-8")
    assert done.returncode == 0, output + server.log.read_text()
    return Session(output, work, server.log)


def greeting(work: Path) -> str:
    """What the program that the agent has made prints."""
    python = shutil.which("python3")
    assert python is not None
    return subprocess.run([python, "greet.py"], cwd=work, capture_output=True, text=True, check=True).stdout
