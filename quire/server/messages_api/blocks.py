"""Content blocks of a message, made piece by piece, with the events that tell of each step."""

from __future__ import annotations

from typing import Any

from quire.server.messages_api.tool_input import ToolInput
from quire.server.parsers.pieces import CallDelta, Piece, Thought

Event = dict[str, Any]


class ContentBlocks:
    """Takes pieces in their order; a piece of another kind than the last begins a new block."""

    def __init__(self, shows_thoughts: bool) -> None:
        self._shows_thoughts = shows_thoughts
        self._blocks: list[dict[str, Any]] = []
        self._input = ToolInput()
        self._open = ""
        """The type of the block that is being written."""

    def blocks(self) -> list[dict[str, Any]]:
        """All of them, when the last has ended."""
        return self._blocks

    def push(self, pieces: list[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, CallDelta):
                events += self._call(piece)
            elif isinstance(piece, Thought):
                events += self._text("thinking", piece.text) if self._shows_thoughts else []
            else:
                events += self._text("text", piece.text)
        return events

    def end(self) -> list[Event]:
        """Complete the block that is open."""
        if not self._open:
            return []
        kind, self._open = self._open, ""
        events: list[Event] = []
        if kind == "tool_use":
            self._blocks[-1]["input"] = self._input.value
            events = self._input_delta(self._input.end())
        elif kind == "thinking":
            events = [self._delta({"type": "signature_delta", "signature": ""})]
        return [*events, {"type": "content_block_stop", "index": len(self._blocks) - 1}]

    def _begin(self, kind: str, block: dict[str, Any]) -> list[Event]:
        events = self.end()
        self._open = kind
        self._blocks.append(block)
        return [*events, {"type": "content_block_start", "index": len(self._blocks) - 1, "content_block": dict(block)}]

    def _text(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        if self._open != kind:
            more = {"signature": ""} if kind == "thinking" else {"citations": None}
            events = self._begin(kind, {"type": kind, kind: "", **more})
        self._blocks[-1][kind] += text
        return [*events, self._delta({"type": f"{kind}_delta", kind: text})]

    def _call(self, piece: CallDelta) -> list[Event]:
        events: list[Event] = []
        if piece.id is not None:
            events = self._begin("tool_use", {"type": "tool_use", "id": piece.id, "name": piece.name, "input": {}})
            self._input = ToolInput()
        return events + self._input_delta(self._input.push(piece.arguments))

    def _input_delta(self, text: str) -> list[Event]:
        return [self._delta({"type": "input_json_delta", "partial_json": text})] if text else []

    def _delta(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

