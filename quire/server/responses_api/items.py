"""Output items of a response, made piece by piece, with the events that tell of each step."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from typing import Any

from quire.server.parsers.pieces import CallDelta, Piece, Thought

Event = dict[str, Any]


class OutputItems:
    """Takes pieces in their order; a piece of another kind than the last begins a new item."""

    def __init__(self, namespaces: Mapping[str, str]) -> None:
        self.items: list[dict[str, Any]] = []
        self._namespaces = namespaces
        self._open: tuple[str, int] | None = None
        """Kind of the item that is being written and, of a call, which one it is."""

    def push(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, CallDelta):
                events += self._call(piece)
            else:
                events += self._text(piece.text, "reasoning" if isinstance(piece, Thought) else "message")
        return events

    def end(self, status: str = "completed") -> list[Event]:
        """Complete the item that is open; `status` is incomplete where it was cut off."""
        if self._open is None:
            return []
        kind, self._open = self._open[0], None
        item, place = self.items[-1], {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
        item["status"] = status
        events: list[Event] = []
        if kind == "function_call":
            events.append({"type": "response.function_call_arguments.done", **place, "name": item["name"],
                           "arguments": item["arguments"]})
        else:
            (part,) = item["content"]
            name = "output_text" if kind == "message" else "reasoning_text"
            done = {"type": f"response.{name}.done", **place, "content_index": 0, "text": part["text"]}
            events.append(done | ({"logprobs": []} if kind == "message" else {}))
            events.append({"type": "response.content_part.done", **place, "content_index": 0, "part": dict(part)})
        return [*events, {"type": "response.output_item.done", "output_index": place["output_index"],
                          "item": dict(item)}]

    def _begin(self, kind: str, number: int, item: dict[str, Any]) -> list[Event]:
        events = self.end()
        self._open = (kind, number)
        self.items.append(item)
        return [*events, {"type": "response.output_item.added", "output_index": len(self.items) - 1,
                          "item": {**item, **({"content": []} if "content" in item else {})}}]

    def _text(self, text: str, kind: str) -> list[Event]:
        events: list[Event] = []
        if self._open != (kind, 0):
            if kind == "message":
                part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
                item = {"id": f"msg_{secrets.token_hex(12)}", "type": "message", "role": "assistant",
                        "status": "in_progress", "content": [part]}
            else:
                part = {"type": "reasoning_text", "text": ""}
                item = {"id": f"rs_{secrets.token_hex(12)}", "type": "reasoning", "status": "in_progress",
                        "summary": [], "content": [part]}
            events += self._begin(kind, 0, item)
            events.append({"type": "response.content_part.added", **self._place(), "content_index": 0,
                           "part": dict(part)})
        self.items[-1]["content"][0]["text"] += text
        name = "output_text" if kind == "message" else "reasoning_text"
        delta: Event = {"type": f"response.{name}.delta", **self._place(), "content_index": 0, "delta": text}
        return [*events, delta | ({"logprobs": []} if kind == "message" else {})]

    def _call(self, piece: CallDelta) -> list[Event]:
        events: list[Event] = []
        if piece.id is not None:
            name = str(piece.name)
            space = self._namespaces.get(name)
            item = {"id": f"fc_{secrets.token_hex(12)}", "type": "function_call", "status": "in_progress",
                    "call_id": piece.id, "name": name if space is None else name.removeprefix(f"{space}."),
                    "arguments": "", **({} if space is None else {"namespace": space})}
            events += self._begin("function_call", piece.index, item)
        if piece.arguments:
            self.items[-1]["arguments"] += piece.arguments
            events.append({"type": "response.function_call_arguments.delta", **self._place(),
                           "delta": piece.arguments})
        return events

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}
