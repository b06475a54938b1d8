"""What two sides of this room count; the metrics report it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(slots=True)
class PeerStats:
    """Running totals."""

    prefills_taken: int = 0
    """Prompts that other engines asked for."""
    prefills_refused: int = 0
    prefills_done: int = 0
    prefills_failed: int = 0
    prefills_cancelled: int = 0
    tokens_sent: int = 0
    bytes_sent: int = 0
    prompts_asked: int = 0
    """Times that another engine was asked for a prompt."""
    prompts_arrived: int = 0
    prompts_failed: int = 0
    """Of the times asked: it was refused, broke off or was late."""
    prompts_computed_here: int = 0
    """Prompts computed here because no prefill engine could be reached."""
    tokens_received: int = 0
    links_lost: int = 0

    def flat(self) -> dict[str, int | float]:
        return {f"kv_{name}": value for name, value in dataclasses.asdict(self).items()}
