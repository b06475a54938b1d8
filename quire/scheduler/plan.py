"""What one step computes and what it gave: all that scheduler and worker say to each other.

Both are plain data, so any transport can carry them. The scheduler assigns rows, so all ranks agree without talking.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.sampling.params import SamplingParams
from quire.sampling.token_logprobs import LogprobRecord
from quire.scheduler.diffs import Diff
from quire.scheduler.diffs import TableDiff as TableDiff

DEVICE = "device"
HOST = "host"


@dataclass(slots=True)
class RowStart:
    """A sequence takes a row of the request table. This is everything the worker needs to know about it."""

    row: int
    token_ids: list[int]
    """Shared by samples of one prompt that start together: do not modify."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    sequence_index: int
    stop_ids: list[int] = field(default_factory=list)
    """Ids that may not be drawn before `min_tokens` (end of sequence and the request's stop ids)."""
    bad_words: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class BlockCopy:
    """Copy one device block onto another. A plan's copies are made in order, before its forward pass."""

    group: int
    source: int
    target: int


@dataclass(slots=True)
class BlockMove:
    """One block of a transfer: its number on the device and its number in the tier."""

    group: int
    device: int
    tier: int


@dataclass(slots=True)
class TransferStart:
    """Move blocks between the device and a tier while steps run. No step waits for it, and it waits for no step.

    It begins after the copies of its plan. Until it reports that it has finished, no step reads or writes the device
    blocks that it fills, and no step writes the blocks that it copies out.
    """

    number: int
    tier: str
    """A name such as "host"."""
    out: bool
    """True: from the device to the tier. False: back."""
    moves: list[BlockMove] = field(default_factory=list)
    """Moves are made and reported in this order."""


@dataclass(slots=True)
class TransferReport:
    """Progress of a transfer; every transfer that was started reports until it has finished."""

    number: int
    num_done: int
    """Moves made so far, counted from the first."""
    finished: bool = False
    """It will not touch device blocks any more."""
    error: str | None = None
    """Why the moves after the first `num_done` will not be made."""


@dataclass(slots=True)
class PlanEntry:
    """Compute `num_tokens` more tokens of the sequence in `row`, the first of them at position `start`.

    An entry that computes one token and draws (`decodes`) can have `masks`, but no other field after `sample`: with
    drafts it computes more than one token, with `shares` none, beams (`given`, `candidates`) draw nothing, and prompt
    log-probabilities concern tokens before the last. The encoding of plans for ranks relies on this.
    """

    row: int
    start: int
    num_tokens: int
    sample: bool
    """Draw the token after the last computed one; false in the middle of a prompt."""
    drafts: tuple[int, ...] = ()
    """Draft tokens: the last len(drafts) of `num_tokens`. Their values are not in the request table yet."""
    prompt_logprobs_from: int | None = None
    """First position of this chunk whose logits are needed for prompt log-probabilities."""
    shares: int | None = None
    """Compute nothing (`num_tokens` is 0) and draw from the logits of this row, which reaches `start` in this step."""
    given: tuple[int, ...] = ()
    """Values of the last len(given) tokens, chosen by the scheduler (beams): written to the row before the forward."""
    candidates: int = 0
    """If not 0: draw nothing and report this many of the likeliest next tokens."""
    device_drafts: int = 0
    """Up to this many of the last of `num_tokens` are drafts that the worker proposes itself, with a model."""
    masks: bytes = b""
    """Which tokens may be drawn: one bit per token of the vocabulary, in 32-bit words; then one more such mask for each
    draft, applied after it. Empty: all tokens."""
    parents: tuple[int, ...] = ()
    """If the drafts are a tree: for each draft, the number of the draft that it follows, or -1 for the known text. A
    draft's position is one more than its parent's. Empty: a chain, where each follows the one before it."""
    draft_depth: int = 0
    """If not 0: `device_drafts` form a tree of at most this depth. 0: a chain."""
    judged: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    """Set once the drafts' result is known, for observers: the number of drafts (the worker may have proposed fewer
    than requested) and, for a tree, its parents and the accepted nodes."""

    @property
    def num_drafts(self) -> int:
        return len(self.drafts) or self.device_drafts

    @property
    def decodes(self) -> bool:
        return self.num_tokens == 1 and self.sample

    @property
    def says_more(self) -> bool:
        """Whether it has more than a row, a range of tokens and whether to draw."""
        return bool(self.drafts or self.given or self.masks or self.candidates or self.device_drafts
                    or self.shares is not None or self.prompt_logprobs_from is not None)

    @property
    def drawn_at(self) -> int:
        """Position of the first token that is drawn."""
        return self.start + self.num_tokens - self.num_drafts


@dataclass(slots=True)
class StepPlan:
    """One step. The worker applies freed rows, starts, table diffs and copies, starts the transfers, then runs the
    entries. Transfers of a lost step still report; those that were not started report as failed."""

    step: int
    freed_rows: list[int] = field(default_factory=list)
    starts: list[RowStart] = field(default_factory=list)
    diffs: Sequence[Diff] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    transfers: list[TransferStart] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    """Cancelled transfers: the worker may skip moves it has not begun. Each still reports its end."""
    entries: list[PlanEntry] = field(default_factory=list)
    decoding: tuple[list[int], list[int]] | None = field(default=None, compare=False, repr=False)
    """Rows and starts of the entries, if every entry decodes and none has masks: lets such a step be encoded for ranks
    without looking at each entry. None: not known. Not sent to ranks."""
    drafts_follow: bool = field(default=False, compare=False, repr=False)
    """The next step will most likely want the same `device_drafts`: the worker may begin them."""
    head_rests: bool = field(default=False, compare=False, repr=False)
    """No draft head will read these tokens: the worker need not keep their hidden states."""

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


@dataclass(slots=True)
class EntryResult:
    """The result of one plan entry: 0 to k tokens, or an error that concerns only this sequence."""

    tokens: list[int] = field(default_factory=list)
    """With drafts: the accepted ones and one more token. The KV of all but the last is valid."""
    logprobs: list[LogprobRecord] | None = None
    prompt_logprobs: list[LogprobRecord] | None = None
    candidates: list[tuple[int, float]] | None = None
    """(token, log-probability), likeliest first, if the entry asked for candidates."""
    error: str | None = None
    num_drafts: int = 0
    """Drafts that were verified; fewer than requested if the worker proposed fewer."""
    parents: tuple[int, ...] = ()
    """Their parents, if they were a tree."""
    kept: tuple[int, ...] = ()
    """Accepted nodes of that tree, from its root on."""
    undraftable: bool = False
    """The draft head has not seen this text (`head_rests`), so it will have no drafts."""


@dataclass(slots=True)
class StepResult:
    """Results in the order of the plan's entries."""

    step: int
    entries: list[EntryResult]
    arrivals: list[TransferReport] = field(default_factory=list)
    """Progress of transfers of this or earlier plans. Without a step, reports come through the executor."""
