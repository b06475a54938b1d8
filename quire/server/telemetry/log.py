"""The server's log: one line per event, as JSON or as text, each about a request with its id."""

from __future__ import annotations

import json
import logging
import re
import sys
from datetime import UTC, datetime
from typing import Any

LOGGER = logging.getLogger("quire.server")
_UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]")
"""Control characters, and those that change the direction of what stands around them: a terminal would obey them."""
_QUOTED = re.compile(r"[\s\"\\]|" + _UNPRINTABLE.pattern)


def event(level: int, name: str, **fields: Any) -> None:
    """Log `name` with what is known about it. Prompts and outputs are never logged."""
    if LOGGER.isEnabledFor(level):
        LOGGER.log(level, name, extra={"fields": fields})


class JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
                "level": record.levelname.lower(), "event": record.getMessage(), "logger": record.name,
                **getattr(record, "fields", {})}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return _printable(json.dumps(line, ensure_ascii=False, default=str))


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_shown(value)}" for name, value in getattr(record, "fields", {}).items()
                          if value is not None)
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        text = _printable(f"{when} {record.levelname.lower()} {record.getMessage()} {fields}".rstrip())
        if record.exc_info:
            text += "\n" + "\n".join(_printable(line) for line in self.formatException(record.exc_info).split("\n"))
        return text


def _shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if _QUOTED.search(text) else text


def _printable(text: str) -> str:
    """With escapes, as JSON writes them, for what a terminal would not print but obey."""
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def set_up(form: str, level: str) -> None:
    """Send what Quire and uvicorn say to stderr in one form."""
    as_json = form == "json" or (form == "auto" and not sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines() if as_json else TextLines())
    for name in ("quire", "uvicorn.error"):
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.propagate = False
        logger.setLevel(level.upper())
    if level == "info":  # its own lines about starting and stopping say nothing that ours do not
        logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
