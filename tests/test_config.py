"""Options are checked by name, type, range and against each other; importing the package costs little."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from quire.config import (
    CPU_DEFAULTS,
    GPU_DEFAULTS,
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    default_cache_dir,
    option_fields,
)
from quire.errors import ConfigError
from quire.options import parse_bytes
from quire.server_config import GuardConfig


def refused(**options: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.create(**options)
    return caught.value


def test_flat_options_find_their_sections() -> None:
    config = EngineConfig.create(model="m", block_size=32, max_num_seqs=3, seed=9)
    assert (config.model.model, config.cache.block_size, config.scheduler.max_num_seqs) == ("m", 32, 3)
    assert config.model.seed == 9 and config.cache.enable_prefix_caching


def test_an_unknown_option_raises_with_the_nearest_known_one() -> None:
    error = refused(blocksize=3)
    assert str(error) == "unknown option 'blocksize'; did you mean 'block_size'?"
    assert error.field == "blocksize"


def test_an_unknown_option_unlike_any_other_raises_with_all_of_them() -> None:
    assert "known options: batching_policy, block_size" in str(refused(zzz=1))


@pytest.mark.parametrize(("options", "says"), [
    ({"block_size": "16"}, "block_size must be int, not str '16'"),
    ({"block_size": 16.0}, "block_size must be int, not float"),
    ({"block_size": True}, "block_size must be int, not bool"),
    ({"block_size": None}, "block_size may not be None"),
    ({"enable_prefix_caching": 1}, "enable_prefix_caching must be bool, not int"),
    ({"tokenizer": 5}, "tokenizer must be str | None, not int"),
    ({"dtype": "int3"}, "dtype must be one of auto, float32"),
    ({"scheduling_policy": "lifo"}, "scheduling_policy must be one of fcfs, priority"),
])
def test_a_value_of_the_wrong_kind_is_refused_by_name(options: dict[str, object], says: str) -> None:
    error = refused(**options)
    assert says in str(error) and error.field in options


@pytest.mark.parametrize(("name", "value"), [
    ("block_size", 0), ("block_size", 1025), ("num_kv_blocks", 0), ("max_num_seqs", 0), ("max_model_len", -1),
    ("max_num_batched_tokens", 0), ("max_num_partial_prefills", 0), ("long_prefill_token_threshold", -1),
    ("max_steps_in_flight", 0), ("num_threads", 0), ("seed", -1), ("seed", 1 << 64),
])
def test_a_value_out_of_range_is_refused_by_name(name: str, value: int) -> None:
    error = refused(**{name: value})
    assert f"{name} must be between" in str(error) and str(value) in str(error) and error.field == name


def test_two_sizes_of_the_pool_contradict_each_other() -> None:
    assert "not both" in str(refused(num_kv_blocks=4, kv_cache_memory="1GiB"))


@pytest.mark.parametrize(("text", "size"), [
    (1500, 1500), ("1500", 1500), ("1k", 1000), ("512MiB", 512 << 20), ("2GB", 2 * 10**9), ("7B", 7),
    (" 1.5 GiB ", 3 << 29),
    ("2TiB", 2 << 40),
])
def test_sizes_in_bytes_are_read(text: int | str, size: int) -> None:
    assert parse_bytes(text, "kv_cache_memory") == size


@pytest.mark.parametrize(
    "text", ["", "GiB", "-1", "1 parsec", "1..5G", "0", "0.1", 0, -5, "nan", "inf", "1e3"])
def test_what_is_no_size_is_refused_by_name(text: int | str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory must be") as caught:
        parse_bytes(text, "kv_cache_memory")
    assert caught.value.field == "kv_cache_memory"
    refused(kv_cache_memory=text)


def test_a_size_too_long_to_be_a_number_is_refused() -> None:
    refused(kv_cache_memory="9" * 400)


def test_configuration_cannot_change_behind_its_back() -> None:
    with pytest.raises(AttributeError):
        EngineConfig.create().cache.block_size = 3  # type: ignore[misc]


def test_every_option_is_described_once() -> None:
    names = [f.name for _, f in option_fields()]
    assert len(set(names)) == len(names)
    assert all(f.metadata["help"] for _, f in option_fields())
    assert {"block_size", "num_kv_blocks"} <= {f.name for section, f in option_fields() if section == "cache"}
    assert CacheConfig().block_size == 16


def test_the_cache_folder_follows_the_users_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("QUIRE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert default_cache_dir() == Path.home() / ".cache" / "quire"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert default_cache_dir() == Path("/x/quire")
    monkeypatch.setenv("QUIRE_CACHE", "/y")
    assert default_cache_dir() == Path("/y")


def test_importing_quire_takes_under_a_third_of_a_second_and_no_torch() -> None:
    code = """
