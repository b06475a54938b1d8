"""On a GPU: kernels that are compiled ahead, without it, are those that a start finds in Triton's cache."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

ROOT = str(Path(__file__).parents[2])
"""The package is not installed where a GPU's suite is run."""
START = """
import json, sys, torch
from triton import knobs
from quire.bench.gpu.cases import MODELS
from quire.config import CacheConfig
from quire.kernels.quantized import Rounding
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.worker import GpuWorker

found = []
knobs.compilation.listener = lambda *, src, cache_hit, **_: found.append((src.name, cache_hit))
given = json.loads(sys.argv[1])
rounding = given.pop("rounding", None)
options = DeviceOptions(max_model_len=4112, rounding=None if rounding is None else Rounding(**rounding), **given)
config = {**MODELS["8b"], "num_hidden_layers": 4}
GpuWorker(config, None, CacheConfig(num_kv_blocks=600), options).close()
print(json.dumps(found))
"""


@pytest.mark.parametrize("changes", [
    {}, {"deterministic": True}, {"rounding": {"bits": 4, "group": 128, "zero_points": True}},
    {"rounding": {"bits": None, "fp8": True}}], ids=["bf16", "deterministic", "int4", "fp8"])
def test_a_start_finds_every_kernel_that_was_compiled_ahead(tmp_path: Path, changes: dict[str, Any]) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("compiles ahead on Hopper alone")
    from quire.bench.gpu.cases import MODELS
    from quire.child import child_environment
    from quire.kernels.quantized import Rounding
    from quire.worker.gpu.compile_ahead.processes import Compilers
    from quire.worker.gpu.compile_ahead.request import CompileRequest
    from quire.worker.gpu.compile_ahead.start import CompileAhead, chip_of
    from quire.worker.gpu.options import DeviceOptions

    rounding = None if "rounding" not in changes else Rounding(**changes["rounding"])
    options = DeviceOptions(max_model_len=4112, **{**changes, "rounding": rounding})
    request = CompileRequest(MODELS["8b"], options, 16, chip_of(torch.cuda.get_device_properties(0)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        CompileAhead(request, Compilers(2, 4), tmp_path / "done").wait()
    assert (tmp_path / "done").exists()
    done = subprocess.run([sys.executable, "-c", START, json.dumps(changes)], capture_output=True, text=True,
                          env=child_environment(TRITON_CACHE_DIR=str(tmp_path), PYTHONPATH=ROOT), check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) > 40
    assert [name for name, kept in found if not kept] == []
