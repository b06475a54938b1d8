"""Decides in each step which sequences get drafts and how many: the scheduler's interface to speculation.

A draft gains its probability of being accepted and costs one more token in the step. Both are measured: the likeliest
drafts are taken as long as expected tokens per second rise. So large batches, where a token costs its full share, and
unpredictable texts end up without drafts by themselves.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from quire.speculation.acceptance import EvidenceOdds, Trust
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
"""Least expected gain in tokens per second, as a factor, before any drafts are taken: estimates are not exact."""
_LEAST_GAIN_OF_SEVERAL = 1.08
"""The same for several sequences. Steps of a size that is rare cost more, and sequences no longer end together."""
_SAME_FOR = 16
"""Steps for which the least useful chances are kept."""
_LEAST_CHANCE = 0.02
"""Least probability of a tree's node: less likely candidates are not considered."""
_LEARNING = 4
"""Of the sequences without drafts about so many are learned from in a step: all of a large batch take 2% of it."""
_LIKELY = 0.4, 0.8
"""Tokens that were as likely as a useful draft say how far odds can be trusted; the least and the highest such bar."""
_SURE = 0.97
"""Where drafts would have to be likelier than this on average, lookups rest."""
_WAIT_CHANCE = 0.5
"""Where steps overlap, a sequence waits for its token in flight only if its next draft is at least so likely."""
_READ_PER_STEP = 512
"""Queued tokens (of long prompts and kept outputs) that proposers add in a step: about a millisecond."""


@dataclass(slots=True)
class Load:
    """What a step of decodes alone contains."""

    tokens: int
    drafts: int
    drafting: int
    """Sequences with drafts."""
    others: int = 0
    """Drafts that somebody else makes (`RuledLookups`)."""
    behind: int = 0
    """Tokens that a draft model has to catch up with first."""
    passes: float = 0
    """Passes of the draft model."""
    trees: bool = False
    """Some of its drafts are trees that a model grows."""
    asked: tuple[int, ...] = ()
    """Drafts that each entry asks the model for, where the model may offer fewer."""