import sys, time
start = time.process_time()
import quire
quire.SamplingParams, quire.EngineConfig, quire.QuireError
took = time.process_time() - start
print(took, "torch" in sys.modules, "numpy" in sys.modules)
"""
    command = [sys.executable, "-c", code]
    runs = [subprocess.run(command, capture_output=True, text=True, check=True).stdout.split() for _ in "123"]
    assert min(float(run[0]) for run in runs) < 0.3
    assert {tuple(run[1:]) for run in runs} == {("False", "False")}


def test_the_options_of_a_guarded_engine_are_taken_out_of_the_others_and_checked() -> None:
    guard, rest = GuardConfig.split({"model": "m", "max_waiting_requests": 3, "block_size": 8})
    assert guard.max_waiting_requests == 3 and rest == {"model": "m", "block_size": 8}
    for name, value in (("max_waiting_requests", -1), ("max_waiting_tokens", 1.5), ("heartbeat_timeout", 0.0),
                        ("step_timeout", float("nan")), ("request_timeout", "1"), ("max_restarts", None)):
        with pytest.raises(ConfigError, match=name) as caught:
            GuardConfig.split({name: value})
        assert caught.value.field == name
    # An engine in the caller's own process has nobody to guard it: there they are refused, not ignored.
    assert "unknown option 'max_waiting_requests'" in str(refused(max_waiting_requests=3))


def test_a_pretended_step_time_needs_the_executor_that_pretends() -> None:
    assert EngineConfig.create(executor="dummy", dummy_step_ms=3).model.dummy_step_ms == 3
    assert refused(dummy_step_ms=3.0).field == refused(executor="dummy", dummy_step_ms=-1.0).field == "dummy_step_ms"


def test_what_a_device_decides_is_said_once_and_told_in_the_help() -> None:
    options = {field.name: field for field in dataclasses.fields(SchedulerConfig)}
    for gpu, defaults in ((False, CPU_DEFAULTS), (True, GPU_DEFAULTS)):
        resolved = SchedulerConfig().resolved(gpu)
        assert resolved.max_num_seqs == SchedulerConfig().num_seqs(gpu) == defaults.max_num_seqs
        assert resolved.max_steps_in_flight == defaults.max_steps_in_flight
        assert SchedulerConfig(max_num_seqs=7).num_seqs(gpu) == 7
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_steps_in_flight"):
            assert f"{getattr(defaults, name)}" in options[name].metadata["help"]


def test_steps_of_a_pipeline_are_short() -> None:
    from quire.engine.assembly.engine import limits_of

    def budget(**options: object) -> int:
        return limits_of(EngineConfig.create(**options), max_model_len=4096).max_num_batched_tokens

    assert [budget(pipeline_parallel_size=stages) for stages in (1, 2, 3, 8)] == [512, 96, 96, 96]
    assert budget(pipeline_parallel_size=2, max_num_seqs=301) == 151  # half of those that decode
    assert budget(tensor_parallel_size=2) == 512
    assert budget(pipeline_parallel_size=2, max_num_batched_tokens=700) == 700
    assert budget(pipeline_parallel_size=2, enable_chunked_prefill=False) == 4096  # a whole prompt
