"""Kernels compiled beside a start: what is asked for ahead is what the start runs, and nothing depends on it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire.bench.gpu.cases import MODELS
from quire.child import child_environment, module_command
from quire.config import CacheConfig, EngineConfig
from quire.engine.assembly import device as device_module
from quire.errors import ConfigError
from quire.kernels.decode_lengths import Lengths
from quire.kernels.quantized import Rounding
from quire.models.build import build_decoder, dummy_weights
from quire.ops.cpu import CpuOps
from quire.worker.gpu import launches as launches_module
from quire.worker.gpu import worker as worker_module
from quire.worker.gpu.compile_ahead import early as early_module
from quire.worker.gpu.compile_ahead import processes as processes_module
from quire.worker.gpu.compile_ahead import start as start_module
from quire.worker.gpu.compile_ahead.early import begin_early
from quire.worker.gpu.compile_ahead.processes import Compilers
from quire.worker.gpu.compile_ahead.request import Chip, CompileRequest
from quire.worker.gpu.compile_ahead.start import CompileAhead, compile_ahead
from quire.worker.gpu.options import DeviceOptions
from quire.worker.gpu.worker import GpuWorker
from tests.worker.gpu import engines

pytest.importorskip("triton")
SCRIPT = Path(__file__).with_name("asked_kernels.py")
HOPPER = Chip((9, 0), 132, 227 << 10)
SMALL = {**engines.QWEN3, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2,
         "num_key_value_heads": 1, "head_dim": 64, "max_position_embeddings": 1024}  # fmt: skip
OPTIONS = DeviceOptions(max_num_seqs=20, max_num_batched_tokens=640, max_model_len=600)


def environment(**changes: str) -> dict[str, str]:
    """As a user has it: kernels are compiled, not interpreted."""
    return {name: value for name, value in child_environment(**changes).items() if name != "TRITON_INTERPRET"}


def asked(request: CompileRequest) -> dict[str, Any]:
    done = subprocess.run([sys.executable, str(SCRIPT)], input=request.text(), capture_output=True, text=True,
                          env=environment(CUDA_VISIBLE_DEVICES=""), timeout=300, check=False)  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def launched_by_a_worker(monkeypatch: pytest.MonkeyPatch, options: DeviceOptions) -> set[str]:
    """Names of the kernels of all its steps, on tensors of the CPU, whose kernels are not run."""
    from quire.kernels.triton import branch, chains, draw, features, growth, inputs, sample
    from quire.ops.triton import TritonOps
    from tests.worker.gpu.launches import recorded

    def step_kernels(device: torch.device) -> Any:
        return launches_module.StepKernels(
            inputs.scatter, gather, draw.draw, lambda rows, vocab: draw.DrawScratch.allocate(rows, vocab, device),
            features.keep_features, features.fetch_features, branch.walk_trees, chains.follow_chains, growth.grow,
            growth.finish, sample, features)

    def gather(*args: Any) -> None:
        inputs.gather_inputs(*args)
        for part in (args[5], args[6], *args[7]):  # ids that the embedding can look up
            part.zero_()

    def build(config: Any, weights: Any, ops: Any, device: Any, dtype: torch.dtype, length: int, *_: Any) -> Any:
        return build_decoder(config, weights, ops, max_model_len=length, dtype=dtype)

    monkeypatch.setattr(launches_module, "step_kernels", step_kernels)
    monkeypatch.setattr(worker_module, "build_on_device", build)
    ops = TritonOps("cpu", torch.bfloat16, deterministic=options.deterministic, dense_prefill=options.dense_prefill,
                    prompt_rows=options.prompt_rows)  # fmt: skip
    with recorded() as found:
        worker = GpuWorker(SMALL, dummy_weights(SMALL), CacheConfig(num_kv_blocks=64), replace(options, device="cpu"),
                           ops=ops)  # fmt: skip
        with torch.inference_mode():
            worker._largest_step(16)
            worker._runner.caches = worker._cache.layers
            assert worker._runner.sampled is not None
            worker._runner.sampled.prepare()
            for decodes in (1, 12, 140):
                worker._warm_up(min(decodes, options.max_num_seqs - 1))
            worker.launch_captured()
    worker.close()
    return {entry.split("(")[0] for entry in found if entry.split("(")[0].endswith("_kernel")}


@pytest.mark.parametrize("deterministic", [False, True])
def test_kernels_asked_for_ahead_are_those_that_the_steps_of_a_start_launch(
    monkeypatch: pytest.MonkeyPatch, deterministic: bool
) -> None:
    """Of a chip without what CPU tensors do not have either."""
    if torch.cuda.is_available():
        pytest.skip("the recorder stands in for Triton's interpreter")
    options = replace(OPTIONS, deterministic=deterministic, dense_prefill=False, prompt_rows=False, launch_early=False)
    ahead = asked(CompileRequest(SMALL, options, 16, Chip((8, 0), 4, 227 << 10)))
    names = set(ahead["triton"].values())
    assert names == launched_by_a_worker(monkeypatch, options)
    assert len(ahead["triton"]) > len(names) > 15 and ahead["cuda"] == 0


def test_every_step_that_is_captured_is_launched_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.ops.triton import TritonOps

    if torch.cuda.is_available():
        pytest.skip("the GPU suite runs this compiled")
    options = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=6, max_num_batched_tokens=64,
                            max_model_len=70_000, draft_rows=18)  # fmt: skip
    core = engines.make_engine(engines.QWEN3 | {"max_position_embeddings": 70_000}, device=True, options=options,
                               ops=TritonOps("cpu", torch.float32), drafts=3)  # fmt: skip
    runner = core.executor._worker._runner  # type: ignore[attr-defined]
    runner.resting_rungs = [1, 2]
    captured: list[tuple[str, Any, bool]] = []
    launched: list[tuple[str, Any, bool]] = []

    def graphs(kind: str) -> Any:
        return SimpleNamespace(capture=lambda rungs, separate=False: captured.extend(
            (kind, rung, separate) for rung in rungs))

    def launch(kind: str) -> Any:
        return lambda rung, separate=False: launched.append((kind, rung, separate))

    runner.graphs = graphs("middle")
    runner._rungs_of[Lengths.SHORT] = [1, 2]
    runner._other_graphs = {kind: graphs(kind.value) for kind in runner._launches_of() if kind is not Lengths.MIDDLE}
    runner.padded._graphs = graphs("padded")
    with torch.inference_mode():
        runner.capture(options.max_num_seqs)
    for name, kind in (("decode", "middle"), ("decode_short", "short"), ("decode_long", "long"),
                       ("decode_resting", "resting"), ("decode_resting_short", "resting short")):  # fmt: skip
        monkeypatch.setattr(runner.launches, name, launch(kind))
    monkeypatch.setattr(runner.padded, "_run", launch("padded"))
    with torch.inference_mode():
        runner.launch_captured(options.max_num_seqs)
    assert {kind for kind, _, _ in captured} == {"middle", "short", "long", "resting", "resting short", "padded"}
    assert sorted(map(str, launched)) == sorted(map(str, captured))


def test_modes_of_8b_ask_for_the_kernels_that_they_are_known_for() -> None:
    """Those that only Hopper runs, in Gluon and in CUDA C: a start that took another kernel would show here."""
    modes = {
        "bf16": ({}, {"hopper_prefill_kernel", "few_decode_kernel", "prefetch_kernel", "_row_kernel"}, True),
        "int4": ({"rounding": Rounding(4, 128, True)}, {"codes_tiles_kernel", "codes_row_kernel"}, False),
        "deterministic": ({"deterministic": True}, {"fixed_tiles_kernel", "fixed_prefetch_kernel"}, True),
    }  # fmt: skip
    for changes, known, cuda in modes.values():
        found = asked(CompileRequest(MODELS["8b"], replace(DeviceOptions(max_model_len=4112), **changes), 16, HOPPER))
        assert known <= set(found["triton"].values())
        assert not cuda or found["cuda"] > 0


def test_a_share_compiles_into_tritons_cache_what_the_other_shares_leave(tmp_path: Path) -> None:
    """Kernels and the functions that launch them, which are linked with the driver's library."""
    driver, cache = tmp_path / "driver", tmp_path / "cache"
    driver.mkdir()
    (driver / "driver.c").write_text("".join(f"int {name}(void) {{ return 1; }}\n" for name in (
        "cuGetErrorString", "cuPointerGetAttribute", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuDeviceGet",
        "cuDevicePrimaryCtxRetain", "cuFuncSetAttribute")))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", driver / "libcuda.so.1", driver / "driver.c"], check=True)
    request = CompileRequest(SMALL, OPTIONS, 16, HOPPER)
    keys = list(asked(request)["triton"])
    command = module_command("quire.worker.gpu.compile_ahead.process", str(os.getpid()), "0", "30", "1")
    done = subprocess.run(
        command, input=request.text(), capture_output=True, text=True, timeout=300, check=False,
        env=environment(CUDA_VISIBLE_DEVICES="", TRITON_CACHE_DIR=str(cache), TRITON_LIBCUDA_PATH=str(driver),
                        LD_LIBRARY_PATH=str(driver)))  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    kept = {path.parent.name for path in cache.rglob("*.cubin") if path.name != "kernel.cubin"}
    assert len(kept) >= len(keys) // 30 - 1 and len(kept) < len(keys) // 4
    assert kept <= {_name(key) for key in keys}
    assert list(cache.rglob("__triton_launcher*.so"))


