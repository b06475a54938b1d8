"""Where the numbers of a row that is sampled with more than a temperature lie, as kernels read them: int32 words.

They lie in one buffer: a head, the rows, changes of single logits, the tokens of bad words, masks. What lies behind
the rows begins wherever the head says, so that a captured launch serves steps of any content.
"""

from __future__ import annotations

import enum
from typing import Final

HEAD: Final = 16
"""Words before the rows."""
RING: Final = 0
"""In the head: the slot for what is drawn."""
NUM_CHANGES: Final = 1
CHANGES_AT: Final = 2
PREFIXES_AT: Final = 3
"""In the head: where the tokens of bad words begin."""
MASKS_AT: Final = 4

WORDS: Final = 20
"""Words of a row."""
PLACE: Final = 0
"""Its row of the logits."""
OWNER: Final = 1
"""Its row of the request table; negative: padding."""
POSITION: Final = 2
"""The position that is drawn."""
MASK: Final = 3
"""Number of the grammar's mask; -1: none."""
ALLOWED: Final = 4
"""Number of the mask of allowed ids; -1: none."""
SLOT: Final = 5
"""Row of the token counts; -1: no penalties."""
COUNTED: Final = 6
"""Positions before this one are counted already."""
NUM_PROMPT: Final = 7
TEMPERATURE: Final = 8
"""float32; 0: the likeliest token."""
LOG_MIN_P: Final = 9
SEED_LOW: Final = 10
SEED_HIGH: Final = 11
SEQ_INDEX: Final = 12
TOP_K: Final = 13
"""0: no limit."""
TOP_P: Final = 14
"""float64, two words; 2: no limit."""
REPETITION: Final = 16
FREQUENCY: Final = 17
PRESENCE: Final = 18
LOGPROBS: Final = 19
"""How many of the likeliest are reported beside the drawn token; -1: nothing is reported."""

CHANGE_WORDS: Final = 5
"""Of a change: row, token, what is added to its logit (float32; -inf: a ban), and the tokens that must have been drawn
just before: where they begin, how many."""

TOP: Final = 20
"""Most of the likeliest that are reported."""
REPORT_WORDS: Final = 3 + 2 * TOP
"""Of a report: token, log-probability, rank, ids of the likeliest, their log-probabilities."""


class Wants(enum.IntFlag):
    """Kinds of things that rows of a step ask for; each has launches of its own."""

    DRAW = 1
    TOP_K = 2
    """And perhaps top_p."""
    TOP_P = 4
    """Alone."""
    MASKS = 8
    CHANGES = 16
    PENALTIES = 32
    LOGPROBS = 64

    @property
    def edits(self) -> bool:
        return bool(self & (Wants.MASKS | Wants.CHANGES | Wants.PENALTIES))
