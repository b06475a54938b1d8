"""Drafts of a model that runs in the worker: how many, for which sequences, and when to try whether they pay.

The model is a draft model, a head, or the target without some layers. The host does not see its proposals, so
acceptance is known only by place, and only from verified drafts: while drafts do not pay, one sequence tries them now
and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from quire.speculation.acceptance import PositionOdds
from quire.speculation.choice import DraftChoice, Drafts
from quire.speculation.costs import Correction, StepCosts
from quire.speculation.cuts import drawn_plainly
from quire.speculation.pause import LONGEST, Pause
from quire.speculation.ruled import RuledLookups
from quire.speculation.speculator import Load, Speculator, offered_by_depth
from quire.speculation.tree import TreeShape

if TYPE_CHECKING:
    from quire.scheduler.draft import Planned
    from quire.scheduler.plan import EntryResult, PlanEntry
    from quire.scheduler.request import Sequence

_LEAST_MODEL_GAIN = 1.08
"""Least expected gain in tokens per second, as a factor, before drafts are taken. It is this large because the model's
share of a step's time is not measured apart."""
_LEAST_CUT_GAIN = 1.04
"""The same for one sequence whose chains the model ends at unlikely drafts: a wrong estimate costs less. (Of several,
all wait for the longest chain: four streams of code took drafts at this gain, and lost 3.7%.)"""
_SOON, _REMIND, _OFTEN_ENOUGH, _SELDOM = 5, 40, 160, 320
"""Steps with drafts after which one runs without: right after drafts began, at most, at least where drafts clearly pay,
and at most there."""
_CLEARLY = 1.25
"""Gain from which on drafts clearly pay, so that steps without them are measured less often."""
_NEARLY = 0.985
"""Share of the best expected rate at which more drafts are preferred: only tries show what later places give."""
_PROBE_SHARE = 0.01
"""Share of the time for tries while drafts do not pay, before failed tries lower it."""
_NEARLY_THERE = 16
"""A draft model catches up with so many tokens at about the cost of one."""
_MANY_BEHIND = 100
"""Tokens from which on reading them shows the time per token; it is measured with about as many at start."""
_HORIZON = 64
"""Steps over which catching up with a text should pay for itself; output lengths are not known."""
_TEXT_SHARE, _KNOWN_TRIES = 0.02, 16
"""Share of a request's time that a draft model may take to read its text, until so many tries have shown whether drafts
pay: a short text would never make up for more."""
_FOLLOW_GAPS = 0.2
"""Weight of a new measurement of a gap."""
_USUAL_ANSWER, _FOLLOW_ANSWERS = 128.0, 0.25
"""Initial estimate of an output's length in tokens, and the weight of each new output."""
_MOST_PATIENCE, _WITH_OTHER_TEXT = 8.0, 2.0
"""Each failed try doubles the wait for the next, up to so many times the first wait; so many when a request ends."""
_LOOK_AGAIN = 16
"""Steps after which sequences whose texts were too long to read for a try are checked again."""
_FIRST_STEPS = 4
"""Where steps overlap, times of the first so many steps with drafts may include one-off costs. Drafts that are given up
within them are tried again at once."""
_HOPELESS, _FEW = 0.85, 8
"""Gain below which a head rests, and the most sequences of a step in which storing states for it costs noticeable
time."""
_BORROWED_ON_CPU, _BORROWED_ON_GPU = 4.0, 6.0
"""Weight of what is expected of a text, in trials: on a CPU a draft that fails costs more of a step."""
_LIKELY = 0.5
"""Probability of a chain from which on a try adds one more draft."""


_NOTHING = DraftChoice()