def _name(digest: str) -> str:
    from triton.runtime.cache import _base32  # Triton's name of a folder of its cache

    return str(_base32(digest))


# ---- the processes


REQUEST = CompileRequest(SMALL, OPTIONS, 16, HOPPER)


@pytest.fixture
def sleepers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Processes that wait for so many seconds when they were told, and end with a code, in place of those that
    compile."""

    def start(seconds: float, code: int) -> Compilers:
        program = f"import sys, time; sys.exit(0) if not sys.stdin.read() else time.sleep({seconds}); sys.exit({code})"
        monkeypatch.setattr(processes_module, "module_command", lambda *_: [sys.executable, "-c", program])
        return Compilers(2, 1)

    return start


def gone(pids: list[int]) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_start_waits_for_them_and_the_next_one_knows(sleepers: Any, tmp_path: Path) -> None:
    compilers = sleepers(0.1, 0)
    pids = compilers.pids
    CompileAhead(REQUEST, compilers, tmp_path / "done").wait()
    assert gone(pids) and (tmp_path / "done").exists()


@pytest.mark.parametrize("code", [1, 7])
def test_one_that_fails_is_passed_over(sleepers: Any, tmp_path: Path, code: int) -> None:
    CompileAhead(REQUEST, sleepers(0.0, code), tmp_path / "done").wait()
    assert not (tmp_path / "done").exists()


def test_one_that_hangs_is_ended(sleepers: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start_module, "_PATIENCE", 0.5)
    compilers = sleepers(600, 0)
    pids, began = compilers.pids, time.monotonic()
    CompileAhead(REQUEST, compilers, tmp_path / "done").wait()
    assert gone(pids) and time.monotonic() - began < 30 and not (tmp_path / "done").exists()


def test_a_start_that_fails_leaves_none_behind(sleepers: Any, tmp_path: Path) -> None:
    compilers = sleepers(600, 0)
    pids = compilers.pids
    ahead = CompileAhead(REQUEST, compilers, tmp_path / "done")
    ahead.close()
    ahead.close()
    assert gone(pids) and not (tmp_path / "done").exists()


def test_a_request_that_fills_a_pipe_arrives(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    said = tmp_path / "said"
    program = f"import sys; open({str(said)!r}, 'w').write(sys.stdin.read())"
    monkeypatch.setattr(processes_module, "module_command", lambda *_: [sys.executable, "-c", program])
    compilers = Compilers(1, 1)
    compilers.tell("x" * (1 << 20))
    assert compilers.wait(time.monotonic() + 60) is None and said.read_text() == "x" * (1 << 20)
    compilers.close()


def test_one_that_has_ended_before_it_was_told_stops_no_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(processes_module, "module_command",
                        lambda *_: [sys.executable, "-c", "raise SystemExit('no torch')"])
    compilers = Compilers(1, 1)
    compilers.wait(time.monotonic() + 60)
    with caplog.at_level("INFO"):
        CompileAhead(REQUEST, compilers, tmp_path / "done").wait()
    assert "no torch" in caplog.text and not (tmp_path / "done").exists()


def test_a_process_that_is_told_nothing_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    compilers = Compilers(1, 1)
    compilers.tell("")
    assert compilers.wait(time.monotonic() + 120) is None
    compilers.close()


def begun(monkeypatch: pytest.MonkeyPatch, folder: Path, cores: int = 16, major: int = 9, waiting: Any = None,
          **options: Any) -> Any:
    """What `compile_ahead` would tell whom on such a machine; None: nothing."""
    found: list[Any] = []
    chip = SimpleNamespace(major=major, minor=0, multi_processor_count=132, shared_memory_per_block_optin=227 << 10)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: chip)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    monkeypatch.setattr(start_module, "_cache", lambda: folder)
    monkeypatch.setattr(processes_module, "Compilers", lambda *given: given)
    monkeypatch.setattr(start_module, "CompileAhead", lambda *given: found.append(given))
    assert compile_ahead(SMALL, replace(OPTIONS, **options), 16, waiting) is None
    return found[0] if found else None


def test_it_is_done_where_there_are_cores_a_known_chip_and_a_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    request, compilers, marker = begun(monkeypatch, tmp_path / "new")
    assert CompileRequest.read(request.text()) == request
    assert compilers == (4, 4) and marker.parent == tmp_path / "new"
    assert begun(monkeypatch, tmp_path / "new", cores=8)[1] == (2, 4)
    assert begun(monkeypatch, tmp_path / "new", cores=192)[1] == (4, 4)
    assert begun(monkeypatch, tmp_path / "new", waiting="those that wait")[1] == "those that wait"
    assert begun(monkeypatch, tmp_path / "new", deterministic=True)[2] != marker
    marker.touch()
    assert begun(monkeypatch, tmp_path / "new") is None
    for changes in ({"cores": 4}, {"major": 8}, {"major": 10}, {"enforce_eager": True}):
        assert begun(monkeypatch, tmp_path / "other", **changes) is None
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert begun(monkeypatch, tmp_path / "other") is None


def test_what_it_cannot_find_out_stops_no_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert begun(monkeypatch, tmp_path / "file") is None


# ---- begun before torch is imported


@pytest.fixture
def first_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with a GPU, 16 cores and an empty cache: the cache."""
    (tmp_path / "driver").touch()
    monkeypatch.setattr(early_module, "_DRIVER", str(tmp_path / "driver"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(processes_module, "Compilers", lambda *given: given)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def early(**options: Any) -> Any:
    return begin_early(EngineConfig.create(model="m", load_format="dummy", **options))


def test_processes_are_begun_early_on_a_first_start_on_a_gpu(first_start: Path) -> None:
    assert early() == early(device="cuda", compile_ahead=True) == (4, 4)
    first_start.mkdir()
    assert early() == (4, 4)
    (first_start / "quire-0123").touch()
    assert early() is None, "another start has compiled ahead"


@pytest.mark.parametrize("options", [
    {"device": "cpu"}, {"compile_ahead": False}, {"enforce_eager": True}, {"tensor_parallel_size": 2},
    {"executor": "dummy"},
], ids=str)  # fmt: skip
def test_none_is_begun_early_where_the_config_has_no_use_for_it(first_start: Path, options: dict[str, Any]) -> None:
    assert early(**options) is None


def test_none_is_begun_early_without_a_driver_the_cores_or_that_triton(
    first_start: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(early_module, "_DRIVER", str(first_start / "none"))
        assert early() is None
    with monkeypatch.context() as patch:
        patch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
        assert early() is None
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "3.7.0")
        assert early() is None


@pytest.mark.parametrize("names", [(), ("TRITON_CACHE_DIR",), ("TRITON_HOME",), ("TRITON_CACHE_DIR", "TRITON_HOME")])
def test_the_cache_is_looked_for_where_triton_keeps_it(names: tuple[str, ...], tmp_path: Path) -> None:
    own = {name: value for name, value in environment().items() if not name.startswith("TRITON_")}
    own |= {name: str(tmp_path / name) for name in names} | {"HOME": str(tmp_path)}
    program = ("from triton import knobs; from quire.config import kernel_cache as ours; "
               "import os; print(os.path.normpath(knobs.cache.dir)); print(ours())")
    done = subprocess.run([sys.executable, "-c", program], env=own, capture_output=True, text=True, check=True)
    theirs, ours = done.stdout.split()
    assert theirs == ours


def test_looking_early_imports_no_torch() -> None:
    program = ("import sys; from quire.config import EngineConfig; "
               "from quire.worker.gpu.compile_ahead import early; early._DRIVER = '/'; "
               "early.begin_early(EngineConfig.create(model='m')); print('torch' in sys.modules)")
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True,
                          check=True)  # fmt: skip
    assert done.stdout.split() == ["False"]


# ---- in the start of an engine


def start_of_an_engine(
    monkeypatch: pytest.MonkeyPatch, fails: bool = False, stores_codes: bool = False, told: bool = True, **asked: Any
) -> list[str]:
    """What happens, in order. `told`: not on a machine where processes that wait have nothing to do."""
    called: list[str] = []
    waiting: Any = SimpleNamespace(close=lambda: called.append("end those that wait"))

    class Worker:
        arrivals = None

        def __init__(self, *_: Any, kernels_ready: Any, **__: Any) -> None:
            called.append("weights")
            if fails:
                raise MemoryError
            if kernels_ready is not None:
                kernels_ready()

        def expert_load(self) -> None:
            """For the executor."""

    def begin(config: Any, options: DeviceOptions, block_size: int, compilers: Any) -> Any:
        assert (config, options.max_model_len, block_size, compilers) == (SMALL, 600, 16, waiting)
        if not told:
            return None
        called.append("begin")
        return SimpleNamespace(wait=lambda: called.append("wait"), close=lambda: called.append("close"))

    monkeypatch.setattr(start_module, "compile_ahead", begin)
    monkeypatch.setattr(worker_module, "GpuWorker", Worker)
    config = EngineConfig.create(model="m", load_format="dummy", device="cuda", max_model_len=600,
                                 **{"compile_ahead": True, **asked})
    source: Any = SimpleNamespace(config=SMALL, stores_codes=stores_codes)
    with pytest.raises(MemoryError) if fails else nullcontext():
        device_module._gpu_worker(source, config, waiting)
    return called


def test_an_engine_waits_for_kernels_when_its_weights_are_there_and_ends_who_is_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert start_of_an_engine(monkeypatch) == ["begin", "weights", "wait", "close"]
    assert start_of_an_engine(monkeypatch, fails=True) == ["begin", "weights", "close"]
    assert start_of_an_engine(monkeypatch, told=False) == ["end those that wait", "weights"]
    assert start_of_an_engine(monkeypatch, stores_codes=True) == ["end those that wait", "weights"]
    assert start_of_an_engine(monkeypatch, compile_ahead=None) == ["begin", "weights", "wait", "close"]
    assert start_of_an_engine(monkeypatch, compile_ahead=False) == ["end those that wait", "weights"]


def test_a_worker_waits_for_kernels_once_before_a_step() -> None:
    waited: list[bool] = []
    options = DeviceOptions(device="cpu", dtype="float32", max_num_seqs=2, max_num_batched_tokens=40, max_model_len=60)
    GpuWorker(engines.QWEN3, dummy_weights(engines.QWEN3), CacheConfig(num_kv_blocks=8), options,
              ops=CpuOps(num_threads=1), kernels_ready=lambda: waited.append(True)).close()  # fmt: skip
    assert waited == [True]


@pytest.mark.parametrize(("gpu", "options", "said"), [
    (False, {}, "a CPU compiles nothing"), (True, {"tensor_parallel_size": 2}, "several ranks"),
    (True, {"enforce_eager": True}, "enforce_eager"),
])
def test_it_is_refused_where_nothing_would_be_compiled_ahead(
    monkeypatch: pytest.MonkeyPatch, gpu: bool, options: dict[str, Any], said: str
) -> None:
    monkeypatch.setattr(device_module, "missing_for_gpu", lambda: None if gpu else "no GPU")
    with pytest.raises(ConfigError, match=said) as caught:
        device_module.resolve(EngineConfig.create(model="m", compile_ahead=True, **options))
    assert caught.value.field == "compile_ahead"
    device_module.resolve(EngineConfig.create(model="m", **options))
