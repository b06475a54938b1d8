"""Other libraries' prefill attention for fresh prompts, used if it is installed, right and faster than ours.

Each candidate computes a small batch of prompts beside our own kernel: it must agree with it, and take at least a
twentieth less time. A candidate that fails or disagrees is skipped, with a line in the log. The winner is
kept in a file: importing a library to find out that it is slower takes seconds, which only the first start should pay.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.attention.backend import FreshPrompts, PrefillLibrary

TRIAL_LENGTHS = (1024, 700, 1300, 72, 1000)
_AGREES = 2e-2
_FASTER = 0.95
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A library's function behind our signature."""

    name: str
    run: Callable[[Tensor, Tensor, Tensor, FreshPrompts, float], Tensor]

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, prompts: FreshPrompts, scale: float) -> Tensor:
        return self.run(q, k, v, prompts, scale)


class Verdicts:
    """Winners of earlier trials on this machine, in a file. A file that cannot be read or written counts as empty."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def of(self, question: str) -> str | None:
        """The winner's name, "" for our own kernel, None if there was no trial yet."""
        found = self._read().get(question)
        return found if isinstance(found, str) else None

    def keep(self, question: str, winner: str) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.with_suffix(f".{os.getpid()}")
            written.write_text(json.dumps({**self._read(), question: winner}, indent=1), encoding="utf-8")
            written.replace(self._path)
        except OSError as error:
            _log.info("%s could not be saved: %s", self._path, error)

    def _read(self) -> dict[str, Any]:
        try:
            found = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def present() -> list[str]:
    """Names of the libraries that are here, found without importing them."""
    return [name for name in _CANDIDATES if name not in _MODULES or _is_here(_MODULES[name])]


def _is_here(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def installed(names: Iterable[str] | None = None) -> list[PrefillLibrary]:
    """FlashAttention 3 and 2, FlashInfer, torch's own: those of them that import here."""
    found: list[PrefillLibrary] = []
    for name in _CANDIDATES if names is None else names:
        try:
            found.append(Borrowed(name, _CANDIDATES[name]()))
        except (ImportError, AttributeError, OSError):
            continue
    return found


def pick(
    candidates: Iterable[PrefillLibrary],
    ours: Callable[[Tensor, Tensor, Tensor, FreshPrompts, float], Tensor],
    inputs: tuple[Tensor, Tensor, Tensor, FreshPrompts, float],
    clock: Callable[[Callable[[], Any]], float],
) -> PrefillLibrary | None:
    """The fastest of those that agree with `ours`, if it is worth the change; `clock` gives seconds per call."""
    want = ours(*inputs).float()
    best, least = None, clock(lambda: ours(*inputs)) * _FASTER
    for candidate in candidates:
        try:
            away = (candidate(*inputs).float() - want).norm() / want.norm()
            seconds = clock(lambda c=candidate: c(*inputs))  # type: ignore[misc]
        except Exception as error:
            _log.info("the attention library %s fails on this machine: %s", candidate.name, error)
            continue
        if not float(away) < _AGREES:
            _log.warning("the attention library %s gives wrong results on this machine (relative error %.2g): not used",
                         candidate.name, float(away))
        elif seconds < least:
            best, least = candidate, seconds
    return best


def device_clock(call: Callable[[], Any]) -> float:
    """Seconds of a call on the GPU, the least of five after one that is not counted."""
    times = []
    for _ in range(6):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return min(times[1:])


def _flash_attention_3() -> Callable[..., Tensor]:
    function = importlib.import_module("flash_attn_interface").flash_attn_varlen_func

    def run(q: Tensor, k: Tensor, v: Tensor, p: FreshPrompts, scale: float) -> Tensor:
        found = function(q, k, v, p.starts, p.starts, p.longest, p.longest, softmax_scale=scale, causal=True)
        return found[0] if isinstance(found, tuple) else found

    return run


def _flash_attention_2() -> Callable[..., Tensor]:
    function = importlib.import_module("flash_attn").flash_attn_varlen_func

    def run(q: Tensor, k: Tensor, v: Tensor, p: FreshPrompts, scale: float) -> Tensor:
        return function(q, k, v, p.starts, p.starts, p.longest, p.longest, softmax_scale=scale, causal=True)

    return run


def _flashinfer() -> Callable[..., Tensor]:
    wrapper = importlib.import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
    held: dict[str, Any] = {}

    def run(q: Tensor, k: Tensor, v: Tensor, p: FreshPrompts, scale: float) -> Tensor:
        if "wrapper" not in held:
            held["wrapper"] = wrapper(torch.empty(128 << 20, dtype=torch.uint8, device=q.device), "NHD")
        if held.get("planned") is not p:
            held["wrapper"].plan(
                p.starts, p.starts, q.shape[1], k.shape[1], q.shape[2], causal=True, sm_scale=scale, q_data_type=q.dtype
            )
            held["planned"] = p
        return held["wrapper"].run(q.contiguous(), k.contiguous(), v.contiguous())

    return run


def _torch_varlen() -> Callable[..., Tensor]:
    function = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    # What it takes has changed from version to version.
    known = inspect.signature(function).parameters
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}

    def run(q: Tensor, k: Tensor, v: Tensor, p: FreshPrompts, scale: float) -> Tensor:
        options = dict(causal)
        if "scale" in known:
            options["scale"] = scale
        else:
            q = q * (scale * q.shape[2] ** 0.5)
        if q.shape[1] != k.shape[1]:
            if "enable_gqa" in known:
                options["enable_gqa"] = True
            else:
                k, v = (part.repeat_interleave(q.shape[1] // part.shape[1], dim=1) for part in (k, v))
        return function(q, k, v, p.starts, p.starts, p.longest, p.longest, **options)

    return run


_CANDIDATES: dict[str, Callable[[], Callable[..., Tensor]]] = {
    "FlashAttention 3": _flash_attention_3,
    "FlashAttention 2": _flash_attention_2,
    "FlashInfer": _flashinfer,
    "torch varlen_attn": _torch_varlen,
}
_MODULES = {
    "FlashAttention 3": "flash_attn_interface",
    "FlashAttention 2": "flash_attn",
    "FlashInfer": "flashinfer",
    "torch varlen_attn": "torch.nn.attention.varlen",
}