class DeviceSpeculator(Speculator):
    """Drafts of a model in the worker. Only their number is decided here, one for all sequences."""

    def __init__(self, most: int, adaptive: bool = True, clock: Callable[[], float] = time.perf_counter,
                 own_kv: bool = False, tree: TreeShape | None = None, cuts: bool = False, gpu: bool = False,
                 ahead: bool = False, rests: bool = False, cuts_drawn: bool = False) -> None:
        """`own_kv`: the model must read a sequence's whole text before it can draft (not so `skip_layers`).
        `cuts`: it ends chains at unlikely drafts, so it may offer fewer than asked for; `cuts_drawn`: also where they
        are drawn at random. `gpu`: trees are not for sequences whose sampling depends on their text. `ahead`: see
        `drafts_ahead`. `rests`: it reads hidden states, which the target may leave out (`_head_rests`)."""
        super().__init__(most, adaptive, clock, gpu)
        self.tree = tree
        self.drafts_ahead = ahead
        self._gpu = self.overlaps = gpu
        self.own_kv = own_kv
        self.seconds_behind = 0.0
        """Time for the model to catch up, per token that it has not read. This and `drafting` are for a machine as busy
        as at start; `StepCosts.factor` converts to now."""
        self._to_begin = 0.0
        """Time for catching up that does not depend on the number of tokens."""
        self._seen: dict[Sequence, int] = {}
        self._behind = 0
        self.drafting = StepCosts(grows_like=self.times, padded=gpu)
        """Seconds of one pass of the model, by number of sequences; grows like the target's steps."""
        self._borrowed = _BORROWED_ON_GPU if gpu else _BORROWED_ON_CPU
        self._odds = PositionOdds(most, borrowed=self._borrowed)
        self._cuts, self._cuts_drawn = cuts, cuts_drawn
        self._all_cut = cuts
        """For the step being planned: all its chains may be cut. Those of sequences with changed logits are not."""
        self._offered = PositionOdds(most, prior=0.8)
        """Probability that the model offers a draft at a place, given that it offered all before."""
        self._tree_odds = PositionOdds(most, better_than=self._odds)
        self._tree_cost = Correction()
        self._followed: dict[Sequence, PositionOdds] = {}
        self._plain_seconds = 0.0
        """Time of steps without drafts since the last one with some."""
        self._plain_steps = 0
        self._since_plain = 0
        self._steps_with_drafts = 0
        self._remind = self._remind_next = _SOON
        self._clearly = False
        self._chosen = 0
        """Drafts of each sequence that paid by the last estimate; tries do not count."""
        self._some_pending = False
        """Some of the sequences that may have drafts have a token in flight."""
        self._judged_for: int | None = None
        """Number of sequences of that estimate; None: it is out of date."""
        self._looked_at = 0
        """Number of decoding sequences when they were last checked for drafts."""
        self._looks_away = 0
        """Steps left in which no sequence is sought for a try: all texts took too long to read."""
        self.joined = True
        """All sequences with drafts have them in the same steps. Else two halves would take turns where steps overlap,
        each reading all weights."""
        self._gaps: dict[int, float] = {}
        """Where steps overlap: the host's seconds before a step with drafts, by bit length of the number of sequences
        with drafts."""
        self._patience = 1.0
        self._next_probe = 0.0
        """Seconds without drafts until the next try."""
        self._usual_answer = _USUAL_ANSWER
        self._may_rest = rests and adaptive
        self._hopeless = False
        """By the last estimate drafts are far from paying, both for one sequence and for all."""
        self._holed: set[Sequence] = set()
        """Sequences that get no more drafts: hidden states of some of their tokens were not stored."""
        self._resting: list[Sequence] = []
        """Sequences of the last step in which the head rested, all in `_holed`."""
        self._pause: Pause | None = None
        self._may_pause: list[Sequence] = []
        """Decoding sequences of the step being planned, if it may begin a pause."""
        self._ruled = RuledLookups(most, adaptive, clock, self.times)

    @property
    def drafts_follow(self) -> bool:
        return (self.drafts_ahead and self._chosen > 0
                and (not self.adaptive or not self._goes_without(self._since_plain + 1)))

    def _head_rests(self, planned: list[Planned]) -> bool:
        """Of a step without drafts: whether it stores no hidden states. They cannot be made up for, so True ends drafts
        for the sequences of the step. Later sequences can still have drafts: while a try is due, False until it was
        made."""
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
            ruled = self._under_grammars(decoding)
            if not ruled:
                self._may_pause = decoding
                return _NOTHING
            return DraftChoice(self._ruled.choose(ruled, len(decoding), self._limited(room)))
        self._looked_at = len(decoding)
        return super().choose(decoding, room)

    def _rests(self, decoding: list[Sequence]) -> bool:
        """Whether drafts do not pay for these sequences, nothing was learned since, and no try is due. Then nothing is
        computed here: the host's time shows in small steps."""
        if (not decoding or not self.adaptive or self._chosen or self._judged_for is None
                or len(decoding) != self._looked_at or bool(decoding[0].num_pending) != self.overlaps):
            return False
        if self._is_time_to_try:
            self._looks_away -= 1
            return self._looks_away >= 0
        return True

    def _choose(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]:
        looked_up = self._ruled.choose(self._under_grammars(sequences), num_decoding, room)
        room -= sum(drafts.count for drafts in looked_up.values())
        return looked_up | self._choose_own(sequences, num_decoding, room)

    def _choose_own(self, sequences: list[Sequence], num_decoding: int, room: int) -> dict[int, Drafts]:
        others, sequences = sequences, self._draftable(sequences)
        count = min(self.most, room // len(sequences)) if sequences else 0
        shape = self._tree_in(room // len(sequences)) if sequences else None
        if self.adaptive and count:
            able = sequences
            if self._chosen or not self._some_pending:
                sequences, count, shape = self._paying(able, num_decoding, room)
                self._believe(count, len(able))
            else:
                count = 0  # decided in `_waiting`, with those in flight
            if count and self._goes_without(self._since_plain):
                count, shape = 0, None
            elif not count and (one := self._to_try(able, num_decoding)) is not None:
                # One sequence is enough for a try.
                sequences, count, shape = [one], self._tried, None
                self._patience, self._plain_seconds = min(max(1.0, 2 * self._patience), _MOST_PATIENCE), 0.0
        elif not self.adaptive or any(seq.request.start_grammar is None for seq in others):
            self._chosen = count
            self._judged_for = None if sequences else self._judged_for
        return self._drafts_of(sequences, count, shape)

    def _draftable(self, sequences: list[Sequence]) -> list[Sequence]:
        """Those without a grammar and without holes."""
        found = [seq for seq in sequences if seq.request.start_grammar is None and seq not in self._holed]
        self._all_cut = self._cuts and all(drawn_plainly(seq, self._cuts_drawn) for seq in found)
        return found

    def _paying(self, sequences: list[Sequence], num_decoding: int, room: int
                ) -> tuple[list[Sequence], int, TreeShape | None]:
        """The sequences that should have drafts, how many, and in which tree, by the current estimates."""
        if self._odds.tries < _KNOWN_TRIES:
            sequences = [seq for seq in sequences if self._reading(seq, num_decoding) <= 1.0]
        if not sequences:
            return [], 0, None
        each = room // len(sequences)
        return sequences, *self._best(sequences, num_decoding, min(self.most, each), self._tree_in(each))

    def _believe(self, count: int, judged_for: int) -> None:
        """Note an estimate. One that ends drafts may not hold for all sequences: it is made once more."""
        self._judged_for = None if self._chosen and not count else judged_for
        if self.overlaps and self._chosen and not count and self._steps_with_drafts < _FIRST_STEPS:
            self._patience = self._next_probe = 0.0
        if count and not self._chosen:
            self._remind = self._remind_next = _SOON
        self._chosen = count
        self._hopeless = self._may_rest and not count and self._is_hopeless(1) and self._is_hopeless(judged_for)

    def _is_hopeless(self, sequences: int) -> bool:
        """Whether drafts are far from paying for so many sequences, by the engine's average acceptance."""
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
        """Where drafts pay, all: for their token in flight, and for drafts in flight to be verified, so that all go on
        together. Where a try is due, the sequence that tries: where steps overlap it always has a token in flight."""
        if self._holed:
            able = [seq for seq in able if seq not in self._holed]
            if not able:
                self._judged_for = 0  # the next sequence needs an estimate of its own
        pending = [seq for seq in able if seq.num_pending]
        self._some_pending = bool(pending)
        pays = self._chosen > 0 or not self.adaptive
        if pays and self.joined and any(drafts for _, _, drafts in self._in_flight):
            return {seq.row for seq in self._draftable(able)}
        if not pending or (self.adaptive and not self._clearly and self._goes_without(self._since_plain)):
            return set()  # the step without drafts overlaps with the next one, as it would without speculation
        if not pays:
            sequences = self._draftable(able)
            if sequences and self._is_another(len(sequences)):
                self._believe(self._paying(sequences, num_decoding, room)[1], len(sequences))
        if pays or self._chosen:
            return {seq.row for seq in pending}
        one = self._to_try([seq for seq in sequences if seq.num_pending], num_decoding)
        return set() if one is None else {one.row}

    def _goes_without(self, steps: int) -> bool:
        """Whether, after so many steps with drafts, one runs without, to keep its measured time up to date."""
        return steps >= (max(self._remind, _OFTEN_ENOUGH) if self._clearly else self._remind)

    def _is_another(self, count: int) -> bool:
        """Whether the number of sequences differs from that of the last estimate by more than an eighth."""
        return self._judged_for is None or 8 * abs(count - self._judged_for) > self._judged_for

    def _largest(self, seq: Sequence) -> TreeShape | None:
        params = seq.request.params
        reads = params.penalised or bool(seq.request.bad_words) or seq.num_output_tokens < params.min_tokens
        return None if self._gpu and reads else super()._largest(seq)

    def _lacks(self, seq: Sequence) -> int:
        """Tokens that the model has to catch up with, unless they are few."""
        behind = len(seq.tokens) - self._seen.get(seq, 0) if self.own_kv else 0
        return behind if behind > _NEARLY_THERE else 0

    def _reading(self, seq: Sequence, num_decoding: int) -> float:
        """Time for the model to catch up with a text, relative to the time allowed for it. The output is expected to be
        as long as outputs usually are here, or as long as it is already."""
        if not self._lacks(seq):
            return 0.0
        room, done = seq.request.max_len - seq.num_prompt_tokens, len(seq.tokens) - seq.num_prompt_tokens
        answer = min(float(room), max(float(done), self._usual_answer))
        return self._catching_up([seq]) / max(_TEXT_SHARE * answer * self.times.estimate(num_decoding), 1e-9)

    def _catching_up(self, sequences: list[Sequence]) -> float:
        behind = sum(map(self._lacks, sequences))
        return self.times.factor * (self.seconds_behind * behind + (self._to_begin if behind else 0.0))

    def _tree_in(self, nodes: int) -> TreeShape | None:
        """The tree of a sequence that may have at most so many nodes."""
        if self.tree is None or nodes < 2:
            return None
        nodes = min(nodes, self.tree.nodes)
        return TreeShape(self.tree.width, min(self.tree.depth, nodes), nodes)

    def _best(self, sequences: list[Sequence], num_decoding: int, most: int, shape: TreeShape | None
              ) -> tuple[int, TreeShape | None]:
        """How many drafts of each sequence give the most tokens per second: a chain, or a tree within this shape."""
        if not self.times.known or not self.drafting.known:
            return most, shape
        gain = _LEAST_CUT_GAIN if self._all_cut and len(sequences) == 1 else _LEAST_MODEL_GAIN
        plain = num_decoding / self.times.estimate(num_decoding)
        best, best_rate = 0, gain * plain
        chains = [self._follow(seq).chain(most) for seq in sequences]
        more = self._catching_up(sequences) / _HORIZON + self._gap(len(sequences))
        tokens = float(num_decoding)
        for count in range(1, most + 1):
            tokens += sum(chain[count - 1] for chain in chains)
            if self._all_cut and count < most:
                continue  # the model itself ends its chains
            rate = tokens / (self._seconds(num_decoding, len(sequences), count) + more)
            if rate > best_rate or (best and rate > _NEARLY * best_rate):
                best, best_rate = count, max(rate, best_rate)
        shapes = [] if shape is None else shape.shallower()
        shape = None
        for each in shapes:
            tokens = num_decoding + len(sequences) * sum(self._tree_odds.chain(each.depth))
            rate = tokens / (self._seconds(num_decoding, len(sequences), each.depth, each.nodes) + more)
            if rate > best_rate:
                best, best_rate, shape = each.depth, rate, each
        if not best:
            return 0, None
        self._patience = 1.0
        self._clearly = best_rate > _CLEARLY * plain
        self._remind_next = min(2 * self._remind, _SELDOM if self._clearly else _REMIND)
        return best, shape

    def _gap(self, count: int) -> float:
        """The host's time before a step in which so many sequences have drafts. A batch larger than any measured is
        expected to take no longer, until measured; a smaller one less, but not in proportion."""
        known = [size for size in self._gaps if size <= count.bit_length()]
        if known or not self._gaps:
            return self._gaps[max(known)] if known else 0.0
        least = min(self._gaps)
        return self._gaps[least] * 0.5 ** ((least - count.bit_length()) / 2)

    def _price(self, num_decoding: int, seq: Sequence) -> float:
        """Cost of a try with this sequence. Where steps overlap, a try puts its sequence a step or two behind the
        others, so earlier tries count."""
        tried = self._followed[seq].tries if self.overlaps and seq in self._followed else 0.0
        return self._catching_up([seq]) + tried * self.times.estimate(num_decoding)

    @property
    def _is_time_to_try(self) -> bool:
        """By the price of the last try."""
        return not self._since_plain and self._plain_seconds >= self._next_probe

    def _to_try(self, sequences: list[Sequence], num_decoding: int) -> Sequence | None:
        """The sequence for a try, if one is due."""
        if not self._is_time_to_try:
            return None
        one = min(sequences, key=partial(self._price, num_decoding), default=None)
        if one is None or self._reading(one, num_decoding) > 1.0:
            self._looks_away = _LOOK_AGAIN
            return None
        extra = self._seconds(num_decoding, 1, self._tried) - self.times.estimate(num_decoding)
        extra += self._catching_up([one])
        if self.overlaps:
            # The sequence that tries waits for a token before and after; the others go on without it.
            extra += 2 * (self._gap(1) if num_decoding == 1 else self.times.estimate(num_decoding) / num_decoding)
        self._next_probe = self._patience * extra / _PROBE_SHARE
        return one if self._plain_seconds >= self._next_probe else None

    def _seconds(self, num_decoding: int, num_drafting: int, count: int, nodes: int | None = None) -> float:
        """Expected seconds of a step with chains of `count` drafts, or trees of `nodes` nodes that are `count` deep."""
        drafting = self.times.factor * self.drafting.estimate(num_drafting)
        passes: float = self.pass_shares(count)
        rows: float = count if nodes is None else nodes
        if self._all_cut and nodes is None:
            # A chain that ends early costs one pass more, and passes go on until the last chain ends.
            chances = self._offered.chain(count)
            rows, passes = sum(chances), 1.0 + sum(1.0 - (1.0 - each) ** num_drafting for each in chances[:-1])
            passes = self.pass_shares(passes)
        found = self.times.estimate(num_decoding + num_drafting * rows) + passes * drafting
        return found if nodes is None else self._tree_cost.factor * found

    @property
    def _tried(self) -> int:
        """Drafts of a try: the likely ones and one more. All, where the model ends chains itself."""
        return self.most if self._all_cut else min(self.most, 1 + sum(map(_LIKELY.__le__, self._odds.chain(self.most))))

    def pass_shares(self, passes: float) -> float:
        """Cost of so many passes, in passes. Where a whole chain is one call, the first pass, with the host's work for
        all, costs about as much as two."""
        return passes + 1.0 if self._cuts else passes

    def _follow(self, seq: Sequence) -> PositionOdds:
        found = self._followed.get(seq)
        if found is None:
            found = self._followed[seq] = PositionOdds(self.most, self._odds, borrowed=self._borrowed)
        return found

    def _own_drafts(self, entry: PlanEntry) -> int:
        return entry.device_drafts

    def submitted(self, planned: list[Planned], single: bool = False) -> bool:
        pause = self._pause
        if pause is not None:
            if single and (self._in_flight or not self.overlaps) and pause.holds(planned):
                pause.left -= 1
                self._in_flight.append((pause, self._clock(), 0))
                return pause.head_rests
            self._end_pause(pause)
        super().submitted(planned, single)
        self._ruled.read(planned, single)
        if single:
            rests = self._head_rests(planned)
            if self._may_pause:
                self._begin_pause(rests)
            return rests
        load = self._in_flight[-1][0]
        if isinstance(load, Load) and load.drafts:
            load.behind = self._behind
            load.passes = max(entry.draft_depth or entry.device_drafts for _, entry, _ in planned)
            load.trees = any(entry.draft_depth for _, entry, _ in planned)
            if load.trees:
                load.passes = self.pass_shares(load.passes)
            elif self._cuts:
                load.asked = tuple(entry.device_drafts for _, entry, _ in planned)
        return False

    # ---- pauses

    def _begin_pause(self, rests: bool) -> None:
        """After this step, up to the next try."""
        sequences, self._may_pause = self._may_pause, []
        until_try = (self._next_probe - self._plain_seconds) / max(self.times.estimate(len(sequences)), 1e-9)
        steps = int(min(until_try, LONGEST))
        if steps > 1 and not any(seq.request.beams for seq in sequences):  # those do not count as decoding
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
            self._tree_cost.fade(pause.done)
            self._since_plain, self._remind = 0, self._remind_next

    def _paused_step_done(self, pause: Pause, began: float, lost: bool) -> bool:
        seconds, gap = self._seconds_since(began)
        if lost or pause is not self._pause:
            return True
        pause.done += 1
        pause.seconds += seconds if self.overlaps else seconds + gap
        return False

    def _correct(self, load: Load, judged: list[int]) -> None:
        offered = [(asked, there) for asked, there in zip(load.asked, judged, strict=True) if asked]
        load.tokens -= sum(asked - there for asked, there in offered)
        load.passes = self.pass_shares(max(min(asked, there + 1) for asked, there in offered))
        if not load.behind:
            for asked, there in offered:
                self._offered.add([True] * there + [False] * (there < asked))

    def _observe(self, load: Load, seconds: float, gap: float) -> None:
        if not load.trees:
            self._tree_cost.fade()
        if not self.overlaps:
            seconds += gap
        elif 2 * load.drafting >= load.tokens - load.drafts - load.others:  # a try's gap hides behind steps of others
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
        if load.trees and not load.behind:
            self._tree_cost.follow(seconds / believed)
            return
        if load.behind:
            self._learn_reading(load.behind, max(0.0, seconds - believed) / factor)
            return
        # The share of drafting is not measured: both parts are assumed to have changed alike.
        ratio = seconds / believed
        self.drafting.observe(load.drafting, ratio * self.drafting.estimate(load.drafting))
        self.times.follow(ratio)

    def _observe_plain(self, tokens: int, seconds: float) -> None:
        """Learn from a step without drafts. While drafts do not pay, from one in eight: only the next try needs it."""
        self._plain_steps += 1
        if self._chosen or not self.overlaps or self._plain_steps % 8 == 1 or not self.times.known:
            self.times.observe(tokens, seconds)
        self._plain_seconds += seconds
        self._since_plain, self._remind = 0, self._remind_next

    def _learn_reading(self, behind: int, seconds: float) -> None:
        """Few tokens show the constant part, many the time per token."""
        if behind < _MANY_BEHIND:
            self._to_begin += 0.5 * (max(0.0, seconds - self.seconds_behind * behind) - self._to_begin)
        else:
            self.seconds_behind += 0.5 * (max(0.0, seconds - self._to_begin) / behind - self.seconds_behind)

    def took(self, seq: Sequence, entry: PlanEntry, result: EntryResult, accepted: int) -> None:
        if entry.num_tokens > 1 or self._ruled.follows(seq):
            super().took(seq, entry, result, accepted)
        elif entry.num_tokens and entry.start >= seq.num_prompt_tokens:
            # A step without drafts is only counted. A fork's first token comes from its leader's entry.
            stats = self.stats
            stats.decode_steps += 1
            stats.decode_tokens += 1
            seq.request.counts.decode_steps += 1

    def _learn(self, seq: Sequence, entry: PlanEntry, accepted: int, result: EntryResult) -> None:
        """Where a chain was cut, a draft that was not offered counts as a miss: what counts is what asking brings."""
        self._ruled.learn(seq, entry, accepted, result)
        if not entry.device_drafts:
            return
        if result.undraftable:
            self._holed.add(seq)
            self._judged_for = None
        depth = len(offered_by_depth(result))
        if self._cuts and not result.parents and not entry.draft_depth:
            depth = entry.device_drafts
        if depth:
            if accepted and not self._chosen:  # a try: the less a hit was expected, the sooner the next try
                self._patience = max(1.0, self._patience * self._odds.chain(1)[0])
            self._judged_for = None
            hits = [True] * accepted + [False] * (accepted < depth)
            (self._tree_odds if result.parents else self._follow(seq)).add(hits)

    def preempted(self) -> None:
        if self._pause is not None:
            self._end_pause(self._pause)

    def forget(self, seq: Sequence) -> None:
        if self._pause is not None:
            self._end_pause(self._pause)
        self._ruled.forget(seq)
        self._followed.pop(seq, None)
        self._seen.pop(seq, None)
        self._holed.discard(seq)
        self._resting = []
        self._looks_away = 0
        if not self.overlaps:
            self._judged_for = None  # the next text is judged for itself
        if self._patience > _WITH_OTHER_TEXT and not self.overlaps:
            self._next_probe, self._patience = self._next_probe * _WITH_OTHER_TEXT / self._patience, _WITH_OTHER_TEXT
        self._usual_answer += _FOLLOW_ANSWERS * (len(seq.tokens) - seq.num_prompt_tokens - self._usual_answer)
