"""Decides, step by step, which sequences get drafts and how many; the scheduler's one door to speculation.

A draft token at some place is worth its chance of being accepted, and costs what one token more in the step
costs. Both are measured, so what pays is computed and not configured: the drafts with the best chances are
taken as long as tokens per second go up. Large batches, where a token more costs its full share, and texts
that nobody can guess end up without drafts by themselves.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire.speculation.acceptance import EvidenceOdds
from quire.speculation.choice import DraftChoice, Drafts
from quire.speculation.costs import StepCosts
from quire.speculation.growing import Grown, grow, in_order
from quire.speculation.pause import Pause
from quire.speculation.proposer import Proposal, Proposer, ProposerSource
from quire.speculation.stats import SpeculationStats
from quire.speculation.tree import TreeShape, depths

if TYPE_CHECKING:
    from quire.scheduler.draft import Planned
    from quire.scheduler.plan import EntryResult, PlanEntry
    from quire.scheduler.request import Sequence

_LEAST_GAIN = 1.03
"""Times the tokens per second without drafts that are expected before any are taken: beliefs are not exact."""
_LEAST_CHANCE = 0.02
"""Of a draft in a tree that is worth a thought."""
_WAIT_CHANCE = 0.5
"""Where steps overlap, a sequence waits for its last token only if its next draft is at least so likely."""
_READ_PER_STEP = 512
"""Tokens of long prompts, and of outputs to be kept, that proposers work through in a step: about a millisecond."""


@dataclass(slots=True)
class Load:
    """What a step of decoding sequences holds."""

    tokens: int
    drafts: int
    drafting: int
    """Sequences that have drafts."""
    behind: int = 0
    """Tokens that a draft model has to compute first, of text that it has not seen yet."""
    passes: float = 0
    """Of the draft model."""
    asked: tuple[int, ...] = ()
    """Drafts that each entry asks the model for, where it may have fewer to offer."""


class Speculator(ABC):
    """What the scheduler asks and tells. `times` may be filled beforehand by measuring steps."""

    def __init__(self, most: int, adaptive: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self.most = most
        """Drafts one after the other."""
        self.tree: TreeShape | None = None
        """Alternatives are offered too; its depth is `most`."""
        self.adaptive = adaptive
        self.most_in_step: int | None = None
        """Most drafts of all sequences together; None: what the step has room for."""
        self.drafts_ahead = False
        """The worker may propose drafts before it is known which of those before them were accepted."""
        self.times = StepCosts()
        self.stats = SpeculationStats()
        self._clock = clock
        self._in_flight: deque[tuple[Load | Pause | None, float, int]] = deque()
        """Each step under way (None: not of decoding alone), when it began, and its drafts."""
        self._last_done = float("-inf")
        self.overlaps = False
        """Steps are begun before others are done (seen, or said): the host's time between two of them is hidden but for
        drafts."""

    @property
    def most_drafts(self) -> int:
        """Of one sequence in one step."""
        return self.most if self.tree is None else self.tree.nodes

    @property
    def drafts_follow(self) -> bool:
        """The sequences that have just been given drafts will most likely get as many in the next step."""
        return False

    # ---- before a step

    def choose(self, decoding: list[Sequence], room: int) -> DraftChoice:
        """Drafts for sequences that lack one token, at most `room` in all."""
        able = [seq for seq in decoding if self._may_have_drafts(seq)]
        if self.most_in_step is not None:
            room = min(room, self.most_in_step)
        choice = DraftChoice()
        choice.waiting = self._waiting(able, len(decoding), room)
        known = [seq for seq in able if not seq.num_pending and seq.row not in choice.waiting]
        if known and room > 0:
            choice.drafts = self._choose(known, len(decoding) - len(choice.waiting), room)
        return choice

    def _may_have_drafts(self, seq: Sequence) -> bool:
        """It draws (beams are searched), has drawn before, and is not held for its siblings."""
        request = seq.request
        return request.beams is None and seq.held_at is None and seq.num_computed >= seq.num_prompt_tokens

    def _longest(self, seq: Sequence) -> int:
        """Drafts that can still matter: with the token after them they reach the sequence's end."""
        return min(self.most, seq.request.max_len - len(seq.tokens) - 1)

    def _largest(self, seq: Sequence) -> TreeShape | None:
        """The tree that a sequence may have: its nodes lie where the next tokens will. A grammar's masks are made along
        one branch, so under a grammar there are chains only."""
        longest = self._longest(seq)
        if self.tree is None or longest < 1 or seq.request.start_grammar is not None:
            return None
        room = seq.request.max_len - len(seq.tokens) - 1
        return TreeShape(self.tree.width, longest, min(self.tree.nodes, room))

    @abstractmethod
    def _choose(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]: ...

    @abstractmethod
    def _waiting(self, able: list[Sequence], num_decoding: int, room: int) -> set[int]:
        """Rows of those that may have drafts, but not in this step: of a token in flight nobody knows what follows."""

    # ---- when it runs

    def submitted(self, planned: list[Planned], single: bool = False) -> bool:
        """`single`: each computes one token and draws the next, without drafts. True if nobody will ask for drafts
        after the tokens of this step: the target need not keep what a head would read."""
        tokens = drafts = drafting = 0
        if single and planned:
            self._begun(Load(len(planned), 0, 0), 0)
            return False
        decoding = True
        for seq, entry, _ in planned:
            mine = self._own_drafts(entry)
            tokens += entry.num_tokens
            drafts += mine
            drafting += mine > 0
            decoding = decoding and entry.start >= seq.num_prompt_tokens and entry.num_tokens == 1 + entry.num_drafts
        self._begun(Load(tokens, drafts, drafting) if decoding and planned else None, drafts)
        return False

    def _begun(self, load: Load | None, drafts: int) -> None:
        self.overlaps = self.overlaps or bool(self._in_flight)
        self._in_flight.append((load, self._clock(), drafts))

    def _own_drafts(self, entry: PlanEntry) -> int:
        """Drafts whose proposal and cost are this speculator's own affair."""
        return entry.num_drafts

    def done(self, results: list[EntryResult] | None = None) -> bool:
        """The oldest step is back, or lost (None). False if `took` is not to be told of its tokens."""
        load, began, _ = self._in_flight.popleft()
        if isinstance(load, Pause):
            return self._paused_step_done(load, results is None)
        if load is not None and load.asked and results is not None:
            self._correct(load, [each.num_drafts for each in results])
        now = self._clock()
        seconds, gap = now - max(began, self._last_done), 0.0
        if began > self._last_done > 0.0:
            # Between two steps the host took its time: a step that waits for the one before it costs that too. More
            # than half of the step is somebody else's time.
            gap = min(began - self._last_done, seconds / 2)
        self._last_done = now
        if load is not None and seconds > 0.0 and results is not None:
            # Where steps overlap, drafts alone make others wait: without them there would have been no gap.
            self._observe(load, seconds, gap if load.drafts or not self.overlaps else 0.0)
        return True

    def _paused_step_done(self, pause: Pause, lost: bool) -> bool:
        """Of those speculators that pause."""
        raise NotImplementedError

    def _observe(self, load: Load, seconds: float, gap: float) -> None:
        """What a step took, and the host before it."""
        self.times.observe(load.tokens, seconds + gap)

    def _correct(self, load: Load, judged: list[int]) -> None:  # noqa: B027 (who looks drafts up knows how many)
        """There may have been fewer drafts than were asked for."""

    # ---- after it

    def took(self, seq: Sequence, entry: PlanEntry, result: EntryResult, accepted: int) -> None:
        """A step gave tokens: the drafts that were accepted, and one of the target's own, up to the sequence's end.

        Drafts after the end count as judged, since they were; as tokens they do not, and nobody learns their text.
        """
        if entry.start >= seq.num_prompt_tokens and entry.num_tokens == 1 + entry.num_drafts:
            self.stats.computed(len(result.tokens))
            counts = seq.request.counts
            counts.decode_steps += 1
            if result.num_drafts:
                self.stats.judged(offered_by_depth(result), accepted)
                counts.draft_tokens += result.num_drafts
                counts.accepted_tokens += accepted
        self._learn(seq, entry, accepted, result)

    @abstractmethod
    def _learn(self, seq: Sequence, entry: PlanEntry, accepted: int, result: EntryResult) -> None:
        """So many of the drafts that were judged were accepted."""

    def forget(self, seq: Sequence) -> None:  # noqa: B027 (some remember nothing)
        """The sequence has ended."""


