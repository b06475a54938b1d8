"""Drafts of a model that runs in the worker: how many, for whom, and when to find out whether they pay.

A draft model, a head, or the target without some of its layers. Here nobody sees what it would propose, so its chances
are known by place alone, and only from drafts that were judged: while drafts do not pay, one is tried now and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from quire.speculation.acceptance import PositionOdds
from quire.speculation.choice import DraftChoice, Drafts
from quire.speculation.costs import StepCosts
from quire.speculation.ngram import NgramSource
from quire.speculation.pause import LONGEST, Pause
from quire.speculation.speculator import Load, LookupSpeculator, Speculator, offered_by_depth
from quire.speculation.tree import TreeShape

if TYPE_CHECKING:
    from quire.scheduler.draft import Planned
    from quire.scheduler.plan import EntryResult, PlanEntry
    from quire.scheduler.request import Sequence

_LEAST_MODEL_GAIN = 1.08
"""Times the tokens per second without drafts that are expected before any are taken: what share of a step's time is the
model's nobody sees apart from the rest."""
_LEAST_CUT_GAIN = 1.04
"""The same where the model offers only drafts that it is sure of: a wrong belief costs less."""
_SOON, _REMIND, _OFTEN_ENOUGH, _SELDOM = 5, 40, 160, 320
"""Steps with drafts of a model after which one goes without: when they have just begun, later on, where they pay
clearly, and where they have always done so."""
_CLEARLY = 1.25
"""Times the tokens per second without drafts from which on nobody has to look so often."""
_NEARLY = 0.985
"""Of the best rate: more drafts that are believed to give as much are taken, since only tries show what they give."""
_PROBE_SHARE = 0.01
"""Share of the time that may go into finding out whether drafts of a model have begun to pay, at first."""
_NEARLY_THERE = 16
"""Tokens that a draft model catches up with at about the cost of one."""
_MANY_BEHIND = 100
"""Tokens from which on reading them shows what one takes; at start it is measured with about as many."""
_HORIZON = 64
"""Steps over which catching up with a text should pay for itself: how long one goes on nobody knows."""
_TEXT_SHARE, _KNOWN_TRIES = 0.02, 16
"""Share of a text's time that may go into reading it before so many tries have shown whether drafts pay: a short text
would never make up for more."""
_FOLLOW_GAPS = 0.2
"""How far a gap moves the belief."""
_USUAL_ANSWER, _FOLLOW_ANSWERS = 128.0, 0.25
"""Tokens, as long as nobody knows, and how far an answer moves the belief."""
_MOST_PATIENCE = 8.0
"""Every try in vain doubles the time until the next, up to so many times the first."""
_LOOK_AGAIN = 16
"""Steps after which texts that were too long to be read for a try are looked at again, where nothing else changes."""
_FIRST_STEPS = 4
"""Where steps overlap: steps with drafts whose times may be those of something that happened only once. Drafts that end
after fewer are tried again at once."""
_HOPELESS, _FEW = 0.85, 8
"""Times the tokens per second without drafts below which drafts are given up for a text as a whole, and sequences of a
step up to which feeding a head shows."""
_LIKELY = 0.5
"""Chance of a draft from which on a try has one more."""


_NOTHING = DraftChoice()


