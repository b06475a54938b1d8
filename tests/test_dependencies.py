"""The offline engine needs torch, numpy, safetensors, tokenizers and jinja2; the rest serves other doors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.blocked import WITHOUT
from tests.test_bad_input import CONFIG

PROGRAM = WITHOUT + """import quire
from quire import LLM, SamplingParams, RequestOutput
assert "torch" not in sys.modules
with LLM(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, device="cpu", num_threads=1) as llm:
    print(len(llm.generate([[3, 4], [5]], SamplingParams(max_tokens=3, ignore_eos=True))[1].outputs[0].token_ids))
"""
OTHERS = ("aiohttp gguf httptools httpx huggingface_hub msgspec prometheus_client pydantic starlette tqdm transformers "
          "uvicorn uvloop xgrammar zmq")


def test_the_offline_engine_needs_few_packages_and_torch_only_when_it_is_made(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    done = subprocess.run([sys.executable, "-c", PROGRAM, OTHERS, str(tmp_path)], capture_output=True, text=True)
    assert done.stdout == "3\n", done.stderr


CHAT = WITHOUT + """from quire.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_a_question_to_a_gguf_file_on_the_command_line_needs_no_more(smollm2: str) -> None:
    from quire.models.loader.source import resolve_model

    file = str(resolve_model(smollm2, progress=False).path)
    done = subprocess.run(
        [sys.executable, "-c", CHAT, OTHERS, "generate", "--chat", "--model", file, "--device", "cpu", "--max-tokens",
         "12", "What is the capital of France? Answer in one word."],
        capture_output=True, text=True, check=False)
    assert "Paris" in done.stdout, done.stderr