def offered_by_depth(result: EntryResult) -> list[int]:
    """Drafts that were judged at each place after the text; in a tree several may be at one."""
    if not result.parents:
        return [1] * result.num_drafts
    found = [0] * max(depths(result.parents))
    for depth in depths(result.parents):
        found[depth - 1] += 1
    return found


@dataclass(slots=True)
class _Followed:
    """What is known of one sequence."""

    proposer: Proposer
    odds: list[EvidenceOdds]
    """Of the best alternative at a place, the second best, ...: one where no trees are offered."""

    def chance(self, evidence: int, rank: int) -> float:
        return self.odds[rank].estimate(evidence)


class LookupSpeculator(Speculator):
    """Drafts from a `ProposerSource`, which looks them up here on the host."""

    def __init__(self, source: ProposerSource, most: int, adaptive: bool = True,
                 clock: Callable[[], float] = time.perf_counter, tree: TreeShape | None = None) -> None:
        super().__init__(most, adaptive, clock)
        self.tree = tree
        self._source = source
        self._odds = [EvidenceOdds(rank=rank) for rank in range(1 if tree is None else tree.width)]
        self._followed: dict[Sequence, _Followed] = {}
        self._reading: dict[Sequence, Proposer] = {}
        """Proposers that may not have worked through all the tokens they were shown."""

    def _follow(self, seq: Sequence) -> _Followed:
        found = self._followed.get(seq)
        if found is None:
            domain = (seq.request.tenant, seq.request.cache_key)
            proposer = self._source.open(seq.tokens, seq.num_prompt_tokens, domain)
            found = self._followed[seq] = _Followed(proposer, [EvidenceOdds(engine) for engine in self._odds])
            self._reading[seq] = proposer
        return found

    def submitted(self, planned: list[Planned], single: bool = False) -> bool:
        super().submitted(planned, single)
        self.read(planned)
        return False

    def read(self, planned: list[Planned]) -> None:
        """Read on: a little of long prompts in every step, from the step that begins to compute them."""
        for seq, entry, _ in planned:
            if entry.start < seq.num_prompt_tokens and seq.request.beams is None:
                self._follow(seq)
        left = _READ_PER_STEP
        while self._reading and left > 0:
            seq, proposer = next(iter(self._reading.items()))
            cost = proposer.catch_up(left)
            if cost < left:
                del self._reading[seq]
            left -= cost
        if left > 0:
            self._source.catch_up(left)

    def _choose(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]:
        proposals: dict[int, Grown] = {}
        chances: list[tuple[float, int]] = []
        for seq in sequences:
            grown = self._grown(seq)
            if grown.tokens:
                proposals[seq.row] = grown
                chances.extend((chance, seq.row) for chance in grown.chances)
        # Chances fall along a draft and the sort is stable, so what is taken of one is a beginning of it.
        chances.sort(key=lambda pair: -pair[0])
        taken = self._best(chances[:room], num_decoding) if self.adaptive else min(room, len(chances))
        counts: dict[int, int] = {}
        for _, row in chances[:taken]:
            counts[row] = counts.get(row, 0) + 1
        found = {}
        for row, count in counts.items():
            tokens, parents = proposals[row].tokens[:count], proposals[row].parents[:count]
            found[row] = Drafts(count, *(in_order(tokens, parents) if parents else (tokens,)))
        return found

    def _grown(self, seq: Sequence) -> Grown:
        """A tree for a sequence, or a chain; likeliest drafts first."""
        followed, shape = self._follow(seq), self._largest(seq)
        if shape is not None:
            return grow(followed.proposer, followed.chance, shape, _LEAST_CHANCE if self.adaptive else 0.0)
        longest = self._longest(seq)
        proposal = followed.proposer.propose(longest) if longest > 0 else Proposal(())
        return Grown(proposal.tokens, (), tuple(followed.odds[0].chain(proposal.evidence, len(proposal.tokens))))

    def _best(self, chances: list[tuple[float, int]], num_decoding: int) -> int:
        """How many of the drafts, best first, give the most tokens per second."""
        if not self.times.known:
            return len(chances)
        best_rate = _LEAST_GAIN * num_decoding / self.times.estimate(num_decoding)
        best, tokens = 0, float(num_decoding)
        for count, (chance, _) in enumerate(chances, start=1):
            tokens += chance
            rate = tokens / self.times.estimate(num_decoding + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _waiting(self, able: list[Sequence], num_decoding: int, room: int) -> set[int]:
        return {seq.row for seq in able if seq.num_pending and self._worth_waiting(seq)}

    def _worth_waiting(self, seq: Sequence) -> bool:
        if not self.adaptive:
            return True
        followed = self._follow(seq)
        proposal = followed.proposer.propose(1)
        return bool(proposal.tokens) and followed.odds[0].estimate(proposal.evidence) >= _WAIT_CHANCE

    def _learn(self, seq: Sequence, entry: PlanEntry, accepted: int, result: EntryResult) -> None:
        """Every token shows what a lookup before it would have been worth, whether it was used or not."""
        followed = self._followed.get(seq)
        if followed is None:
            return
        for token in result.tokens:
            if self.tree is None:
                guess = followed.proposer.propose(1)
                if guess.tokens:
                    followed.odds[0].add(guess.evidence, guess.tokens[0] == token)
            else:
                cursor = followed.proposer.cursor()
                guesses = [] if cursor is None else followed.proposer.followers(cursor, self.tree.width)
                for odds, (guessed, evidence) in zip(followed.odds, guesses, strict=False):
                    odds.add(evidence, guessed == token)
            followed.proposer.extend((token,))

    def forget(self, seq: Sequence) -> None:
        followed = self._followed.pop(seq, None)
        if followed is not None:
            self._reading.pop(seq, None)
            if seq.num_output_tokens:
                followed.proposer.finish()
