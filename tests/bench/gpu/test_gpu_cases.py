"""What the GPU's benchmark says of limits, kinds of kernels and accuracy, without a GPU."""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path
from typing import Any

import pytest

from quire.bench.gpu import command as gpu
from quire.bench.gpu import long_prompts
from quire.bench.gpu import tune as gpu_tune
from quire.bench.gpu.accuracy import Reading, compare, texts
from quire.bench.gpu.cases import (
    CASES,
    MODELS,
    READ_BANDWIDTH,
    distinct_experts,
    kind_of,
    least_by_kind,
    least_seconds,
    limits_of,
    requests_of,
    shares,
)
from quire.bench.gpu.engine import Run
from quire.models.registry import read_spec
from quire.worker.gpu.options import DeviceOptions


@pytest.mark.parametrize("case", CASES)
def test_kinds_of_work_add_up_to_the_limit_of_a_case(case: str) -> None:
    requests = requests_of(case)
    kinds = least_by_kind(MODELS["8b"], requests)
    together = sum(seconds for seconds, _ in kinds.values())
    # Apart they may take a little longer: in one step GEMMs may wait for FLOPs while attention reads.
    assert 0.999 < together / least_seconds(case, MODELS["8b"], requests) < 1.1


@pytest.mark.parametrize(("count", "length", "rate", "time"), [(1, 128_000, 14_872, 7.97), (8, 32_000, 32_921, 12.42)])
def test_long_prompts_and_their_limits(count: int, length: int, rate: float, time: float) -> None:
    """An H200 cannot read Qwen3-8B's prompts faster than that, nor its weights and keys for a token."""
    requests = long_prompts.requests_of(count, length)
    assert [len(each.prompt_token_ids) for each in requests] == [length] * count
    assert long_prompts.limits("8b", count, length) == pytest.approx((rate, time), rel=0.005)
    assert length + long_prompts.TOKENS <= min(long_prompts.MAX_MODEL_LEN,
                                               long_prompts.config_of("8b")["max_position_embeddings"])
    first, tokens = 2.0, long_prompts.TOKENS
    run = Run(first + 0.01 * (tokens - 1), first, count * length, count * tokens, 300, 0.0)
    assert long_prompts.figures(run) == pytest.approx((count * length / 2, 10.0))


def test_kernels_are_told_apart_by_name() -> None:
    names = {"nvjet_sm90_tst_192x192": "GEMM", "_row_kernel": "GEMM", "_decode_kernel": "decode attention",
             "cudnn_generated_fort_native_sdpa": "prefill attention", "_mixed_kernel": "prefill attention",
             "_rms_norm_kernel": "other", "prefetch_kernel": "GEMM", "_rope_decode_kernel": "decode attention",
             "_fresh_mixed_kernel": "prefill attention", "fixed_tiles_kernel": "GEMM", "_split_kernel": "other",
             "hopper_prefill_kernel": "prefill attention", "_tree_kernel": "GEMM",
             "cluster_decode": "decode attention"}  # fmt: skip
    assert {name: kind_of(name) for name in names} == names


def test_deterministic_runs_prefetch_unless_told_not_to() -> None:
    parser = argparse.ArgumentParser()
    gpu.add_arguments(parser)
    for given, wanted in (((), True), (("--fixed-prefetch",), True), (("--no-fixed-prefetch",), False)):
        args = parser.parse_args(["--deterministic", *given])
        assert gpu._options(args, 8, 64).fixed_prefetch is wanted
    assert DeviceOptions().fixed_prefetch


@pytest.mark.parametrize("model", MODELS)
def test_limits_count_the_weights_and_the_windows_that_the_engine_has(model: str) -> None:
    config = MODELS[model]
    limits, spec = limits_of(config), read_spec(config)
    matrices = sum(math.prod(shape) for shape in spec.parameters().values() if len(shape) > 1)
    if not config["tie_word_embeddings"]:
        matrices -= spec.vocab_size * spec.hidden_size
    assert limits.read_bytes(0) + limits.experts * limits.expert_bytes == pytest.approx(2 * matrices, rel=1e-6)
    windows = [layer.attention.window for layer in spec.layers]
    for tokens in (100, 512, 1000):
        assert limits.keys(tokens) == pytest.approx(statistics.mean(min(w or tokens, tokens) for w in windows))
        exact = statistics.mean(sum(min(w or n, n) for n in range(1, tokens + 1)) for w in windows)
        assert limits.scores(tokens) == pytest.approx(exact, rel=0.02)


def test_experts_are_read_as_often_as_rows_choose_them() -> None:
    """One row of Qwen3-30B-A3B reads 8 experts of a layer, 256 nearly all; the limit of case b is 1.4 ms a token."""
    assert distinct_experts(128, 8, 1) == pytest.approx(8) and 127.9 < distinct_experts(128, 8, 256) < 128
    config = MODELS["30b-a3b"]
    limits = limits_of(config)
    assert limits.read_bytes(0) + 128 * limits.expert_bytes == pytest.approx(60.4e9, rel=0.01)
    assert 1.2e-3 < limits.read_bytes(1) / READ_BANDWIDTH < 1.45e-3


def test_a_profile_names_the_share_of_what_limits_each_kind() -> None:
    least = {"GEMM": (0.5, "bandwidth"), "decode attention": (0.3, "bandwidth")}
    kinds = gpu._kinds({"nvjet_a": (0.6, 3), "prefetch_kernel": (0.4, 2), "_act_mul_kernel": (0.2, 1)}, 1.2, least)
    assert kinds["GEMM"] == {"seconds": 1.0, "share": 0.833, "share_of_bandwidth": 0.5}
    assert kinds["other"] == {"seconds": 0.2, "share": 0.167}
    assert "at 50% of bandwidth" in gpu._table([], kinds, 0.9)


def test_a_table_keeps_what_was_not_timed_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    path = tmp_path / "gemm_table.json"

    def entry(rows: int, kernel: str) -> dict[str, Any]:
        return {"rows": rows, "features": 8, "width": 4, "form": "plain", "kernel": kernel, "sizes": []}

    gpu_tune.write(str(path), [entry(1, "library"), entry(2, "library")])
    gpu_tune.write(str(path), [entry(1, "row")])
    found = json.loads(path.read_text())["gemms"]
    assert [(line["rows"], line["kernel"]) for line in found] == [(1, "row"), (2, "library")]


def test_readings_are_compared_position_by_position() -> None:
    want = Reading([-1.0, -2.0, -3.0, -4.0], [1, 2, 3, 4], [[1, 2], [3, 4]])
    got = Reading([-1.0, -2.5, -3.0, -4.0], [1, 9, 3, 4], [[1, 2], [3, 5]])
    line = compare("bfloat16", got, want)
    assert (line["moved_most"], line["other_likeliest"], line["answers_same"]) == (0.5, 0.25, 1)
    assert len(texts(5)) == 5


def test_a_kernel_that_was_launched_early_is_not_charged_for_its_waiting() -> None:
    spans = [("norm", 0.0, 2.0), ("gemm", 1.0, 5.0), ("norm", 4.5, 6.0), ("gemm", 8.0, 9.0), ("early", 8.2, 8.8)]
    assert shares(spans) == {"norm": (3.0, 2), "gemm": (4.0, 2), "early": (0.0, 1)}
