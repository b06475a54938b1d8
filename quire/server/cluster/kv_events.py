"""GET /v1/kv/events: which prefixes the engine holds, the whole first and then each change, for routers.

Readers share one bounded log, and each has its own place in it: a slow one holds up no other, and gets the whole
again when the log has moved on. `?epoch=E&after=N` goes on behind change N of the engine's life E, if that is still
known. Names are keyed hashes: without the secret they say nothing about any prompt.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import parse_qs

from quire.engine.front.kv_log import Entry, KVLog
from quire.server.answer import EVENT_STREAM, sse
from quire.server.api_error import ApiError, refusal
from quire.server.generation import until_disconnect
from quire.server.service import RequestRecord, Service

VERSION = 1
_ALIVE_SECONDS = 2.0
_NAMES_AT_ONCE = 4096


async def kv_events(service: Service, record: RequestRecord, scope: Any, receive: Any, send: Any) -> None:
    log: KVLog | None = service.engine.kv_log
    if log is None:
        raise ApiError(404, "this server publishes no KV events: they need a secret that is shared with those who read "
                            "them (QUIRE_KV_SECRET or --kv-secret-file), and prefix caching", code="no_kv_events")
    epoch, after = _place(scope.get("query_string", b""))
    with service.kv_readers.take(record.tenant) as place:
        async with until_disconnect(receive, lambda: service.draining):
            await send({"type": "http.response.start", "status": 200, "headers": EVENT_STREAM})
            reader = _Reader(service, log, epoch, after)
            while not place.lost and not service.draining:
                body = reader.more()
                await send({"type": "http.response.body", "body": body or b": alive\n\n", "more_body": True})
                if not reader.behind:
                    await log.wait(_ALIVE_SECONDS)
            await send({"type": "http.response.body", "body": b"", "more_body": False})


class _Reader:
    """One reader's place in the log."""

    def __init__(self, service: Service, log: KVLog, epoch: str, after: int) -> None:
        self._service, self._log = service, log
        self._epoch, self._after = epoch, after
        self._started = False
        self._names: list[bytes] = []
        """Of the whole, those that are not sent yet."""

    @property
    def behind(self) -> bool:
        return bool(self._names) or self._after != self._log.sequence or self._epoch != self._log.epoch

    def more(self) -> bytes:
        """The next events; none where there is nothing new."""
        if self._names:
            return self._whole()
        entries = self._log.since(self._epoch, self._after)
        if entries is None:
            return self._begin(resumed=False)
        if not self._started:
            return self._begin(resumed=True)
        if entries:
            self._after = entries[-1].sequence
        return b"".join(map(_change, entries))

    def _begin(self, resumed: bool) -> bytes:
        """A resumed reader gets changes next, any other the whole."""
        self._started = True
        if not resumed:
            self._epoch, self._after = self._log.epoch, self._log.sequence
            self._names = list(self._log.held)
        engine = self._service.engine
        return sse({"type": "start", "version": VERSION, "epoch": self._epoch, "sequence": self._after,
                    "resumed": resumed, "names": len(self._names), "block_size": engine.block_size,
                    "secret": engine.kv_secret_name, "model": self._service.model_name})

    def _whole(self) -> bytes:
        """What is held, in pieces: it may be much, and others wait."""
        piece, self._names = self._names[:_NAMES_AT_ONCE], self._names[_NAMES_AT_ONCE:]
        return sse({"type": "held", "names": b"".join(piece).hex(), "left": len(self._names)})


def _change(entry: Entry) -> bytes:
    return sse({"type": "change", "sequence": entry.sequence, "stored": entry.stored.hex(),
                "evicted": entry.evicted.hex(), "cleared": entry.cleared})


def _place(query: bytes) -> tuple[str, int]:
    fields = parse_qs(query.decode("latin-1"), max_num_fields=8)
    epoch, after = fields.get("epoch", [""])[-1], fields.get("after", ["0"])[-1]
    if not re.fullmatch(r"[0-9]{1,18}", after):
        raise refusal("after", "must be the number of a change")
    return epoch, int(after)
