"""Lists the models that have a short name, and what is on this machine: sizes and where."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import Any

from quire.cli.terminal import size_text
from quire.config import default_cache_dir
from quire.models.loader.catalog import CATALOG
from quire.models.loader.pull import cached_file

EXAMPLES = (
    "examples:\n"
    "  quire models\n"
    "  quire models --json\n\n"
    "Any GGUF file, Hugging Face folder or hub id serves as a model too: quire chat ./model.gguf"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cache-dir", metavar="FOLDER", help="where models are kept (default: the user's cache folder)"
    )
    parser.add_argument("--json", action="store_true", help="one JSON object per model")


def run(args: argparse.Namespace) -> int:
    rows = [*_catalog(args.cache_dir), *_from_hub(args.cache_dir)]
    if args.json:
        for row in rows:
            print(json.dumps(row))
        return 0
    print(_table([("NAME", "PARAMETERS", "LICENSE", "SIZE", "ON THIS MACHINE"), *map(_cells, rows)]))
    folder = Path(args.cache_dir).expanduser() if args.cache_dir else default_cache_dir()
    print(f"\ncache folder: {folder}")
    return 0


def _catalog(cache_dir: str | None) -> list[dict[str, Any]]:
    rows = []
    for entry in CATALOG.values():
        path = cached_file(entry, cache_dir)
        rows.append(
            {
                "name": entry.alias,
                "title": entry.title,
                "parameters": entry.parameters,
                "license": entry.license,
                "bytes": entry.size,
                "download_bytes": entry.download_bytes,
                "cached": path is not None,
                "path": None if path is None else str(path),
            }
        )
    return rows


def _from_hub(cache_dir: str | None) -> list[dict[str, Any]]:
    """Repositories that were fetched from a hub, by the names of their folders in the hub's cache."""
    if cache_dir is not None:
        folder = Path(cache_dir).expanduser() / "hub"
    else:
        try:
            from huggingface_hub.constants import HF_HUB_CACHE
        except ImportError:
            return []
        folder = Path(HF_HUB_CACHE)
    rows = []
    for path in sorted(folder.glob("models--*--*")):
        name = path.name.removeprefix("models--").replace("--", "/")
        rows.append(
            {
                "name": name,
                "title": name,
                "parameters": "",
                "license": "",
                "bytes": _size_of(path / "blobs"),
                "cached": True,
                "path": str(path),
            }
        )
    return rows


def _size_of(folder: Path) -> int:
    try:
        return sum(entry.stat().st_size for entry in os.scandir(folder))
    except OSError:
        return 0


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    where = (
        row["path"]
        if row["cached"]
        else f"no ({size_text(row['download_bytes'])} to download: quire pull {row['name']})"
    )
    return row["name"], row["parameters"], row["license"], size_text(row["bytes"]), where


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows
    )
