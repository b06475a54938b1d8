"""Brings a model up for a command: download first, with its bar, then load, with a line that says so."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from quire.cli.terminal import DIM, styled

if TYPE_CHECKING:
    from quire.llm import LLM


def open_llm(options: dict[str, Any], *, quiet: bool = False) -> LLM:
    """An engine with these options. What it says on the way goes to stderr, if that is a terminal."""
    from quire.config import EngineConfig

    config = EngineConfig.create(**options)  # wrong options are refused before anything is fetched
    fetch(config.model.model, config.model.cache_dir)
    talk = not quiet and sys.stderr.isatty()
    started = time.perf_counter()
    if talk:
        print(styled(f"loading {config.model.model} …", DIM, sys.stderr), end="", file=sys.stderr, flush=True)
    try:
        with _everything_stays():
            from quire.llm import LLM

            llm = LLM(**options)
    finally:
        if talk:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
    if talk:
        taken = time.perf_counter() - started
        line = f"{config.model.model} loaded in {taken:.1f} s, context of {llm.max_model_len:,} tokens"
        print(styled(line, DIM, sys.stderr), file=sys.stderr, flush=True)
    return llm


@contextmanager
def _everything_stays() -> Iterator[None]:
    """What is imported and loaded inside lives as long as the process: the garbage collector neither walks through it
    meanwhile, which takes a tenth of the time, nor ever after."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def fetch(model: str, cache_dir: str | None) -> None:
    """Download a model of the catalog before torch is imported, so that the bar is there at once."""
    from pathlib import Path

    from quire.models.loader.catalog import CATALOG
    from quire.models.loader.pull import cached_file, pull, say

    entry = CATALOG.get(model)
    if entry is None or Path(model).exists() or cached_file(entry, cache_dir) is not None:
        return
    say(f"{model} is not on this machine yet: fetching {entry.download_bytes / 1e6:.0f} MB, once")
    pull(model, cache_dir=cache_dir, progress=True)
