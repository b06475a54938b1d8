"""The frames that a watcher of an engine gets, each with what has changed since the last.

Owners are labels: the number of a request since the engine started, and behind a dot the sequence where there are
several. No frame holds a token, a text, a name or a tenant; a block's hash is the start of a keyed one, so it can be
compared with others of the same engine and says nothing about the prompt.
"""

from __future__ import annotations

import msgspec


class BlockView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A block whose state has changed: held by so many; registered under this hash, behind that block."""

    block: int
    holders: int
    hash: str = ""
    """Empty: it is not in the prefix index."""
    parent: int = -1


class TableView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """The block table of one sequence in one cache group, from `start` on; earlier entries are as they were."""

    owner: str
    group: int
    start: int
    blocks: list[int]
    on_host: bool = False


class EntryView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One sequence's share of a step: tokens `start` to `start + num_tokens`."""

    owner: str
    start: int
    num_tokens: int
    kind: str
    """p: prompt (or what a preempted request computes again), d: decode, f: forked, draws from another's logits."""
    drafts: int = 0
    """Of its tokens, those that were guessed."""
    accepted: int = 0
    """Of these, those that turned out right."""
    parents: tuple[int, ...] = ()
    """Where they were a tree: of each the draft that it follows, -1: the text."""
    kept: tuple[int, ...] = ()
    """Of a tree, those that turned out right."""


class PreemptionView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    owner: str
    reason: str
    moved: bool
    """Its KV goes to the host; else it is computed again."""


class StepView(msgspec.Struct, frozen=True, gc=False):
    """One step of the timeline. Times are seconds since the view began."""

    step: int
    began: float
    ended: float
    prompt_tokens: int
    decode_tokens: int
    entries: list[EntryView]
    others: int = 0
    """Sequences left out of `entries`."""
    preempted: list[PreemptionView] = []
    copied: list[tuple[int, int, int]] = []
    """Copies on write: cache group, from block, to block."""
    moved_out: int = 0
    """Blocks copied to the host."""
    moved_in: int = 0


class RunningView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    owner: str
    prompt_tokens: int
    known_tokens: int
    computed_tokens: int
    cached_tokens: int
    preemptions: int


class WaitingView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    owner: str
    prompt_tokens: int
    known_tokens: int
    why: str
    """new, preempted (computes its KV again), swapped (its KV is on the host) or arriving (its KV is on the way)."""
    waited: float
    """Seconds since it arrived."""


class FirstToken(msgspec.Struct, array_like=True, frozen=True, gc=False):
    owner: str
    at: float
    seconds: float
    """Since its arrival."""


class StageStep(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """When one stage of a pipeline computed a step, in seconds since the view began."""

    stage: int
    step: int
    began: float
    ended: float


class RankView(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """One of the processes that share the model."""

    index: int
    stage: int
    tensor_rank: int
    memory: int
    """Resident bytes."""
    waited: float
    """Share of its steps' time in which it waited for other ranks."""
    steps: int
    last_step: float
    """Seconds that its last step took."""


class EngineFacts(msgspec.Struct, frozen=True):
    """What does not change while an engine runs."""

    title: str
    block_size: int
    num_blocks: int
    windows: list[int | None]
    """The sliding window of each cache group; None where it attends to everything."""
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    simulated: bool = False
    """A small engine without a model, which shows how scheduler and cache work."""
    num_stages: int = 1
    num_ranks: int = 1
    expert_layers: list[int] = []
    """Layers that have experts."""


class Frame(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that has changed. The first one, and every one asked for, is `full`: forget all before it."""

    at: float
    full: bool = False
    engine: int = 0
    """Which of the engines that are shown side by side."""
    facts: EngineFacts | None = None
    blocks: list[list[BlockView]] = []
    """By cache group."""
    host: list[list[BlockView]] = []
    tables: list[TableView] = []
    gone: list[tuple[str, bool]] = []
    """Sequences that hold nothing any more on the device, or (true) on the host."""
    running: list[RunningView] = []
    waiting: list[WaitingView] = []
    """Those whose KV is on the way first."""
    num_running: int = 0
    num_waiting: int = 0
    num_arriving: int = 0
    steps: list[StepView] = []
    skipped_steps: int = 0
    """Steps left out of `steps`, because there were too many of them."""
    stages: list[StageStep] = []
    """Steps of every stage that no frame has told of yet, in their order for each stage."""
    ranks: list[RankView] = []
    experts: list[str] = []
    """For each layer with experts a digit for each of them: 0 for one that did nothing since the last frame (in a full
    one: since the engine was started), 9 for the busiest. Empty where nobody did anything."""
    first_tokens: list[FirstToken] = []
    totals: dict[str, int | float] = {}
    cost: float = 0.0
    """Share of the engine's time that this view takes."""


encode_frame = msgspec.json.Encoder().encode
