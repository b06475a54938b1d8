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

from quire.speculation.acceptance import EvidenceOdds, PositionOdds
from quire.speculation.choice import DraftChoice, Drafts
from quire.speculation.costs import StepCosts
from quire.speculation.growing import Grown, grow, in_order
from quire.speculation.proposer import Proposal, Proposer, ProposerSource
from quire.speculation.stats import SpeculationStats
from quire.speculation.tree import TreeShape, depths

if TYPE_CHECKING:
    from quire.scheduler.draft import Planned
    from quire.scheduler.plan import EntryResult, PlanEntry
    from quire.scheduler.request import Sequence

_LEAST_GAIN = 1.03
"""Times the tokens per second without drafts that are expected before any are taken: beliefs are not exact."""
_LEAST_MODEL_GAIN = 1.08
"""The same for drafts of a model, whose share of a step's time nobody sees apart from the rest."""
_LEAST_CUT_GAIN = 1.04
"""The same where the model offers only drafts that it is sure of: a wrong belief costs less."""
_LEAST_CHANCE = 0.02
"""Of a draft in a tree that is worth a thought."""
_WAIT_CHANCE = 0.5
"""Where steps overlap, a sequence waits for its last token only if its next draft is at least so likely."""
_REMIND, _SELDOM = 40, 320
"""Steps with drafts of a model after which one goes without, at first, and where drafts have always paid clearly."""
_CLEARLY = 1.25
"""Times the tokens per second without drafts from which on nobody has to look so often."""
_NEARLY = 0.985
"""Of the best rate: more drafts that are believed to give as much are taken, since only tries show what they give."""
_PROBE_SHARE = 0.01
"""Share of the time that may go into finding out whether drafts of a model have begun to pay, at first."""
_NEARLY_THERE = 16
"""Tokens that a draft model catches up with at about the cost of one."""
_HORIZON = 64
"""Steps over which catching up with a text should pay for itself: how long one goes on nobody knows."""
_TEXT_SHARE, _KNOWN_TRIES = 0.02, 16
"""Share of a text's time that may go into reading it before so many tries have shown whether drafts pay: a short text
would never make up for more."""
_USUAL_ANSWER, _FOLLOW_ANSWERS = 128.0, 0.25
"""Tokens, as long as nobody knows, and how far an answer moves the belief."""
_READ_PER_STEP = 512
"""Tokens of long prompts, and of outputs to be kept, that proposers work through in a step: about a millisecond."""
_MOST_PATIENCE = 8
"""Every try in vain doubles the time until the next, up to so many times the first."""


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
        self._in_flight: deque[tuple[Load | None, float]] = deque()
        """Each step under way (None: not of decoding alone), and when it began."""
        self._last_done = float("-inf")

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
        known = [seq for seq in able if not seq.num_pending]
        choice = DraftChoice()
        if len(known) < len(able):
            choice.waiting = {seq.row for seq in able if seq.num_pending and self._worth_waiting(seq)}
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
    def _worth_waiting(self, seq: Sequence) -> bool: ...

    # ---- when it runs

    def submitted(self, planned: list[Planned]) -> None:
        tokens = drafts = drafting = 0
        decoding = True
        for seq, entry, _ in planned:
            tokens += entry.num_tokens
            drafts += entry.num_drafts
            drafting += entry.num_drafts > 0
            decoding = decoding and entry.start >= seq.num_prompt_tokens and entry.num_tokens == 1 + entry.num_drafts
        load = Load(tokens, drafts, drafting) if decoding and planned else None
        self._in_flight.append((load, self._clock()))

    def done(self, lost: bool = False, judged: list[int] | None = None) -> None:
        """The oldest step is back, or lost. `judged`: how many drafts of each entry there were, once that is known."""
        load, began = self._in_flight.popleft()
        if load is not None and load.asked and judged is not None:
            self._correct(load, judged)
        now = self._clock()
        seconds = now - max(began, self._last_done)
        if began > self._last_done > 0.0:
            # Between two steps the host took its time: a step that waits for the one before it costs that too. More
            # than half of the step is somebody else's time.
            seconds += min(began - self._last_done, seconds / 2)
        self._last_done = now
        if load is not None and seconds > 0.0 and not lost:
            self._observe(load, seconds)

    def _observe(self, load: Load, seconds: float) -> None:
        self.times.observe(load.tokens, seconds)

    def _correct(self, load: Load, judged: list[int]) -> None:  # noqa: B027 (who looks drafts up knows how many)
        """There may have been fewer drafts than were asked for."""

    # ---- after it

    def took(self, seq: Sequence, entry: PlanEntry, result: EntryResult, accepted: int) -> None:
        """A step gave tokens: the drafts that were accepted, and one of the target's own, up to the sequence's end.

        Drafts after the end count as judged, since they were; as tokens they do not, and nobody learns their text.
        """
        if entry.start >= seq.num_prompt_tokens and entry.num_tokens == 1 + entry.num_drafts:
            self.stats.count(offered_by_depth(result), accepted, len(result.tokens))
            counts = seq.request.counts
            counts.decode_steps += 1
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

    def submitted(self, planned: list[Planned]) -> None:
        """Also read on: a little of long prompts in every step, from the step that begins to compute them."""
        super().submitted(planned)
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


