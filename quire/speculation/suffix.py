"""Suffix lookup: proposes what followed the last tokens in this request or in recent outputs of the same domain."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from quire.speculation.automaton import SuffixAutomaton
from quire.speculation.ngram import NgramProposer
from quire.speculation.proposer import SHORT, Proposal, Proposer, ProposerSource

_CONTEXT = 32
"""Last prompt tokens that are kept with an output, so that its first tokens can be matched too."""
_SEPARATOR = -1


class RecentOutputs:
    """Outputs of one domain in two generations: when the young one is full, the old one is dropped.

    So memory is bounded, the newest half always stays, and no automaton ever has to delete.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = max(1, most_tokens // 2)
        self.generations: list[SuffixAutomaton] = [SuffixAutomaton(), SuffixAutomaton()]
        """Old, young."""
        self.turns = 0
        self._noted: deque[Sequence[int]] = deque()
        """Queued outputs that are in no generation yet; of the first one, tokens from `_next` on."""
        self._next = 0
        self._num_noted = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(generation.text) for generation in self.generations) + self._num_noted

    def add(self, tokens: Sequence[int]) -> None:
        """Queue an output. A short one is added at once, others by `catch_up`."""
        tokens = tokens[-self._most :]
        self._noted.append(tokens)
        self._num_noted += len(tokens)
        while self._num_noted > self._most and len(self._noted) > 1:
            self._num_noted -= len(self._noted.popleft()) - self._next
            self._next = 0
        if len(self._noted) == 1 and len(tokens) <= SHORT:
            self.catch_up(SHORT)

    def catch_up(self, most: int) -> int:
        """Add queued outputs until the cost reaches `most` ordinary tokens; returns the cost."""
        spent = 0
        while self._noted and spent < most:
            tokens = self._noted[0]
            if not self._next:
                self._make_room(len(tokens))
            young = self.generations[1]
            taken, cost = young.take(tokens, self._next, most - spent)
            spent += cost
            self._num_noted -= taken
            self._next += taken
            if self._next == len(tokens):
                young.add(_SEPARATOR)
                self._noted.popleft()
                self._next = 0
        return spent

    def _make_room(self, num_tokens: int) -> None:
        young = self.generations[1]
        if len(young.text) and len(young.text) + num_tokens > self._most:
            self.generations = [young, SuffixAutomaton()]
            self.turns += 1


class SuffixProposer(Proposer):
    """The longer of two matches: in the sequence's own text, or in its domain's recent outputs."""

    def __init__(self, outputs: RecentOutputs, tokens: Sequence[int], num_prompt_tokens: int, least_match: int) -> None:
        self._own = NgramProposer(least_match)
        self._least = least_match
        self._outputs = outputs
        self._turns = outputs.turns
        self._tail = list(tokens[max(0, num_prompt_tokens - _CONTEXT) : num_prompt_tokens])
        """What this sequence adds to the recent outputs when it ends."""
        self._places = [(0, 0), (0, 0)]
        """State and length of the match in each generation."""
        self._own.extend(tokens[:num_prompt_tokens])
        self._follow(self._tail)
        self.extend(tokens[num_prompt_tokens:])

    def extend(self, tokens: Sequence[int]) -> None:
        self._own.extend(tokens)
        self._tail.extend(tokens)
        self._follow(tokens)

    def _follow(self, tokens: Sequence[int]) -> None:
        if self._turns != self._outputs.turns:
            # The generations were replaced, so the states are stale: match the last tokens again.
            self._turns = self._outputs.turns
            self._places = [(0, 0), (0, 0)]
            tokens = self._tail[-_CONTEXT:]
        for i, generation in enumerate(self._outputs.generations):
            state, length = self._places[i]
            for token in tokens:
                state, length = generation.step(state, length, token)
            self._places[i] = state, length

    def catch_up(self, most: int) -> int:
        return self._own.catch_up(most)

    def propose(self, most: int) -> Proposal:
        self._follow(())
        best = self._own.propose(most)
        for generation, (state, length) in zip(self._outputs.generations, self._places, strict=True):
            if length >= self._least and length > best.evidence:
                found = generation.continuation(generation.place(state), most, repeat=False)
                if found:
                    best = Proposal(found, length)
        return best

    def cursor(self) -> tuple[tuple[int, int] | None, ...]:
        self._follow(())
        return self._own.cursor(), *self._places

    def followers(self, cursor: object, most: int) -> list[tuple[int, int]]:
        assert isinstance(cursor, tuple)
        own, *places = cursor
        found = {} if own is None else dict(self._own.followers(own, most))
        for generation, (state, length) in zip(self._outputs.generations, places, strict=True):
            for token, evidence in generation.followers(state, length, self._least, most):
                found[token] = max(evidence, found.get(token, 0))
        return sorted(found.items(), key=lambda pair: -pair[1])[:most]

    def follow(self, cursor: object, token: int) -> tuple[tuple[int, int] | None, ...]:
        assert isinstance(cursor, tuple)
        own, *places = cursor
        return (None if own is None else self._own.follow(own, token),
                *(generation.step(state, length, token)
                  for generation, (state, length) in zip(self._outputs.generations, places, strict=True)))

    def finish(self, late: Sequence[int] = ()) -> None:
        self._outputs.add([*self._tail, *late])


class SuffixSource(ProposerSource):
    """One `RecentOutputs` per domain; beyond `most_tokens` in all, least recently used domains are dropped."""

    def __init__(self, least_match: int, most_tokens: int) -> None:
        self._least = least_match
        self._most = most_tokens
        self._domains: OrderedDict[object, RecentOutputs] = OrderedDict()

    def open(self, tokens: Sequence[int], num_prompt_tokens: int, domain: object) -> Proposer:
        outputs = self._domains.setdefault(domain, RecentOutputs(self._most))
        self._domains.move_to_end(domain)
        held = sum(one.num_tokens for one in self._domains.values())
        while held > self._most and len(self._domains) > 1:
            held -= self._domains.popitem(last=False)[1].num_tokens
        return SuffixProposer(outputs, tokens, num_prompt_tokens, self._least)

    def catch_up(self, most: int) -> int:
        done = 0
        for outputs in self._domains.values():
            if done < most:
                done += outputs.catch_up(most - done)
        return done
