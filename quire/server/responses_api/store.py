"""Responses kept in memory for `previous_response_id`: so many, so large, each for the key that made it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire.server.api_error import ApiError


@dataclass(frozen=True, slots=True)
class StoredResponse:
    body: dict[str, Any]
    items: Sequence[Any]
    """The conversation up to and with this response, without instructions."""
    size: int


class ResponseStore:
    """The least recently used go first."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most, self._most_bytes = most, most_bytes
        self._kept: OrderedDict[tuple[str | None, str], StoredResponse] = OrderedDict()
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, tenant: str | None, name: str, response: StoredResponse) -> None:
        self._kept[tenant, name] = response
        self.num_bytes += response.size
        while self._kept and (len(self._kept) > self._most or self.num_bytes > self._most_bytes):
            _, gone = self._kept.popitem(last=False)
            self.num_bytes -= gone.size

    def get(self, tenant: str | None, name: str, param: str) -> StoredResponse:
        """Another key's response is none."""
        found = self._kept.get((tenant, name))
        if found is None:
            raise ApiError(404, f"there is no response {name!r:.200} here: it was not stored, has made room for newer "
                                "ones, or is of another key", param=param, code="response_not_found")
        self._kept.move_to_end((tenant, name))
        return found

    def remove(self, tenant: str | None, name: str) -> None:
        self.num_bytes -= self.get(tenant, name, "response_id").size
        del self._kept[tenant, name]
