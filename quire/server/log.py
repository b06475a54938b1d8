"""The server's log: one line per event, as JSON or as text, each about a request with its id."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

LOGGER = logging.getLogger("quire.server")


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
        return json.dumps(line, ensure_ascii=False, default=str)


class TextLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(f"{name}={_shown(value)}" for name, value in getattr(record, "fields", {}).items()
                          if value is not None)
        when = datetime.fromtimestamp(record.created).strftime("%H:%M:%S")
        text = f"{when} {record.levelname.lower()} {record.getMessage()} {fields}".rstrip()
        return text + ("\n" + self.formatException(record.exc_info) if record.exc_info else "")


def _shown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return json.dumps(text, ensure_ascii=False) if " " in text or "\n" in text else text


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
