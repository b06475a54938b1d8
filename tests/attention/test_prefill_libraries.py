"""A library that is installed attends for prompts only if it is right and faster than ours."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.attention import prefill_libraries
from quire.attention.backend import FreshPrompts
from quire.attention.prefill_libraries import Borrowed, pick

SECONDS = {"ours": 1.0, "fast": 0.5, "faster": 0.4, "even": 0.97, "wrong": 0.1}


def causal(q: Tensor, k: Tensor, v: Tensor, run: FreshPrompts, scale: float) -> Tensor:
    """Whole prompts by plain torch."""
    bounds = run.starts.tolist()
    group = q.shape[1] // k.shape[1]
    found = []
    for begin, end in pairwise(bounds):
        keys, values = (part[begin:end].repeat_interleave(group, 1).transpose(0, 1) for part in (k, v))
        query = q[begin:end].transpose(0, 1)
        found.append(
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, is_causal=True, scale=scale)
            .transpose(0, 1)
        )
    return torch.cat(found)


def inputs() -> tuple[Tensor, Tensor, Tensor, FreshPrompts, float]:
    starts = torch.tensor([0, 5, 12], dtype=torch.int32)
    return torch.randn(12, 4, 8), torch.randn(12, 2, 8), torch.randn(12, 2, 8), FreshPrompts(0, 12, starts, 7), 0.3


class Clock:
    """Times by name: whoever ran last is the one that is timed."""

    def __init__(self) -> None:
        self.ran = ""

    def named(self, name: str, run: Callable[..., Tensor]) -> Borrowed:
        def call(*args: Any) -> Tensor:
            self.ran = name
            return run(*args)

        return Borrowed(name, call)

    def __call__(self, call: Callable[[], Any]) -> float:
        call()
        return SECONDS[self.ran]


def picked(*names: str) -> str | None:
    clock = Clock()
    wrong = lambda *args: causal(*args) * 1.1  # noqa: E731
    ways = [clock.named(name, wrong if name == "wrong" else causal) for name in names]
    found = pick(ways, clock.named("ours", causal), inputs(), clock)
    return found.name if found else None


def test_the_fastest_that_is_right_is_taken() -> None:
    assert picked("fast", "wrong", "faster", "even") == "faster"


def test_nobody_is_taken_who_is_wrong_or_hardly_faster() -> None:
    assert picked("wrong", "even") is None
    assert picked() is None


def test_a_library_that_fails_is_passed_over() -> None:
    def broken(*args: Any) -> Tensor:
        raise RuntimeError("no kernel image for this device")

    clock = Clock()
    ways = [clock.named("faster", broken), clock.named("fast", causal)]
    found = pick(ways, clock.named("ours", causal), inputs(), clock)
    assert found is not None and found.name == "fast"


def test_only_what_imports_is_a_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Callable[..., Tensor]:
        raise ImportError("no module named flash_attn")

    monkeypatch.setattr(prefill_libraries, "_CANDIDATES", {"FlashAttention 2": missing, "mine": lambda: causal})
    assert [found.name for found in prefill_libraries.installed()] == ["mine"]


def test_torchs_own_is_known_by_its_real_signature(monkeypatch: pytest.MonkeyPatch) -> None:
    varlen = pytest.importorskip("torch.nn.attention.varlen")
    parameters = inspect.signature(varlen.varlen_attn).parameters
    assert {"window_size", "is_causal"} & set(parameters)
    assert "torch varlen_attn" in [found.name for found in prefill_libraries.installed()]


def test_the_trial_of_the_start_compares_with_our_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.kernels.triton.interpreter import prepare

    if torch.cuda.is_available() or not prepare():
        pytest.skip("the GPU suite runs this compiled; without Triton there is nothing to run")
    from quire.attention.triton import TritonAttention
    from quire.kernels.types import HeadShape

    attention = TritonAttention(torch.device("cpu"), torch.float16)
    monkeypatch.setattr(attention, "_dense", True)
    monkeypatch.setattr(prefill_libraries, "TRIAL_LENGTHS", (17, 40))
    times = iter([1.0, 0.5])
    monkeypatch.setattr(prefill_libraries, "device_clock", lambda call: next(times))
    right = Borrowed("right", lambda *args: causal(*args))
    attention.try_out(HeadShape(4, 2, 16), [right])
    assert attention.prefill_library is right
    times = iter([1.0, 0.5])
    attention.try_out(HeadShape(4, 2, 16), [Borrowed("wrong", lambda *args: causal(*args).flip(0))])
    assert attention.prefill_library is None


def _flash(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int,
           max_seqlen_k: int, *, softmax_scale: float, causal: bool) -> Tensor:  # fmt: skip
    """FlashAttention's function as its documentation has it."""
    assert causal and torch.equal(cu_seqlens_q, cu_seqlens_k) and max_seqlen_q == max_seqlen_k == 7
    return causal_of(q, k, v, cu_seqlens_q, softmax_scale)