class DeviceSpeculator(Speculator):
    """Drafts of a model that runs in the worker: only their number is decided here, one for all sequences."""

    def __init__(self, most: int, adaptive: bool = True, clock: Callable[[], float] = time.perf_counter,
                 own_kv: bool = False, tree: TreeShape | None = None, cuts: bool = False, gpu: bool = False,
                 ahead: bool = False, rests: bool = False) -> None:
        """`own_kv`: the model must have seen a sequence's whole text before it can guess (`skip_layers` need not).
        `cuts`: it ends a chain where it is unsure, so there may be fewer drafts than were asked for. `gpu`: it has
        chains alone for sequences whose draws depend on their text. `ahead`: see `drafts_ahead`. `rests`: it
        reads hidden states that the target need not keep for it (`_head_rests`)."""
        super().__init__(most, adaptive, clock)
        self.tree = tree
        self.drafts_ahead = ahead
        self._gpu = self.overlaps = gpu
        self.own_kv = own_kv
        self.seconds_behind = 0.0
        """What the model takes to catch up, for each token of text that it has not seen. This and `drafting` are for a
        machine as busy as it was at first; `StepCosts.factor` says how busy it is."""
        self._to_begin = 0.0
        """What it takes beside that, however few they are."""
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
        self._plain_steps = 0
        self._since_plain = 0
        self._steps_with_drafts = 0
        self._remind = self._remind_next = _SOON
        self._clearly = False
        self._chosen = 0
        """Drafts of each sequence that were believed to pay when it was last asked; a try is none of them."""
        self._some_pending = False
        """Of those that may have drafts, some have a token in flight."""
        self._judged_for: int | None = None
        """Sequences for which that was asked; None: something was learned since."""
        self._looked_at = 0
        """Decoding sequences in the last step for which it was looked who may have drafts."""
        self._looks_away = 0
        """Steps for which nobody is looked for to try: reading any of the texts took too long."""
        self.joined = True
        """All that have drafts have them in the same steps. Else two halves take turns where steps overlap, each of
        which reads all weights."""
        self._gaps: dict[int, float] = {}
        """Where steps overlap: seconds of the host before a step with drafts, by number of sequences that have some, in
        powers of two."""
        self._patience = 1.0
        self._next_probe = 0.0
        """Seconds without drafts after which they are tried again."""
        self._usual_answer = _USUAL_ANSWER
        self._may_rest = rests and adaptive
        self._hopeless = False
        """Drafts were believed to be far from paying when it was last asked, for one sequence and for all of them."""
        self._holed: set[Sequence] = set()
        """Who gets no drafts any more: the model was not fed with all of its text."""
        self._resting: list[Sequence] = []
        """Those of the last step in which the head rested: all of them holed."""
        self._pause: Pause | None = None
        """The one that goes on."""
        self._may_pause: list[Sequence] = []
        """Decoding sequences of the step that is planned, if it may begin a pause."""
        self._lookups = None if gpu else LookupSpeculator(NgramSource(1), most, adaptive, clock)
        """For sequences under a grammar. Its masks after drafts must know them, and those of a model are known in the
        worker only; these are known here."""
        if self._lookups is not None:
            self._lookups.times = self.times

    @property
    def drafts_follow(self) -> bool:
        return (self.drafts_ahead and self._chosen > 0
                and (not self.adaptive or not self._goes_without(self._since_plain + 1)))

    def _head_rests(self, planned: list[Planned]) -> bool:
        """Of a step without drafts. A head cannot catch up with what was not kept for it, so this gives drafts up for
        the sequences of the step. Those that come later can have some: while it is time for a try, states are kept for
        them until it was made."""
        if not self._may_rest or not self._hopeless or self._chosen:
            return False
        sequences = [seq for seq, _, _ in planned]
        if sequences == self._resting:
            return True
        if len(sequences) > _FEW or (self._is_time_to_try and self._looks_away <= 0
                                     and not self._holed.issuperset(sequences)):
            return False
        self._holed.update(sequences)
        self._resting = sequences
        return True

    def choose(self, decoding: list[Sequence], room: int) -> DraftChoice:
        pause = self._pause
        if pause is not None:
            if pause.left and decoding == pause.sequences:
                return _NOTHING
            self._end_pause(pause)
        self._may_pause = []
        if self._rests(decoding):
            if self._lookups is None:
                self._may_pause = decoding
                return _NOTHING
            return DraftChoice(self._looked_up([seq for seq in decoding if not seq.num_pending], len(decoding), room))
        self._looked_at = len(decoding)
        return super().choose(decoding, room)

    def _looked_up(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]:
        ruled = [seq for seq in sequences if seq.request.start_grammar is not None and self._may_have_drafts(seq)]
        return {} if self._lookups is None or not ruled else self._lookups._choose(ruled, num_decoding, room)

    def _rests(self, decoding: list[Sequence]) -> bool:
        """Where steps overlap: drafts do not pay for these, nothing was learned since, and it is not time for a try.
        Then nothing is to be found out, and small steps are as short as the host is quick."""
        if (not decoding or not self.adaptive or not self.overlaps or self._chosen or self._judged_for is None
                or len(decoding) != self._looked_at or not decoding[0].num_pending):
            return False
        if self._is_time_to_try:
            self._looks_away -= 1
            return self._looks_away >= 0
        return True

    def _choose(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]:
        looked_up = self._looked_up(sequences, num_decoding, room)
        room -= sum(drafts.count for drafts in looked_up.values())
        return looked_up | self._choose_own(sequences, num_decoding, room)

    def _choose_own(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]:
        sequences = self._draftable(sequences)
        count = min(self.most, room // len(sequences)) if sequences else 0
        shape = self._tree_in(room // len(sequences)) if sequences else None
        if self.adaptive and count:
            able = sequences
            if self._chosen or not self._some_pending:
                sequences, count, shape = self._paying(able, num_decoding, room)
                self._believe(count, len(able))
            else:
                count = 0  # asked for these and all others
            if count and self._goes_without(self._since_plain):
                count, shape = 0, None
            elif not count and (one := self._to_try(able, num_decoding)) is not None:
                # One of them is enough to find out.
                sequences, count, shape = [one], self._tried, None
                self._patience, self._plain_seconds = min(max(1.0, 2 * self._patience), _MOST_PATIENCE), 0.0
        else:
            self._chosen = count
        return self._drafts_of(sequences, count, shape)

    def _draftable(self, sequences: list[Sequence]) -> list[Sequence]:
        """None under a grammar, and no text that the model was not fed with."""
        found = [seq for seq in sequences if seq.request.start_grammar is None and seq not in self._holed]
        self._all_cut = self._cuts and all(_likeliest_alone(seq) for seq in found)
        return found

    def _paying(self, sequences: list[Sequence], num_decoding: int, room: int
                ) -> tuple[list[Sequence], int, TreeShape | None]:
        """Who should have how many drafts, as far as is known."""
        if self._odds.tries < _KNOWN_TRIES:
            sequences = [seq for seq in sequences if self._reading(seq, num_decoding) <= 1.0]
        if not sequences:
            return [], 0, None
        each = room // len(sequences)
        return sequences, *self._best(sequences, num_decoding, min(self.most, each), self._tree_in(each))

    def _believe(self, count: int, judged_for: int) -> None:
        """What was found for these alone may not hold for all: where drafts seem to end, that is asked once more."""
        self._judged_for = None if self._chosen and not count else judged_for
        if self.overlaps and self._chosen and not count and self._steps_with_drafts < _FIRST_STEPS:
            self._patience = self._next_probe = 0.0
        if count and not self._chosen:
            self._remind = self._remind_next = _SOON
        self._chosen = count
        self._hopeless = self._may_rest and not count and self._is_hopeless(1) and self._is_hopeless(judged_for)

    def _is_hopeless(self, sequences: int) -> bool:
        """Whether drafts would cost so many sequences much, by what is known of all texts."""
        if not self.times.known or not self.drafting.known:
            return False
        plain = sequences / self.times.estimate(sequences)
        chain, tokens, gap = self._odds.chain(self.most), float(sequences), self._gap(sequences)
        for count in range(1, self.most + 1):
            tokens += sequences * chain[count - 1]
            if tokens / (self._seconds(sequences, sequences, count) + gap) > _HOPELESS * plain:
                return False
        return True

    def _drafts_of(self, sequences: list[Sequence], count: int, shape: TreeShape | None) -> dict[int, Drafts]:
        self._behind = 0
        ahead = count if self.drafts_ahead and self._chosen else 0
        found = {}
        for seq in sequences:
            mine, longest = min(count, self._longest(seq)), self._largest(seq)
            if mine > 0 and shape is not None and longest is not None:
                nodes = min(shape.nodes, longest.nodes)
                found[seq.row] = Drafts(nodes, depth=min(shape.depth, longest.depth))
            elif mine > 0:
                found[seq.row] = Drafts(mine, ahead=ahead)
            if mine > 0:
                self._behind += self._lacks(seq)
                self._seen[seq] = len(seq.tokens)
        return found

    def _waiting(self, able: list[Sequence], num_decoding: int, room: int) -> set[int]:
        """All, where drafts pay: those in flight for their token, and for drafts of others to be judged, to go on with
        them. Where it is time to try one, that one; with steps that overlap nobody else would ever be without a token
        in flight."""
        if self._holed:
            able = [seq for seq in able if seq not in self._holed]
            if not able:
                self._judged_for = 0  # whoever comes next is another
        pending = [seq for seq in able if seq.num_pending]
        self._some_pending = bool(pending)
        pays = self._chosen > 0 or not self.adaptive
        if pays and self.joined and any(drafts for _, _, drafts in self._in_flight):
            return {seq.row for seq in self._draftable(able)}
        if not pending or (self.adaptive and not self._clearly and self._goes_without(self._since_plain)):
            return set()  # so that the step without drafts that is under way has another one behind it, as without any
        if not pays:
            sequences = self._draftable(able)
            if sequences and self._is_another(len(sequences)):
                self._believe(self._paying(sequences, num_decoding, room)[1], len(sequences))
        if pays or self._chosen:
            return {seq.row for seq in pending}
        one = self._to_try([seq for seq in sequences if seq.num_pending], num_decoding)
        return set() if one is None else {one.row}

    def _goes_without(self, steps: int) -> bool:
        """After so many with drafts, a step without any, to keep its measured time up to date."""
        return steps >= (max(self._remind, _OFTEN_ENOUGH) if self._clearly else self._remind)

    def _is_another(self, count: int) -> bool:
        """Whether so many sequences are others than those that drafts were judged for: by more than an eighth."""
        return self._judged_for is None or 8 * abs(count - self._judged_for) > self._judged_for

    def _largest(self, seq: Sequence) -> TreeShape | None:
        params = seq.request.params
        reads = params.penalised or bool(seq.request.bad_words) or seq.num_output_tokens < params.min_tokens
        return None if self._gpu and reads else super()._largest(seq)

    def _lacks(self, seq: Sequence) -> int:
        """Tokens that the model has not seen, beyond the few since it last guessed."""
        behind = len(seq.tokens) - self._seen.get(seq, 0) if self.own_kv else 0
        return behind if behind > _NEARLY_THERE else 0

    def _reading(self, seq: Sequence, num_decoding: int) -> float:
        """What the model takes to read what it has not seen of a text, beside what may go into that. The text will be
        as long as texts are here, or as it is already."""
        if not self._lacks(seq):
            return 0.0
        room, done = seq.request.max_len - seq.num_prompt_tokens, len(seq.tokens) - seq.num_prompt_tokens
        answer = min(float(room), max(float(done), self._usual_answer))
        return self._catching_up([seq]) / max(_TEXT_SHARE * answer * self.times.estimate(num_decoding), 1e-9)

    def _catching_up(self, sequences: list[Sequence]) -> float:
        behind = sum(map(self._lacks, sequences))
        return self.times.factor * (self.seconds_behind * behind + (self._to_begin if behind else 0.0))

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
        more = self._catching_up(sequences) / _HORIZON + self._gap(len(sequences))
        tokens = float(num_decoding)
        for count in range(1, most + 1):
            tokens += sum(chain[count - 1] for chain in chains)
            if self._all_cut and count < most:
                continue  # the model itself finds out how many are worth it
            rate = tokens / (self._seconds(num_decoding, len(sequences), count) + more)
            if rate > best_rate or (best and rate > _NEARLY * best_rate):
                best, best_rate = count, max(rate, best_rate)
        if shape is not None:
            tokens = num_decoding + len(sequences) * sum(self._tree_odds.chain(shape.depth))
            seconds = self._seconds(num_decoding, len(sequences), shape.depth, shape.nodes) + more
            if tokens / seconds > best_rate:
                best = shape.depth
            else:
                shape = None
        if not best:
            return 0, None
        self._patience = 1.0
        self._clearly = best_rate > _CLEARLY * plain
        self._remind_next = min(2 * self._remind, _SELDOM if self._clearly else _REMIND)
        return best, shape

    def _gap(self, count: int) -> float:
        """Before a step in which so many sequences have drafts. A larger batch than any seen yet is believed to take no
        longer, the first step will show; a smaller one less, but not in proportion."""
        known = [size for size in self._gaps if size <= count.bit_length()]
        if known or not self._gaps:
            return self._gaps[max(known)] if known else 0.0
        least = min(self._gaps)
        return self._gaps[least] * 0.5 ** ((least - count.bit_length()) / 2)

    def _price(self, num_decoding: int, seq: Sequence) -> float:
        """Of trying one and not another. Where steps overlap, who is tried falls behind the others by a step or two:
        that should not always be the same."""
        tried = self._followed[seq].tries if self.overlaps and seq in self._followed else 0.0
        return self._catching_up([seq]) + tried * self.times.estimate(num_decoding)

    @property
    def _is_time_to_try(self) -> bool:
        """As far as the last price of a try says."""
        return not self._since_plain and self._plain_seconds >= self._next_probe

    def _to_try(self, sequences: list[Sequence], num_decoding: int) -> Sequence | None:
        """Whose drafts show whether they have begun to pay, if it is time to find out."""
        if not self._is_time_to_try:
            return None
        one = min(sequences, key=partial(self._price, num_decoding), default=None)
        if one is None or self._reading(one, num_decoding) > 1.0:
            self._looks_away = _LOOK_AGAIN
            return None
        extra = self._seconds(num_decoding, 1, self._tried) - self.times.estimate(num_decoding)
        extra += self._catching_up([one])
        if self.overlaps:
            # Who is tried waits for a token before and after. The others do not: a step goes on without it.
            extra += 2 * (self._gap(1) if num_decoding == 1 else self.times.estimate(num_decoding) / num_decoding)
        self._next_probe = self._patience * extra / _PROBE_SHARE
        return one if self._plain_seconds >= self._next_probe else None

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
        """Drafts of a try: those that are likely, and one more. Where the model finds out itself how many are worth it,
        as many as it would be asked for."""
        return self.most if self._all_cut else min(self.most, 1 + sum(map(_LIKELY.__le__, self._odds.chain(self.most))))

    def pass_shares(self, passes: float) -> float:
        """What so many passes cost, in passes: where the model does not wait for the host between them, the first one,
        with what the host does for all of them, costs about as much as two."""
        return passes + 1.0 if self._cuts else passes

    def _follow(self, seq: Sequence) -> PositionOdds:
        found = self._followed.get(seq)
        if found is None:
            found = self._followed[seq] = PositionOdds(self.most, self._odds)
        return found

    def _own_drafts(self, entry: PlanEntry) -> int:
        return entry.device_drafts

    def submitted(self, planned: list[Planned], single: bool = False) -> bool:
        pause = self._pause
        if pause is not None:
            if single and pause.holds(planned):
                pause.left -= 1
                self._in_flight.append((pause, 0.0, 0))
                return pause.head_rests
            self._end_pause(pause)
        super().submitted(planned, single)
        if self._lookups is not None:
            self._lookups.read([one for one in planned if one[0].request.start_grammar is not None])
        if single:
            rests = self._head_rests(planned)
            if self._may_pause:
                self._begin_pause(rests)
            return rests
        load = self._in_flight[-1][0]
        if isinstance(load, Load) and load.drafts:
            load.behind = self._behind
            load.passes = max(entry.draft_depth or entry.device_drafts for _, entry, _ in planned)
            if self._cuts and not any(entry.draft_depth for _, entry, _ in planned):
                load.asked = tuple(entry.device_drafts for _, entry, _ in planned)
        return False

    # ---- pauses

    def _begin_pause(self, rests: bool) -> None:
        """After this step, up to the next try."""
        sequences, self._may_pause = self._may_pause, []
        until_try = (self._next_probe - self._plain_seconds) / max(self.times.estimate(len(sequences)), 1e-9)
        steps = int(min(until_try, LONGEST))
        if steps > 1:
            self._pause = Pause(sequences, steps, rests)

    def _end_pause(self, pause: Pause) -> None:
        """Make up for what was not done in it. Of its steps that are still under way each is told of by itself."""
        self._pause = None
        count = len(pause.sequences)
        self.stats.decode_steps += pause.done * count
        self.stats.decode_tokens += pause.done * count
        for seq in pause.sequences:
            seq.request.counts.decode_steps += pause.done
        if pause.done:
            self.times.observe(count, pause.seconds / pause.done)
            self._plain_seconds += pause.seconds
            self._since_plain, self._remind = 0, self._remind_next

    def _paused_step_done(self, pause: Pause, lost: bool) -> bool:
        before, self._last_done = self._last_done, self._clock()
        if lost or pause is not self._pause:
            return True
        pause.done += 1
        pause.seconds += self._last_done - before
        return False

    def _correct(self, load: Load, judged: list[int]) -> None:
        offered = [(asked, there) for asked, there in zip(load.asked, judged, strict=True) if asked]
        load.tokens -= sum(asked - there for asked, there in offered)
        load.passes = self.pass_shares(max(min(asked, there + 1) for asked, there in offered))
        if not load.behind:
            for asked, there in offered:
                self._offered.add([True] * there + [False] * (there < asked))

    def _observe(self, load: Load, seconds: float, gap: float) -> None:
        if not self.overlaps:
            seconds += gap
        elif 2 * load.drafting >= load.tokens - load.drafts:  # a try of one hides behind the steps of others
            size = load.drafting.bit_length()
            self._gaps[size] = gap + (1.0 - _FOLLOW_GAPS) * (self._gaps.get(size, gap) - gap)
        if not load.drafts:
            self._observe_plain(load.tokens, seconds)
            return
        self._plain_seconds = 0.0
        self._since_plain += 1
        self._steps_with_drafts += 1
        passes = load.passes
        if not self.times.known:
            return
        factor = self.times.factor
        believed = self.times.estimate(load.tokens) + passes * factor * self.drafting.estimate(load.drafting)
        young = self.overlaps and self._steps_with_drafts <= _FIRST_STEPS
        if not self.drafting.known or (young and seconds < believed and not load.behind):
            rest = seconds - self.times.estimate(load.tokens) - factor * self.seconds_behind * load.behind
            self.drafting.observe(load.drafting, max(1e-9, rest / passes / factor))
            return
        if load.behind:
            self._learn_reading(load.behind, max(0.0, seconds - believed) / factor)
            return
        # How much of it was drafting cannot be seen here: both parts are believed to have changed alike.
        ratio = seconds / believed
        self.drafting.observe(load.drafting, ratio * self.drafting.estimate(load.drafting))
        self.times.follow(ratio)

    def _observe_plain(self, tokens: int, seconds: float) -> None:
        """Where drafts do not pay, one step in eight: how long it takes counts only for the next try."""
        self._plain_steps += 1
        if self._chosen or not self.overlaps or self._plain_steps % 8 == 1 or not self.times.known:
            self.times.observe(tokens, seconds)
        self._plain_seconds += seconds
        self._since_plain, self._remind = 0, self._remind_next

    def _learn_reading(self, behind: int, seconds: float) -> None:
        """Few tokens show what it takes to begin, many what each takes."""
        if behind < _MANY_BEHIND:
            self._to_begin += 0.5 * (max(0.0, seconds - self.seconds_behind * behind) - self._to_begin)
        else:
            self.seconds_behind += 0.5 * (max(0.0, seconds - self._to_begin) / behind - self.seconds_behind)

    def took(self, seq: Sequence, entry: PlanEntry, result: EntryResult, accepted: int) -> None:
        if entry.num_tokens > 1 or self._lookups is not None:
            super().took(seq, entry, result, accepted)
        elif entry.start >= seq.num_prompt_tokens:
            # Of a step without drafts nothing is learned: no more is done than to count it.
            stats = self.stats
            stats.decode_steps += 1
            stats.decode_tokens += 1
            seq.request.counts.decode_steps += 1

    def _learn(self, seq: Sequence, entry: PlanEntry, accepted: int, result: EntryResult) -> None:
        """Where a chain was cut, a draft that was not offered has not hit: what counts is what asking for it brings."""
        if self._lookups is not None:
            self._lookups._learn(seq, entry, accepted, result)  # of those that it follows
        if not entry.device_drafts:
            return
        if result.undraftable:
            self._holed.add(seq)
            self._judged_for = None
        depth = len(offered_by_depth(result))
        if self._cuts and not result.parents and not entry.draft_depth:
            depth = entry.device_drafts
        if depth:
            if accepted and not self._chosen:  # a try: the less it was expected to hit, the sooner is the next
                self._patience = max(1.0, self._patience * self._odds.chain(1)[0])
            self._judged_for = None
            hits = [True] * accepted + [False] * (accepted < depth)
            (self._tree_odds if result.parents else self._follow(seq)).add(hits)

    def forget(self, seq: Sequence) -> None:
        if self._pause is not None:
            self._end_pause(self._pause)
        if self._lookups is not None:
            self._lookups.forget(seq)
        self._followed.pop(seq, None)
        self._seen.pop(seq, None)
        self._holed.discard(seq)
        self._resting = []
        self._looks_away = 0
        self._usual_answer += _FOLLOW_ANSWERS * (len(seq.tokens) - seq.num_prompt_tokens - self._usual_answer)


def _likeliest_alone(seq: Sequence) -> bool:
    """As the worker sees it (`sampling.batch.likeliest_alone`), but for what differs from token to token."""
    params = seq.request.params
    return params.greedy or params.top_k == 1
