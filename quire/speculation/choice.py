"""The choice for one step: which sequences get drafts, and which skip the step to get some later."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Drafts:
    """Drafts of one sequence: `tokens`, or, if empty, `count` drafts that the worker proposes."""

    count: int
    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    """Parents of a tree's nodes (`quire.speculation.tree`); empty: a chain."""
    depth: int = 0
    """Depth of the tree that the worker is to propose; 0: a chain."""
    ahead: int = 0
    """Slots for so many more drafts, if some are free: the worker may draft for the next step before this one is
    verified."""


@dataclass(slots=True)
class DraftChoice:
    """By row: sequences with drafts, and sequences that sit out this step because of a token or drafts in flight."""

    drafts: dict[int, Drafts] = field(default_factory=dict)
    waiting: set[int] = field(default_factory=set)
