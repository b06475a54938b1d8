"""Downloads a model into the cache and prints where it is. What is there already is not fetched again.

MODEL is a short name (`quire models` lists them) or the id of a hub repository: org/name, or
org/name:QUANT for one of several GGUF files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from quire.errors import DownloadError
from quire.models.loader.catalog import CATALOG
from quire.models.loader.hub import fetch_from_hub, looks_like_hub_id
from quire.models.loader.pull import cached_file, pull, say

EXAMPLES = (
    "examples:\n"
    "  quire pull smollm2-135m\n"
    "  quire pull gemma3-270m\n"
    "  quire pull Qwen/Qwen3-0.6B --cache-dir /data/models"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="short name or hub id")
    parser.add_argument(
        "--cache-dir", metavar="FOLDER", help="where to keep it (default: the user's cache folder)"
    )
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress bar")


def run(args: argparse.Namespace) -> int:
    print(_path(args.model, args.cache_dir, progress=not args.quiet))
    return 0


def _path(model: str, cache_dir: str | None, progress: bool) -> Path:
    entry = CATALOG.get(model)
    if entry is not None:
        found = cached_file(entry, cache_dir)
        if found is None:
            return pull(model, cache_dir=cache_dir, progress=progress)
        if entry.terms:  # they hold for every use, so they are shown every time
            say(entry.terms)
        return found
    if Path(model).expanduser().exists():
        print(f"{model} is on this machine already", file=sys.stderr)
        return Path(model)
    if looks_like_hub_id(model):
        hub_cache = None if cache_dir is None else Path(cache_dir).expanduser() / "hub"
        return fetch_from_hub(model, cache_dir=hub_cache, progress=progress)
    raise DownloadError(
        f"there is no model {model!r} to fetch: it is none of {', '.join(CATALOG)} nor a hub id org/name"
    )
