"""A request, its sequences and their life cycle.

A sequence's progress is two numbers: how many tokens it knows and how many of them have KV. Everything that
happens to it (a prompt chunk, a prefix hit, a preemption, a rejected draft) changes one of these numbers.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from collections.abc import Sequence as TokenSequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from quire.errors import InvalidRequestError
from quire.kvcache.connector import Lookup
from quire.kvcache.swap import SwappedKV
from quire.kvcache.table import SequenceKV
from quire.kvcache.transfers import Fetch
from quire.sampling.params import SamplingParams
from quire.scheduler.beam import BeamSearch
from quire.scheduler.remote import RemotePrefill

if TYPE_CHECKING:
    from quire.structured.compiler import PendingGrammar
    from quire.structured.isolated import IsolatedSequence, RequestGrammar
    from quire.structured.matcher import SequenceGrammar


class Status(enum.Enum):
    COMPILING = "compiling"
    """Its grammar is being compiled."""
    WAITING = "waiting"
    ARRIVING = "arriving"
    """Its KV is being transferred from another tier or engine, or a tier was asked for it and has not answered."""
    RUNNING = "running"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True, eq=False)
class Sequence:
    """One token sequence of a request.

    `num_computed`: tokens whose KV exists, is being written by a submitted plan, or is in transfer. `num_confirmed`:
    those of them whose step has returned or whose transfer has reported. `num_pending`: tokens that a submitted plan
    draws and whose values are not known here yet.
    """

    request: Request
    index: int
    tokens: list[int]
    num_prompt_tokens: int
    num_computed: int = 0
    num_confirmed: int = 0
    num_pending: int = 0
    kv: SequenceKV = field(default_factory=SequenceKV)
    row: int = -1
    epoch: int = 0
    """Incremented when the sequence leaves its row, so that late results for the old row are dropped."""
    held_at: int | None = None
    """Compute no further than this many tokens until the siblings have been forked from it there."""
    grammar: SequenceGrammar | IsolatedSequence | None = None
    """State of the grammar that its output must follow; depends only on the output."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cumulative_logprob: float | None = None
    """For a finished beam: the sum of its tokens' log-probabilities."""
    score: float | None = None
    """`cumulative_logprob` after the length penalty."""
    lease: int | None = None
    """Number of the lease that keeps its blocks after it has ended."""

    @property
    def num_tokens(self) -> int:
        """Known tokens plus those in flight."""
        return len(self.tokens) + self.num_pending

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def num_to_compute(self) -> int:
        return len(self.tokens) + self.num_pending - self.num_computed

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def lacks_prompt_logprobs(self) -> bool:
        """Whether prompt log-probabilities were requested and some are not computed yet."""
        request = self.request
        return (request.params.prompt_logprobs is not None
                and request.prompt_logprobs_done < self.num_prompt_tokens - 1)

    def own_tokens(self) -> None:
        """Stop sharing the prompt's token list: the sequence takes a row and will append to its own copy."""
        if self.tokens is self.request.prompt_token_ids:
            self.tokens = list(self.tokens)

    def rewind(self) -> None:
        """Leave the row with no KV, as preemption by recompute does once the cache has the blocks back."""
        self.num_computed = self.num_confirmed = self.num_pending = 0
        self.row = -1
        self.held_at = None
        self.epoch += 1

    @property
    def num_keepable(self) -> int:
        """Tokens whose KV is known to be written and worth keeping. The last one is computed again to draw the next."""
        return min(self.num_confirmed, len(self.tokens) - 1)