class Speculator(ABC):
    """The interface to the scheduler. `times` may be filled at start by measuring steps."""

    def __init__(self, most: int, adaptive: bool = True, clock: Callable[[], float] = time.perf_counter,
                 gpu: bool = False) -> None:
        """`gpu`: steps are padded to some sizes."""
        self.most = most
        """Most drafts in a row."""
        self.tree: TreeShape | None = None
        """Limits of draft trees, of depth `most`; None: chains."""
        self.adaptive = adaptive
        self.most_in_step: int | None = None
        """Most drafts of all sequences together; None: what the step's budget allows."""
        self.drafts_ahead = False
        """The worker may draft for the next step before the host knows which drafts of this one were accepted."""
        self.times = StepCosts(padded=gpu)
        self.stats = SpeculationStats()
        self._clock = clock
        self._in_flight: deque[tuple[Load | Pause | None, float, int]] = deque()
        """Of each step in flight: its load (None: not decodes alone), when it began, its number of drafts."""
        self._last_done = float("-inf")
        self.overlaps = False
        """Steps overlap (as observed, or set): the host's time between them shows only where there are drafts."""

    @property
    def most_drafts(self) -> int:
        """Most drafts of one sequence in one step."""
        return self.most if self.tree is None else self.tree.nodes

    @property
    def drafts_follow(self) -> bool:
        """Whether sequences that just got drafts will most likely get as many in the next step."""
        return False

    # ---- before a step

    def choose(self, decoding: list[Sequence], room: int) -> DraftChoice:
        """Drafts for decoding sequences, at most `room` in all."""
        able = [seq for seq in decoding if self._may_have_drafts(seq)]
        room = self._limited(room)
        choice = DraftChoice()
        if room <= 0:
            return choice
        choice.waiting = self._waiting(able, len(decoding), room)
        known = [seq for seq in able if not seq.num_pending and seq.row not in choice.waiting]
        if known:
            choice.drafts = self._choose(known, len(decoding) - len(choice.waiting), room)
        return choice

    def _limited(self, room: int) -> int:
        return room if self.most_in_step is None else min(room, self.most_in_step)

    def _may_have_drafts(self, seq: Sequence) -> bool:
        """Whether it samples (not beam search), has finished its prompt, and is not held for its siblings."""
        request = seq.request
        return request.beams is None and seq.held_at is None and seq.num_computed >= seq.num_prompt_tokens

    def _under_grammars(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those that may have drafts. None of them has a token in flight: its mask needs that token."""
        return [seq for seq in sequences
                if seq.request.start_grammar is not None and not seq.num_pending and self._may_have_drafts(seq)]

    def _longest(self, seq: Sequence) -> int:
        """Most drafts in a row that can matter: with the token after them they reach the longest length."""
        return min(self.most, seq.request.max_len - len(seq.tokens) - 1)

    def _largest(self, seq: Sequence) -> TreeShape | None:
        """The largest tree for a sequence, whose nodes take the slots of its next tokens. None under a grammar: its
        masks are made along one branch."""
        longest = self._longest(seq)
        if self.tree is None or longest < 1 or seq.request.start_grammar is not None:
            return None
        room = seq.request.max_len - len(seq.tokens) - 1
        return TreeShape(self.tree.width, longest, min(self.tree.nodes, room))

    @abstractmethod
    def _choose(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]: ...

    @abstractmethod
    def _waiting(self, able: list[Sequence], num_decoding: int, room: int) -> set[int]:
        """Rows of `able` that sit out this step to get drafts later: a token in flight has to be known first."""

    # ---- when it runs

    def submitted(self, planned: list[Planned], single: bool = False) -> bool:
        """`single`: every entry is a plain decode of one token. True if the step need not store hidden states, since no
        drafts will follow it."""
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
        others = tokens - drafts - len(planned)
        self._begun(Load(tokens, drafts, drafting, others) if decoding and planned else None, drafts)
        return False

    def _begun(self, load: Load | None, drafts: int) -> None:
        self.overlaps = self.overlaps or bool(self._in_flight)
        self._in_flight.append((load, self._clock(), drafts))

    def _own_drafts(self, entry: PlanEntry) -> int:
        """Drafts of an entry that this speculator counts: those that its own proposers make."""
        return entry.num_drafts

    def done(self, results: list[EntryResult] | None = None) -> bool:
        """The oldest step has returned these results, or was lost (None). False if `took` need not be called."""
        load, began, _ = self._in_flight.popleft()
        if isinstance(load, Pause):
            return self._paused_step_done(load, began, results is None)
        if load is not None and load.asked and results is not None:
            self._correct(load, [each.num_drafts for each in results])
        seconds, gap = self._seconds_since(began)
        if load is not None and seconds > 0.0 and results is not None:
            # Where steps overlap only drafts cause gaps, since they have to wait for results.
            self._observe(load, seconds, gap if load.drafts or not self.overlaps else 0.0)
        return True

    def _seconds_since(self, began: float) -> tuple[float, float]:
        """Of the step that ends now: its time, and the host's before it. That is part of a step that waits for the one
        before; a gap beyond half of the step was spent on something else."""
        now, before = self._clock(), self._last_done
        self._last_done = now
        seconds = now - max(began, before)
        return seconds, min(began - before, seconds / 2) if began > before > 0.0 else 0.0

    def _paused_step_done(self, pause: Pause, began: float, lost: bool) -> bool:
        """Of those speculators that pause."""
        raise NotImplementedError

    def _observe(self, load: Load, seconds: float, gap: float) -> None:
        """Learn from a step's time and the host's time before it."""
        self.times.observe(load.tokens, seconds + gap)

    def _correct(self, load: Load, judged: list[int]) -> None:  # noqa: B027 (lookups offer as many as they say)
        """Correct a load where the model offered fewer drafts than it was asked for."""

    # ---- after it

    def took(self, seq: Sequence, entry: PlanEntry, result: EntryResult, accepted: int) -> None:
        """Take in a result: the accepted drafts and one token of the target, up to the sequence's end.

        Drafts after the end count as verified, but not as tokens, and proposers are not shown them.
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
        """Learn from a result, of whose drafts `accepted` were accepted."""

    def preempted(self) -> None:  # noqa: B027 (only those that pause)
        """A request is about to lose its rows: nothing comes of its steps in flight."""

    def forget(self, seq: Sequence) -> None:  # noqa: B027 (some keep no state)
        """The sequence has ended."""


def offered_by_depth(result: EntryResult) -> list[int]:
    """Drafts verified at each depth after the text; a tree may have several at one."""
    if not result.parents:
        return [1] * result.num_drafts
    found = [0] * max(depths(result.parents))
    for depth in depths(result.parents):
        found[depth - 1] += 1
    return found


def _least_gain(num_decoding: int) -> float:
    return _LEAST_GAIN if num_decoding == 1 else _LEAST_GAIN_OF_SEVERAL


@dataclass(slots=True)
class _Followed:
    """Proposer and acceptance of one sequence."""

    proposer: Proposer
    odds: list[EvidenceOdds]
    """By rank of an alternative: the best, the second best, ...; chains have only the first."""
    late: list[int] = field(default_factory=list)
    """Last tokens, which the proposer was not shown since lookups rest."""


class LookupSpeculator(Speculator):
    """Drafts that a `ProposerSource` looks up on the host."""

    def __init__(self, source: ProposerSource, most: int, adaptive: bool = True,
                 clock: Callable[[], float] = time.perf_counter, tree: TreeShape | None = None,
                 gpu: bool = False) -> None:
        super().__init__(most, adaptive, clock, gpu)
        self.tree = tree
        self._source = source
        self._odds = [EvidenceOdds(rank=rank) for rank in range(1 if tree is None else tree.width)]
        self._trust = Trust()
        self._followed: dict[Sequence, _Followed] = {}
        self._reading: dict[Sequence, Proposer] = {}
        """Proposers that may have queued tokens."""
        self._least_chances: dict[tuple[int, int], float] = {}
        """The least useful chance by sequences and room for drafts, in the last few steps."""
        self._steps = 0
        self._bar = 0.0
        """The one that was asked for last."""

    def _follow(self, seq: Sequence) -> _Followed:
        found = self._followed.get(seq)
        if found is None:
            domain = (seq.request.tenant, seq.request.cache_key)
            proposer = self._source.open(seq.tokens, seq.num_prompt_tokens, domain)
            found = self._followed[seq] = _Followed(proposer, [EvidenceOdds(engine) for engine in self._odds])
            self._reading[seq] = proposer
        if found.late and not self._hopeless:
            found.proposer.extend(found.late)
            found.late = []
            self._reading[seq] = found.proposer
        return found

    @property
    def _hopeless(self) -> bool:
        """Whether hardly any drafts could pay, as in large batches on a CPU, where the cost of lookups would show."""
        return self._bar > _SURE

    def submitted(self, planned: list[Planned], single: bool = False) -> bool:
        super().submitted(planned, single)
        self.read(planned)
        return False

    def read(self, planned: list[Planned]) -> None:
        """A step begins: add queued tokens, a few in every step, beginning with the step that begins a prompt."""
        self._trust.next_step()
        self._steps += 1
        if self._steps % _SAME_FOR == 0:
            self._least_chances.clear()
        for seq, entry, _ in planned:
            if entry.start < seq.num_prompt_tokens and seq.request.beams is None:
                self._follow(seq)
        left = 0 if self._hopeless else _READ_PER_STEP
        while self._reading and left > 0:
            seq, proposer = next(iter(self._reading.items()))
            cost = proposer.catch_up(left)
            if cost < left:
                del self._reading[seq]
            left -= cost
        if left > 0:
            self._source.catch_up(left)

    def _choose(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]:
        if self.adaptive and self._useless(sequences, num_decoding, room):
            return {}
        proposals: dict[int, Grown] = {}
        chances: list[tuple[float, int]] = []
        for seq in sequences:
            grown = self._grown(seq)
            if grown.tokens:
                proposals[seq.row] = grown
                chances.extend((chance, seq.row) for chance in grown.chances)
        # Chances fall along a chain and the sort is stable, so what is taken of each is a prefix.
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

    def _useless(self, sequences: list[Sequence], num_decoding: int, room: int) -> bool:
        """Whether not even drafts that were all as likely as the likeliest first one would pay: for most steps that
        says it all, in a fraction of the time."""
        if not self.times.known:
            return False
        least = self._least_useful(num_decoding, room)
        return self._rest(sequences) if least > _SURE else all(self._first_chance(seq) < least for seq in sequences)

    def _rest(self, sequences: list[Sequence]) -> bool:
        """Lookups rest, but what they say later, or keep of an output, begins here."""
        for seq in sequences:
            if seq not in self._followed:
                self._follow(seq)
        return True

    def _least_useful(self, num_decoding: int, room: int) -> float:
        """The least chance at which any number of drafts, all as likely, would pay."""
        least = self._least_chances.get((num_decoding, room))
        if least is None:
            drafts = min(room, num_decoding * self.most_drafts)
            least = self.times.least_chance(num_decoding, drafts, _least_gain(num_decoding))
            self._least_chances[num_decoding, room] = least
        self._bar = least
        return least

    def _first_chance(self, seq: Sequence) -> float:
        followed = self._follow(seq)
        guess = followed.proposer.guess()
        return self._trust.share * followed.odds[0].estimate(guess[1]) if guess is not None else 0.0

    def _grown(self, seq: Sequence) -> Grown:
        """A tree or a chain for a sequence, likeliest drafts first."""
        followed, shape, trust = self._follow(seq), self._largest(seq), self._trust.share
        if shape is not None:
            return grow(followed.proposer, lambda evidence, rank: trust * followed.odds[rank].estimate(evidence), shape,
                        _LEAST_CHANCE if self.adaptive else 0.0)  # fmt: skip
        longest = self._longest(seq)
        proposal = followed.proposer.propose(longest) if longest > 0 else Proposal(())
        chances = followed.odds[0].chain(proposal.evidence, len(proposal.tokens), trust)
        return Grown(proposal.tokens, (), tuple(chances))

    def _best(self, chances: list[tuple[float, int]], num_decoding: int) -> int:
        """How many of these drafts, best first, give the most expected tokens per second."""
        if not self.times.known:
            return len(chances)
        best_rate = _least_gain(num_decoding) * num_decoding / self.times.estimate(num_decoding)
        best, tokens = 0, float(num_decoding)
        for count, (chance, _) in enumerate(chances, start=1):
            tokens += chance
            rate = tokens / self.times.estimate(num_decoding + count)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def _waiting(self, able: list[Sequence], num_decoding: int, room: int) -> set[int]:
        if self.adaptive and self.times.known and self._least_useful(num_decoding, room) > _SURE:
            self._rest(able)
            return set()
        return {seq.row for seq in able if seq.num_pending and self._worth_waiting(seq)}

    def _worth_waiting(self, seq: Sequence) -> bool:
        return not self.adaptive or self._first_chance(seq) >= _WAIT_CHANCE

    def _learn(self, seq: Sequence, entry: PlanEntry, accepted: int, result: EntryResult) -> None:
        """Compare tokens with what a lookup would have proposed there, whether that was used or not."""
        followed = self._followed.get(seq)
        if followed is None:
            return
        if self._hopeless:
            followed.late += result.tokens
            return
        if followed.late:
            followed = self._follow(seq)
        every = len(self._followed) // _LEARNING
        if not entry.num_drafts and every > 1 and (self._steps + seq.row) % every:
            followed.proposer.extend(result.tokens)
            return
        good_enough = min(max(self._bar, _LIKELY[0]), _LIKELY[1])
        judged = []
        for token in result.tokens:
            for rank, (guessed, evidence) in enumerate(self._guesses(followed.proposer)):
                expected = followed.odds[rank].estimate(evidence)
                if not rank and expected >= good_enough:
                    judged.append((expected, guessed == token))
                followed.odds[rank].add(evidence, guessed == token)
            followed.proposer.extend((token,))
        self._trust.add(judged)

    def _guesses(self, proposer: Proposer) -> list[tuple[int, int]]:
        """Tokens that a lookup would propose next, the likeliest first, and their evidence."""
        if self.tree is None:
            guess = proposer.guess()
            return [] if guess is None else [guess]
        cursor = proposer.cursor()
        return [] if cursor is None else proposer.followers(cursor, self.tree.width)

    def forget(self, seq: Sequence) -> None:
        followed = self._followed.pop(seq, None)
        if followed is not None:
            self._reading.pop(seq, None)
            if seq.num_output_tokens:
                followed.proposer.finish(followed.late)
        if not self._followed:
            self._bar = 0.0  # of a batch that has ended
