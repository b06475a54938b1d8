"""Questions of a file: JSON lines, of which what is no question is refused by its line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from quire.errors import ConfigError

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_questions(path: Path) -> list[list[dict[str, str]]]:
    """Conversations: {"messages": [...]} or {"prompt": "..."}; what an assistant said last is left out."""
    found = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}", field="data") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}, is not JSON: {error}", field="data") from error
        wrong = _wrong(said)
        if wrong is not None:
            raise ConfigError(f"{path}, line {number}: {wrong}", field="data")
        messages = said.get("messages") or [{"role": "user", "content": said["prompt"]}]
        while messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        found.append(messages)
    if not found:
        raise ConfigError(f"{path} has no conversation in it", field="data")
    return found


def _wrong(said: Any) -> str | None:
    """Why a line is no conversation."""
    if not isinstance(said, dict):
        return f'needs an object with "messages" or "prompt", not {said!r:.80}'
    given = [name for name in ("messages", "prompt") if said.get(name) is not None]
    if len(given) != 1:
        return 'has both "messages" and "prompt": give one of them' if given else 'has neither "messages" nor "prompt"'
    value = said[given[0]]
    if given[0] == "messages":
        return _wrong_messages(value)
    if not isinstance(value, str):
        return f'"prompt" must be a text, not {value!r:.80}'
    return None if value.strip() else '"prompt" is empty'


def _wrong_messages(messages: Any) -> str | None:
    if not isinstance(messages, list):
        return f'"messages" must be a list, not {messages!r:.80}'
    for message in messages:
        if not isinstance(message, dict):
            return f"every message must be an object, not {message!r:.80}"
        if not all(isinstance(message.get(part), str) for part in ("role", "content")):
            return 'every message needs a "role" and a "content", both texts'
        if message["role"] not in _ROLES:
            return f"role {message['role']!r:.80} is none of {', '.join(_ROLES)}"
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if not asked:
        return '"messages" has no message of the user'
    return None if asked[-1].strip() else "the last message of the user is empty"
