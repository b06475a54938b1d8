"""What was chosen for a step: which sequences get drafts, and which wait for a token to get some."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Drafts:
    """So many drafts for a sequence: these tokens, or, without any, whatever the worker proposes."""

    count: int
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Of a tree (`quire.speculation.tree`)."""
    depth: int = 0
    """Of a tree that the worker is to propose; 0: a chain."""
    ahead: int = 0
    """Slots for so many more are wanted, if any are to spare: the worker may propose on before these are judged."""


@dataclass(slots=True)
class DraftChoice:
    """By row: who gets drafts, and who waits for a token in flight to get some."""

    drafts: dict[int, Drafts] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
