"""OpenAI batch files: read the requests, remember which are answered, append each answer as it comes.

The output file is the only memory: a run that was killed goes on where it stood, and no finished line is done again.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from quire.errors import InvalidRequestError

PASSING = (401, 403, 429, 500, 502, 503, 504)
"""Answers that say nothing of the request itself: too many at once, an engine that restarts, a wrong key."""
PATHS = ("/v1/chat/completions", "/v1/completions")
_LONGEST_LINE = 16 << 20


@dataclass(frozen=True, slots=True)
class BatchLine:
    """One request of a batch file."""

    number: int
    custom_id: str
    path: str
    body: dict[str, Any]


def read_batch(path: Path) -> Iterator[BatchLine]:
    """The requests of a file in order; the first line that is not a request raises an error with its number."""
    seen: dict[str, int] = {}
    try:
        with path.open("rb") as lines:
            for number, text in enumerate(lines, 1):
                if text.strip():
                    line = _parse(path, number, text)
                    if line.custom_id in seen:
                        raise _wrong(path, number, f"custom_id {line.custom_id!r} is that of line "
                                                   f"{seen[line.custom_id]} too: ids must differ")
                    seen[line.custom_id] = number
                    yield line
    except OSError as error:
        raise InvalidRequestError(f"cannot read the batch {path}: {error.strerror}", "input_file") from error


def _parse(path: Path, number: int, text: bytes) -> BatchLine:
    if len(text) > _LONGEST_LINE:
        raise _wrong(path, number, f"a request of {len(text):,} bytes, at most {_LONGEST_LINE:,} are taken")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _wrong(path, number, f"not JSON ({error})") from error
    if not isinstance(found, dict):
        raise _wrong(path, number, "not a JSON object")
    custom_id, method, url, body = (found.get(key) for key in ("custom_id", "method", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        raise _wrong(path, number, "custom_id must be a text that is not empty")
    if method != "POST":
        raise _wrong(path, number, f"method must be POST, not {method!r}")
    if url not in PATHS:
        raise _wrong(path, number, f"url must be one of {', '.join(PATHS)}, not {url!r}")
    if not isinstance(body, dict):
        raise _wrong(path, number, "body must be a JSON object, the request itself")
    if body.get("stream"):
        raise _wrong(path, number, "stream cannot be set in a batch: the answer is one line")
    return BatchLine(number, custom_id, str(url), body)


def _wrong(path: Path, number: int, what: str) -> InvalidRequestError:
    return InvalidRequestError(f"line {number} of {path}: {what}", "input_file")


class BatchOutput:
    """The file of answers, one line each in the order in which they come."""

    def __init__(self, path: Path, *, fresh: bool = False) -> None:
        self.path = path
        try:
            self.finished: dict[str, str | None] = {} if fresh else _finished(path)
            """By custom_id: None where the request was answered, or why it was refused."""
            self._file = path.open("wb" if fresh else "ab")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InvalidRequestError(f"another run is writing its answers to {path}", "output_file") from error
        except OSError as error:
            raise InvalidRequestError(f"cannot write the answers to {path}: {error.strerror}", "output_file") from error

    def write(self, line: BatchLine, request_id: str, status: int, body: Any) -> None:
        """Append an answer; it is on its way to the disk when this returns."""
        failed = None if status == 200 else {"code": str(status), "message": _message(body)}
        record = {"id": f"batch_req_{request_id}", "custom_id": line.custom_id,
                  "response": {"status_code": status, "request_id": request_id, "body": body}, "error": failed}
        self._file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")
        self._file.flush()
        self.finished[line.custom_id] = _refusal(record)

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        os.fsync(self._file.fileno())
        self._file.close()


def _refusal(record: dict[str, Any]) -> str | None:
    status = record["response"]["status_code"]
    return None if status == 200 else f"{status}: {(record.get('error') or {}).get('message', 'refused')}"


def _finished(path: Path) -> dict[str, str | None]:
    """Ids with an answer in the file. Taken out is what is none: a line torn by a kill, a passing refusal."""
    if not path.exists():
        return {}
    found: dict[str, str | None] = {}
    kept: list[bytes] = []
    lines = path.read_bytes().splitlines(keepends=True)
    for number, text in enumerate(lines, 1):
        if not text.endswith(b"\n"):
            break
        try:
            record = json.loads(text)
            custom_id, status, refusal = record["custom_id"], record["response"]["status_code"], _refusal(record)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidRequestError(
                f"line {number} of {path} is no answer of a batch: name another output file, or start anew with "
                "--overwrite", "output_file") from error
        if status not in PASSING:
            found[custom_id] = refusal
            kept.append(text)
    if len(kept) < len(lines):
        beside = path.with_name(path.name + ".part")
        beside.write_bytes(b"".join(kept))
        beside.replace(path)
    return found


def _message(body: Any) -> str:
    error = body.get("error") if isinstance(body, dict) else None
    return str(error.get("message", error)) if isinstance(error, dict) else str(body)[:300]
