"""API keys: read from a file or a variable, compared in constant time, each a tenant of its own."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable
from pathlib import Path

from quire.errors import ConfigError
from quire.server_config import ServerConfig, api_keys_of_environment

MIN_KEY_LENGTH = 8


class ApiKeys:
    """Who may ask. Empty: everybody."""

    def __init__(self, keys: Iterable[tuple[str | None, str]] = ()) -> None:
        self._digests: list[tuple[bytes, str]] = []
        names: set[str] = set()
        for name, key in keys:
            digest = hashlib.sha256(key.encode()).digest()
            if any(digest == other for other, _ in self._digests):
                raise ConfigError("the same API key is given twice: remove one", field="api_key_file")
            name = name or f"key-{digest.hex()[:8]}"
            if name in names:
                raise ConfigError(f"two API keys have the name {name!r}: rename one", field="api_key_file")
            names.add(name)
            self._digests.append((digest, name))

    @classmethod
    def of(cls, config: ServerConfig) -> ApiKeys:
        if config.api_key_file is None:
            words = [word.strip() for word in api_keys_of_environment().split(",")]
            return cls((None, _checked(word, "$QUIRE_API_KEYS")) for word in words if word)
        try:
            lines = Path(config.api_key_file).read_text().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {config.api_key_file} cannot be read: {error}",
                              field="api_key_file") from error
        keys = [_parse(line, number, config.api_key_file) for number, line in enumerate(lines, start=1)
                if line.strip() and not line.strip().startswith("#")]
        if not keys:
            raise ConfigError(f"api_key_file {config.api_key_file} holds no key: add one, or leave the option out",
                              field="api_key_file")
        return cls(keys)

    def __len__(self) -> int:
        return len(self._digests)

    def tenant(self, authorization: bytes | None) -> str | None:
        """The name of the key in an `Authorization: Bearer …` header; None where it is none of ours.

        Every key is compared, whole digests in constant time: how long it takes says nothing about any key.
        """
        if authorization is None:
            return None
        scheme, _, key = authorization.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = None
        for known, name in self._digests:
            if hmac.compare_digest(digest, known):
                found = name
        return found if scheme.lower() == b"bearer" else None


def _parse(line: str, number: int, path: str) -> tuple[str | None, str]:
    words = line.split()
    if len(words) > 2:
        raise ConfigError(f"line {number} of {path} has {len(words)} words: a key, or a name and a key, are wanted",
                          field="api_key_file")
    return (words[0] if len(words) == 2 else None), _checked(words[-1], f"line {number} of {path}")


def _checked(key: str, where: str) -> str:
    if len(key) < MIN_KEY_LENGTH or not key.isascii() or not key.isprintable():
        raise ConfigError(f"{where} has a key that is too short to be one or not plain ASCII: take at least "
                          f"{MIN_KEY_LENGTH} characters", field="api_key_file")
    return key