class DeviceSpeculator(Speculator):
    """Drafts of a model that runs in the worker: only their number is decided here, one for all sequences."""

    def __init__(self, most: int, adaptive: bool = True, clock: Callable[[], float] = time.perf_counter,
                 own_kv: bool = False, tree: TreeShape | None = None, cuts: bool = False, gpu: bool = False,
                 ahead: bool = False) -> None:
        """`own_kv`: the model must have seen a sequence's whole text before it can guess (`skip_layers` need not).
        `cuts`: it ends a chain where it is unsure, so there may be fewer drafts than were asked for. `gpu`: it has
        chains alone for sequences whose draws depend on their text. `ahead`: see `drafts_ahead`."""
        super().__init__(most, adaptive, clock)
        self.tree = tree
        self.drafts_ahead = ahead
        self._gpu = gpu
        self.own_kv = own_kv
        self.seconds_behind = 0.0
        """What the model takes to catch up, for each token of text that it has not seen. This and `drafting` are for a
        machine as busy as it was at first; `StepCosts.factor` says how busy it is."""
        self._seen: dict[Sequence, int] = {}
        self._behind = 0
        self.drafting = StepCosts(grows_like=self.times)
        """Seconds that one more draft takes, by number of sequences: a model's, as the target's steps are."""
        self._odds = PositionOdds(most)
        self._cuts = cuts
        self._all_cut = cuts
        """In the step that is planned: chains of drawn tokens are not cut, so a step with one of them has none."""
        self._offered = PositionOdds(most, prior=0.8)
        """Whether there is a draft at a place, given that there was one before it."""
        self._tree_odds = PositionOdds(most, better_than=self._odds)
        self._followed: dict[Sequence, PositionOdds] = {}
        self._plain_seconds = 0.0
        """Spent on steps without drafts since the last one with some."""
        self._since_plain = 0
        self._remind = self._remind_next = _REMIND
        self._chosen = most
        self._patience = 1
        self._next_probe = 0.0
        """Seconds without drafts after which they are tried again."""
        self._usual_answer = _USUAL_ANSWER

    @property
    def drafts_follow(self) -> bool:
        goes_on = not self.adaptive or self._since_plain + 1 < self._remind
        return self.drafts_ahead and self._chosen > 0 and goes_on

    def _choose(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]:
        # A grammar's masks after drafts must know them, and these are known in the worker only.
        sequences = [seq for seq in sequences if seq.request.start_grammar is None]
        self._all_cut = self._cuts and all(_likeliest_alone(seq) for seq in sequences)
        count = min(self.most, room // len(sequences)) if sequences else 0
        shape = self._tree_in(room // len(sequences)) if sequences else None
        if self.adaptive and count:
            cheap = [seq for seq in sequences if self._cheap(seq, num_decoding)]
            if self._odds.tries < _KNOWN_TRIES:
                sequences = cheap
            count, shape = self._best(sequences, num_decoding, count, shape) if sequences else (0, None)
            if not count and cheap and self._probes(cheap, num_decoding):
                # One of them is enough to find out.
                sequences, count, shape = [min(cheap, key=self._lacks)], self._tried, None
        self._chosen = count
        self._behind = 0
        found = {}
        for seq in sequences:
            mine, longest = min(count, self._longest(seq)), self._largest(seq)
            if mine > 0 and shape is not None and longest is not None:
                nodes = min(shape.nodes, longest.nodes)
                found[seq.row] = Drafts(nodes, depth=min(shape.depth, longest.depth))
            elif mine > 0:
                found[seq.row] = Drafts(mine, ahead=count if self.drafts_ahead else 0)
            if mine > 0:
                self._behind += self._lacks(seq)
                self._seen[seq] = len(seq.tokens)
        return found

    def _largest(self, seq: Sequence) -> TreeShape | None:
        params = seq.request.params
        reads = params.penalised or bool(seq.request.bad_words) or seq.num_output_tokens < params.min_tokens
        return None if self._gpu and reads else super()._largest(seq)

    def _lacks(self, seq: Sequence) -> int:
        """Tokens that the model has not seen, beyond the few since it last guessed."""
        behind = len(seq.tokens) - self._seen.get(seq, 0) if self.own_kv else 0
        return behind if behind > _NEARLY_THERE else 0

    def _cheap(self, seq: Sequence, num_decoding: int) -> bool:
        """Whether the model reads what it has not seen of a text in next to no time beside what the text takes, which
        will be as long as texts are here, or as it is already."""
        room, done = seq.request.max_len - seq.num_prompt_tokens, len(seq.tokens) - seq.num_prompt_tokens
        answer = min(float(room), max(float(done), self._usual_answer))
        return self._catching_up([seq]) <= _TEXT_SHARE * answer * self.times.estimate(num_decoding)

    def _catching_up(self, sequences: list[Sequence]) -> float:
        return self.times.factor * self.seconds_behind * sum(map(self._lacks, sequences))

    def _tree_in(self, nodes: int) -> TreeShape | None:
        """The tree that each of the sequences may have, where so many nodes are left for it."""
        if self.tree is None or nodes < 2:
            return None
        nodes = min(nodes, self.tree.nodes)
        return TreeShape(self.tree.width, min(self.tree.depth, nodes), nodes)

    def _best(self, sequences: list[Sequence], num_decoding: int, most: int, shape: TreeShape | None
              ) -> tuple[int, TreeShape | None]:
        """How many drafts of each give the most tokens per second, as a chain, or all of a tree of this shape."""
        if not self.times.known or not self.drafting.known:
            return most, shape
        gain = _LEAST_CUT_GAIN if self._all_cut else _LEAST_MODEL_GAIN
        plain = num_decoding / self.times.estimate(num_decoding)
        best, best_rate = 0, gain * plain
        chains = [self._follow(seq).chain(most) for seq in sequences]
        catching_up = self._catching_up(sequences) / _HORIZON
        tokens = float(num_decoding)
        for count in range(1, most + 1):
            tokens += sum(chain[count - 1] for chain in chains)
            if self._all_cut and count < most:
                continue  # the model itself finds out how many are worth it
            rate = tokens / (self._seconds(num_decoding, len(sequences), count) + catching_up)
            if rate > best_rate or (best and rate > _NEARLY * best_rate):
                best, best_rate = count, max(rate, best_rate)
        if shape is not None:
            tokens = num_decoding + len(sequences) * sum(self._tree_odds.chain(shape.depth))
            seconds = self._seconds(num_decoding, len(sequences), shape.depth, shape.nodes) + catching_up
            if tokens / seconds > best_rate:
                best = shape.depth
            else:
                shape = None
        if not best:
            return 0, None
        self._patience = 1
        if self._since_plain < self._remind:
            return best, shape
        # Now and then a step without drafts, to keep its measured time up to date.
        self._remind_next = min(2 * self._remind, _SELDOM) if best_rate > _CLEARLY * plain else _REMIND
        return 0, None

    def _probes(self, sequences: list[Sequence], num_decoding: int) -> bool:
        """Is it time to try whether drafts have begun to pay?"""
        if self._since_plain:
            return False
        extra = self._seconds(num_decoding, 1, self._tried) - self.times.estimate(num_decoding)
        extra += self._catching_up([min(sequences, key=self._lacks)])
        self._next_probe = self._patience * extra / _PROBE_SHARE
        if self._plain_seconds < self._next_probe:
            return False
        self._patience = min(2 * self._patience, _MOST_PATIENCE)
        return True

    def _seconds(self, num_decoding: int, num_drafting: int, count: int, nodes: int | None = None) -> float:
        """Of a step with trees of so many nodes of each drafting sequence, `count` deep; without: with chains."""
        drafting = self.times.factor * self.drafting.estimate(num_drafting)
        passes: float = self.pass_shares(count)
        rows: float = count if nodes is None else nodes
        if self._all_cut and nodes is None:
            # A chain that ends early costs the pass that found it out, and all go on as long as one of them does.
            chances = self._offered.chain(count)
            rows, passes = sum(chances), 1.0 + sum(1.0 - (1.0 - each) ** num_drafting for each in chances[:-1])
            passes = self.pass_shares(passes)
        return self.times.estimate(num_decoding + num_drafting * rows) + passes * drafting

    @property
    def _tried(self) -> int:
        """Drafts of a try: where the model finds out itself how many are worth it, as many as it would be asked for."""
        return self.most if self._all_cut else 1

    def pass_shares(self, passes: float) -> float:
        """What so many passes cost, in passes: where the model does not wait for the host between them, the first one,
        with what the host does for all of them, costs about as much as two."""
        return passes + 1.0 if self._cuts else passes

    def _follow(self, seq: Sequence) -> PositionOdds:
        found = self._followed.get(seq)
        if found is None:
            found = self._followed[seq] = PositionOdds(self.most, self._odds)
        return found

    def _worth_waiting(self, seq: Sequence) -> bool:
        """Also where it is time to try again: with steps that overlap, nobody else would ever be without a token in
        flight. But only for who can be tried."""
        if self._chosen > 0 or not self.adaptive:
            return True
        return self._plain_seconds >= self._next_probe and self._cheap(seq, 1)

    def submitted(self, planned: list[Planned]) -> None:
        super().submitted(planned)
        load = self._in_flight[-1][0]
        if load is not None and load.drafts:
            load.behind = self._behind
            load.passes = max(entry.draft_depth or entry.device_drafts for _, entry, _ in planned)
            if self._cuts and not any(entry.draft_depth for _, entry, _ in planned):
                load.asked = tuple(entry.device_drafts for _, entry, _ in planned)

    def _correct(self, load: Load, judged: list[int]) -> None:
        offered = [(asked, there) for asked, there in zip(load.asked, judged, strict=True) if asked]
        load.tokens -= sum(asked - there for asked, there in offered)
        load.passes = self.pass_shares(max(min(asked, there + 1) for asked, there in offered))
        if not load.behind:
            for asked, there in offered:
                self._offered.add([True] * there + [False] * (there < asked))

    def _observe(self, load: Load, seconds: float) -> None:
        if not load.drafts:
            self.times.observe(load.tokens, seconds)
            self._plain_seconds += seconds
            self._since_plain, self._remind = 0, self._remind_next
            return
        self._plain_seconds = 0.0
        self._since_plain += 1
        passes = load.passes
        if not self.times.known:
            return
        factor = self.times.factor
        if not self.drafting.known:
            rest = seconds - self.times.estimate(load.tokens) - factor * self.seconds_behind * load.behind
            self.drafting.observe(load.drafting, max(1e-9, rest / passes / factor))
            return
        believed = self.times.estimate(load.tokens) + passes * factor * self.drafting.estimate(load.drafting)
        if load.behind:
            found = max(0.0, seconds - believed) / load.behind / factor
            self.seconds_behind += 0.5 * (found - self.seconds_behind)
            return
        # How much of it was drafting cannot be seen here: both parts are believed to have changed alike.
        ratio = seconds / believed
        self.drafting.observe(load.drafting, ratio * self.drafting.estimate(load.drafting))
        self.times.follow(ratio)

    def _learn(self, seq: Sequence, entry: PlanEntry, accepted: int, result: EntryResult) -> None:
        """Where a chain was cut, a draft that was not offered has not hit: what counts is what asking for it brings."""
        depth = len(offered_by_depth(result))
        if self._cuts and not result.parents and not entry.draft_depth:
            depth = entry.device_drafts
        if depth:
            hits = [True] * accepted + [False] * (accepted < depth)
            (self._tree_odds if result.parents else self._follow(seq)).add(hits)

    def forget(self, seq: Sequence) -> None:
        self._followed.pop(seq, None)
        self._seen.pop(seq, None)
        self._usual_answer += _FOLLOW_ANSWERS * (len(seq.tokens) - seq.num_prompt_tokens - self._usual_answer)


def _likeliest_alone(seq: Sequence) -> bool:
    """As the worker sees it (`sampling.batch.likeliest_alone`), but for what differs from token to token."""
    params = seq.request.params
    return params.greedy or params.top_k == 1