@dataclass(slots=True)
class RequestCounts:
    """What happened to one request besides its tokens."""

    preemptions_for_memory: int = 0
    preemptions_for_priority: int = 0
    preemptions_for_loss: int = 0
    recomputed_tokens: int = 0
    swaps_out: int = 0
    swaps_in: int = 0
    swap_bytes: int = 0
    """Both directions."""
    copies_on_write: int = 0
    tier_hits: int = 0
    """Blocks fetched from another tier instead of computed."""
    tier_hit_tokens: int = 0
    decode_steps: int = 0
    """With speculation: steps that computed tokens after the prompt."""
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A prompt, its parameters and its sequences, which wait, run and finish together."""

    request_id: str
    prompt_token_ids: TokenSequence[int]
    params: SamplingParams
    seed: int
    arrival_time: float
    eos_token_ids: frozenset[int] = frozenset()
    bad_words: list[list[int]] = field(default_factory=list)
    priority: int = 0
    """Lower goes first, as in vLLM."""
    cache_key: bytes = b""
    """Root of the hash chain, made from the cache salt; requests with different keys never share KV."""
    tenant: str = ""
    """Whose token count it is charged to in a fair queue."""
    beams: BeamSearch | None = None
    """Beam search: steers the sequences, which are beams then. None: they are samples."""
    places: list[Sequence] = field(default_factory=list)
    """The sequence of each beam, by the beam's place in the search."""
    arrival_index: int = 0
    max_len: int = 0
    """Most tokens, including the prompt, that one of its sequences may have; set by the scheduler."""
    status: Status = Status.WAITING
    sequences: list[Sequence] = field(default_factory=list)
    num_cached_tokens: int | None = None
    """Prompt tokens found in the prefix cache when the request was first admitted."""
    num_preemptions: int = 0
    num_overtaken: int = 0
    """Requests behind it in the queue that started while it waited for something other than memory."""
    prompt_logprobs_done: int = 0
    grammar: PendingGrammar | RequestGrammar | None = None
    """The grammar of its output, which may still be compiling."""
    start_grammar: Callable[[frozenset[int]], SequenceGrammar | IsolatedSequence] | None = None
    """Starts that grammar for one sequence, given the ids that end it; set once it is compiled."""
    refusal: InvalidRequestError | None = None
    """Why its grammar cannot be used; known only once it is compiled."""
    first_scheduled_time: float | None = None
    swapped: SwappedKV | None = None
    """Its KV, if preemption moved it off the device."""
    lookups: list[Lookup] | None = None
    """Lookups in tiers that did not all answer at once."""
    fetch: Fetch | None = None
    """The KV transfer it waits for."""
    reservation: int | None = None
    """Number of the reservation into which another engine writes its KV."""
    remote: RemotePrefill | None = None
    """Set if another engine is asked to compute its prompt."""
    windows_kept_at: int | None = None
    """Keep the window blocks that a token at this position can see: they will be sent to another engine."""
    computes: bool = False
    """Its KV did not arrive: compute what the device lacks, and ask no tier again before it has run."""
    lease_seconds: float | None = None
    """Seconds that its finished sequences keep their blocks for another engine to fetch."""
    counts: RequestCounts = field(default_factory=RequestCounts)
    stop_ids: frozenset[int] = field(init=False)
    """Ids that end a sequence: the request's stop ids and, unless `ignore_eos`, the end-of-sequence ids."""
    width: int = field(init=False)
    """Most sequences it may have at once."""
    grouped: bool = field(init=False)
    """It may have several sequences, or beams."""
    worker_params: SamplingParams = field(init=False)
    """Parameters for the worker: with log-probabilities of drawn tokens if the sequences are ranked by them."""

    def __post_init__(self) -> None:
        params = self.params
        ids = frozenset(params.stop_token_ids or ())
        self.stop_ids = ids if params.ignore_eos else ids | self.eos_token_ids
        self.width = (params.best_of or params.n) if self.beams is None else self.beams.width
        self.grouped = self.width > 1 or self.beams is not None
        ranked = self.beams is None and params.ranked and params.logprobs is None
        self.worker_params = replace(params, logprobs=0) if ranked else params
        if not self.sequences:
            # A beam request starts with one sequence and forks after the first step; samples all exist from the start.
            for _ in range(self.width if self.beams is None else 1):
                self.add_sequence()
        self.places = self.sequences[:1]

    def add_sequence(self) -> Sequence:
        # Sequences that wait to be forked share the prompt's token list until they get a row (`Sequence.own_tokens`).
        first = not self.sequences
        tokens = list(self.prompt_token_ids) if first else self._shared_prompt()
        seq = Sequence(self, len(self.sequences), tokens, self.num_prompt_tokens, kv=SequenceKV(self.cache_key))
        self.sequences.append(seq)
        return seq

    def _shared_prompt(self) -> list[int]:
        if not isinstance(self.prompt_token_ids, list):
            self.prompt_token_ids = list(self.prompt_token_ids)
        return self.prompt_token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    def needs_values(self, known: int) -> bool:
        """Must tokens in flight return before more is planned? Yes at `max_len`, where nothing may be left to plan, and
        with a grammar, whose next mask depends on the token drawn."""
        return known >= self.max_len or self.start_grammar is not None

    def named_stop(self, token: int) -> int | None:
        """The token if it is one of the request's own stop ids, else None (end of sequence)."""
        return token if token in (self.params.stop_token_ids or ()) else None

    @property
    def rows_wanted(self) -> int:
        """Rows that it needs now or will need."""
        return len(self.live) if self.beams is None else self.width

    @property
    def live(self) -> list[Sequence]:
        return [seq for seq in self.sequences if seq.finish_reason is None]

    @property
    def finished(self) -> bool:
        return all(seq.finish_reason is not None for seq in self.sequences)
