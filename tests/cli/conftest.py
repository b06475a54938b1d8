"""A tiny chat model as a folder, the real command in a process of its own, and the same inside this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

ROOT = Path(__file__).parents[2]
PATIENCE = 180.0
"""Seconds for a command; far more than it needs, since machines that run tests are busy."""
TEMPLATE = (
    "{% for m in messages %}<s>{{ m.role }}:{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str


def environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1", "COLUMNS": "80", "LINES": "24"}


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "quire", *words]


@pytest.fixture(scope="session")
def quire() -> Callable[..., Done]:
    """Runs the command as a person would, in a process of its own."""

    def run(*words: str, stdin: str = "") -> Done:
        done = subprocess.run(
            command(*words),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=PATIENCE,
            env=environment(),
            check=False,
        )
        return Done(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def inside(capsys: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the command in this process, which has paid for importing torch already."""
    from quire.cli.main import main

    def run(*words: str) -> Done:
        capsys.readouterr()  # what the test's own preparations wrote
        code = main(words)
        captured = capsys.readouterr()
        return Done(code, captured.out, captured.err)

    return run


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config, a byte tokenizer and a chat template; load it with --load-format dummy."""
    folder = tmp_path_factory.mktemp("tiny")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({char: place for place, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<s>", special=True), AddedToken("</s>", special=True)])
    backend.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    size = backend.get_vocab_size()
    (folder / "config.json").write_text(json.dumps(CONFIG | {"vocab_size": size, "eos_token_id": size - 1}))
    return folder
