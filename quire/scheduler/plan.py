"""What one step does and what came of it: the only words that scheduler and worker exchange.

Both are plain data, so any transport can carry them. The scheduler names the rows: ranks agree on them without talking.
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
    """A sequence takes a row of the request table: all that the worker will ever need to know of it."""

    row: int
    token_ids: list[int]
    """Shared by the samples of one prompt that start together: not to be changed."""
    num_prompt_tokens: int
    params: SamplingParams
    seed: int
    sequence_index: int
    stop_ids: list[int] = field(default_factory=list)
    """Ids that may not be drawn before `min_tokens` (end of sequence and the request's stop ids)."""
    bad_words: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class BlockCopy:
    """Copy one block of the device onto another. A plan's copies are made in their order, before its forward pass."""

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
    """Move blocks between the device and a tier beside the steps. No step waits for it, nor does it wait for one.

    It begins after the copies of its plan. Until it has reported to be finished, no step reads or writes the device's
    blocks that it fills, and none writes those that it copies out.
    """

    number: int
    tier: str
    """A name such as "host"."""
    out: bool
    """From the device to the tier, else back."""
    moves: list[BlockMove] = field(default_factory=list)
    """Made and reported in this order."""


@dataclass(slots=True)
class TransferReport:
    """How far a transfer has come; every transfer that was started reports until it is finished."""

    number: int
    num_done: int
    """Moves made so far, counted from the first."""
    finished: bool = False
    """It will not touch the device's blocks any more."""
    error: str | None = None
    """Why the moves after `num_done` will not be made."""


@dataclass(slots=True)
class PlanEntry:
    """Compute `num_tokens` more tokens of the sequence in `row`, the first of them at position `start`.

    One that computes one token and draws (`decodes`) may have masks, and nothing else of what follows `sample`: drafts
    are among the tokens computed, whoever shares computes none, given tokens are of beams, which draw nothing, and
    prompt log-probabilities are of tokens before the last. Plans cross to ranks on that understanding.
    """

    row: int
    start: int
    num_tokens: int
    sample: bool
    """Draw the token after the last computed one (false in the middle of a prompt)."""
    drafts: tuple[int, ...] = ()
    """Proposed tokens: the last len(drafts) of `num_tokens`; their values are not in the table yet."""
    prompt_logprobs_from: int | None = None
    """First position of this chunk whose logits are wanted for prompt log-probabilities."""
    shares: int | None = None
    """Compute nothing (`num_tokens` is 0) and draw from the logits of that row, which gets to `start` now."""
    given: tuple[int, ...] = ()
    """Values of the last len(given) of the tokens, chosen by the scheduler: the row takes them over first."""
    candidates: int = 0
    """Draw nothing; report so many of the likeliest next tokens."""
    device_drafts: int = 0
    """Up to so many of the last of `num_tokens` are drafts that the worker proposes itself, with a model."""
    masks: bytes = b""
    """Which tokens may be drawn, one bit for each of the vocabulary in words of 32, and the same again after each
    draft; empty: all of them."""
    parents: tuple[int, ...] = ()
    """Of each draft, where they are a tree: the draft that it follows, -1: the text. A draft's place among `num_tokens`
    is its number, its position that of its parent and one. Empty: each follows the one before it."""
    draft_depth: int = 0
    """`device_drafts` are to be a tree, at most so deep; 0: a chain."""
    judged: tuple[int, tuple[int, ...], tuple[int, ...]] | None = None
    """Of drafts, once their result is known, for whoever watches: how many there were (the worker may have had fewer
    than it was asked for), and of a tree the parents and the nodes that were accepted."""

    @property
    def num_drafts(self) -> int:
        return len(self.drafts) or self.device_drafts

    @property
    def decodes(self) -> bool:
        return self.num_tokens == 1 and self.sample

    @property
    def says_more(self) -> bool:
        """More than a row, a range of tokens and whether to draw."""
        return bool(self.drafts or self.given or self.masks or self.candidates or self.device_drafts
                    or self.shares is not None or self.prompt_logprobs_from is not None)

    @property
    def drawn_at(self) -> int:
        """The position of the first token that is drawn."""
        return self.start + self.num_tokens - self.num_drafts


@dataclass(slots=True)
class StepPlan:
    """One step. The worker applies freed rows, starts, table diffs and copies, starts the transfers, then runs the
    entries. The transfers of a step that is lost report all the same, those that were not started as failed."""

    step: int
    freed_rows: list[int] = field(default_factory=list)
    starts: list[RowStart] = field(default_factory=list)
    diffs: Sequence[Diff] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    transfers: list[TransferStart] = field(default_factory=list)
    cancels: list[int] = field(default_factory=list)
    """Cancelled transfers: the worker may skip what it has not begun. Each still reports its end."""
    entries: list[PlanEntry] = field(default_factory=list)
    decoding: tuple[list[int], list[int]] | None = field(default=None, compare=False, repr=False)
    """Rows and starts of the entries, where every one of them decodes and has no masks: whoever plans knows, and ranks
    are told of such a step without a look at each entry. None: nothing is known. It does not cross to ranks."""
    drafts_follow: bool = field(default=False, compare=False, repr=False)
    """The next step will most likely ask for as many `device_drafts`: the worker may begin."""
    head_rests: bool = field(default=False, compare=False, repr=False)
    """No draft head will read these tokens: the worker need not keep their hidden states."""

    @property
    def num_tokens(self) -> int:
        return sum(entry.num_tokens for entry in self.entries)


@dataclass(slots=True)
class EntryResult:
    """What one plan entry gave: 0 to k tokens, or an error that concerns this sequence alone."""

    tokens: list[int] = field(default_factory=list)
    """With drafts: those that were accepted and one more. The KV of all but the last of them is valid."""
    logprobs: list[LogprobRecord] | None = None
    prompt_logprobs: list[LogprobRecord] | None = None
    candidates: list[tuple[int, float]] | None = None
    """(token, log-probability), likeliest first, where the entry asked for them."""
    error: str | None = None
    num_drafts: int = 0
    """Drafts that were judged: fewer than asked for where the worker had fewer to propose."""
    parents: tuple[int, ...] = ()
    """Of those, where they were a tree."""
    kept: tuple[int, ...] = ()
    """Nodes of that tree that were accepted, from the text on."""
    undraftable: bool = False
    """The worker's head was not fed with this text (`head_rests`): it will have no drafts."""


@dataclass(slots=True)
class StepResult:
    """Results in the order of the plan's entries."""

    step: int
    entries: list[EntryResult]
    arrivals: list[TransferReport] = field(default_factory=list)
    """News of transfers, of this plan or earlier ones. Without a step they come through the executor."""
