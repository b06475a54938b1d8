"""What groups of options are made of: fields with a description, types checked, sizes in bytes, secrets read."""

from __future__ import annotations

import dataclasses
import os
import re
from dataclasses import field
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

_MIN_SECRET_BYTES = 16


def option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """A dataclass field that carries the one description of an option."""
    return field(default=default, metadata={"help": help, "choices": choices})


_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int),
                                       "dict[str, object]": (dict,)}


def check_type(f: dataclasses.Field[Any], value: Any) -> None:
    names = [part.strip() for part in str(f.type).split("|")]
    if value is None:
        if "None" not in names:
            raise ConfigError(f"{f.name} may not be None", field=f.name)
        return
    allowed = tuple(t for n in names if n != "None" for t in _TYPES[n])
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise ConfigError(f"{f.name} must be {f.type}, not {type(value).__name__} {value!r}", field=f.name)
    choices = f.metadata.get("choices")
    if choices and value not in choices:
        raise ConfigError(f"{f.name} must be one of {', '.join(choices)}, not {value!r}", field=f.name)


_UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
          "t": 10**12, "tb": 10**12, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def parse_bytes(value: int | str, name: str) -> int:
    """`1500000`, `"512MiB"` or `"2GB"` as a number of bytes."""
    if isinstance(value, int):
        size = value
    else:
        match = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ConfigError(
                f"{name} must be a number of bytes or a text like 512MiB or 2GB, not {value!r}", field=name)
        size = int(min(float(match[1]) * _UNITS[match[2].lower()], 1 << 63))
    if not 0 < size < 1 << 63:
        raise ConfigError(f"{name} must be between 1 and 2**63 - 1 bytes, not {value!r:.40}", field=name)
    return size


def read_kv_secret(path: str | None) -> bytes | None:
    """The secret in a file, or in $QUIRE_KV_SECRET where no file is named."""
    if path is None:
        text, where = os.environ.get("QUIRE_KV_SECRET", ""), "$QUIRE_KV_SECRET"
        if not text.strip():
            return None
    else:
        where = f"kv_secret_file {path}"
        try:
            text = Path(path).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{where} cannot be read: {error}", field="kv_secret_file") from error
    secret = text.strip().encode()
    if len(secret) < _MIN_SECRET_BYTES:
        raise ConfigError(f"{where} holds {len(secret)} characters, too few for a secret: take at least "
                          f"{_MIN_SECRET_BYTES}, as from `openssl rand -hex 32`", field="kv_secret_file")
    return secret