class _Wrapper:
    """FlashInfer's wrapper for ragged prompts as its documentation has it."""

    plans = 0

    def __init__(self, workspace: Tensor, layout: str) -> None:
        assert layout == "NHD" and workspace.dtype == torch.uint8

    def plan(self, qo_indptr: Tensor, kv_indptr: Tensor, num_qo_heads: int, num_kv_heads: int, head_dim_qk: int, *,
             causal: bool, sm_scale: float, q_data_type: torch.dtype) -> None:  # fmt: skip
        assert causal and (num_qo_heads, num_kv_heads, head_dim_qk) == (4, 2, 8)
        self._starts, self._scale = qo_indptr, sm_scale
        _Wrapper.plans += 1

    def run(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return causal_of(q, k, v, self._starts, self._scale)


def causal_of(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, scale: float) -> Tensor:
    return causal(q, k, v, FreshPrompts(0, q.shape[0], starts, 7), scale)


@pytest.mark.parametrize(
    ("module", "contents", "name"),
    [
        ("flash_attn_interface", {"flash_attn_varlen_func": _flash}, "FlashAttention 3"),
        ("flash_attn", {"flash_attn_varlen_func": _flash}, "FlashAttention 2"),
        ("flashinfer", {"BatchPrefillWithRaggedKVCacheWrapper": _Wrapper}, "FlashInfer"),
    ],
)
def test_a_library_is_called_as_its_documentation_says(
    monkeypatch: pytest.MonkeyPatch, module: str, contents: dict[str, Any], name: str
) -> None:
    import sys
    from types import SimpleNamespace

    monkeypatch.setitem(sys.modules, module, SimpleNamespace(**contents))
    found = {library.name: library for library in prefill_libraries.installed()}[name]
    given = inputs()
    for _ in range(2):
        assert torch.equal(found(*given), causal(*given))
    assert _Wrapper.plans <= 1


@pytest.mark.parametrize("known", [{"scale", "window_size", "enable_gqa"}, {"is_causal"}, {"window_size"}])
def test_torchs_attention_is_called_as_its_version_wants(monkeypatch: pytest.MonkeyPatch, known: set[str]) -> None:
    """Whatever a version takes, the result is the same."""

    def function(q: Tensor, k: Tensor, v: Tensor, starts: Tensor, *rest: Any, **options: Any) -> Tensor:
        assert set(options) <= known
        assert options.get("window_size", (-1, 0)) == (-1, 0) and options.get("is_causal", True)
        assert options.get("enable_gqa", False) or q.shape[1] == k.shape[1]
        return causal(q, k, v, FreshPrompts(0, len(q), starts, rest[1]), options.get("scale", q.shape[2] ** -0.5))

    given = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    given += [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in sorted(known)]
    function.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch.nn.attention.varlen", types.SimpleNamespace(varlen_attn=function))
    q, k, v = torch.randn(12, 4, 16), torch.randn(12, 2, 16), torch.randn(12, 2, 16)
    trial = FreshPrompts(0, 12, torch.tensor([0, 5, 12], dtype=torch.int32), 7)
    got = prefill_libraries._torch_varlen()(q, k, v, trial, 0.3)
    assert torch.allclose(got, causal(q, k, v, trial, 0.3), atol=1e-5)


def test_a_verdict_is_kept_and_spares_the_next_start_the_trial(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tests.kernels.triton.interpreter import prepare

    if torch.cuda.is_available() or not prepare():
        pytest.skip("the GPU suite runs this compiled; without Triton there is nothing to run")
    from quire.attention.triton import TritonAttention
    from quire.kernels.types import HeadShape

    built: list[str] = []

    def build(name: str) -> Callable[[], Callable[..., Tensor]]:
        def make() -> Callable[..., Tensor]:
            built.append(name)
            return causal

        return make

    monkeypatch.setattr(prefill_libraries, "_CANDIDATES", {"slow": build("slow"), "fast": build("fast")})
    monkeypatch.setattr(prefill_libraries, "_MODULES", {})
    trials: list[list[str]] = []

    def trial(self: Any, shape: Any, candidates: Any) -> None:
        trials.append([candidate.name for candidate in candidates])
        self.prefill_library = candidates[-1]

    monkeypatch.setattr(TritonAttention, "try_out", trial)
    verdicts = prefill_libraries.Verdicts(tmp_path / "deep" / "attention.json")

    def start(heads: int) -> Any:
        attention = TritonAttention(torch.device("cpu"), torch.bfloat16)
        attention._dense = True
        attention.pick_up(HeadShape(heads, 2, 16), verdicts)
        return attention.prefill_library

    assert start(4).name == "fast" and trials == [["slow", "fast"]]
    built.clear()
    assert start(4).name == "fast" and len(trials) == 1 and built == ["fast"]
    start(8)
    assert len(trials) == 2
    monkeypatch.setattr(prefill_libraries, "_MODULES", {"slow": "no.such.module", "fast": "neither_this"})
    assert prefill_libraries.present() == [] and start(16) is None and len(trials) == 2


def test_a_file_of_verdicts_that_cannot_be_read_or_written_is_as_good_as_none(tmp_path: Path) -> None:
    path = tmp_path / "attention.json"
    for text in ("", "[]", "{bad", '{"q": 3}'):
        path.write_text(text)
        assert prefill_libraries.Verdicts(path).of("q") is None
    prefill_libraries.Verdicts(path).keep("q", "")
    assert prefill_libraries.Verdicts(path).of("q") == ""
    prefill_libraries.Verdicts(path / "inside a file").keep("q", "x")
    assert prefill_libraries.Verdicts(path / "inside a file").of("q") is None
