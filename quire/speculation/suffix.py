"""Cached continuations: what followed the last tokens in this request or in recent outputs of the same tenant."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from quire.speculation.automaton import SuffixAutomaton
from quire.speculation.ngram import NgramProposer
from quire.speculation.proposer import Proposal, Proposer, ProposerSource

_CONTEXT = 32
"""Last tokens of a prompt that are kept with its output, so that the first tokens can be matched too."""
_SEPARATOR = -1


class RecentOutputs:
    """Outputs of one domain in two generations: when the young one is full the old one is forgotten.

    So what is kept is bounded, the newest half of it always stays, and nothing is ever taken apart.
    """

    def __init__(self, most_tokens: int) -> None:
        self._most = max(1, most_tokens // 2)
        self.generations: list[SuffixAutomaton] = [SuffixAutomaton(), SuffixAutomaton()]
        """Old, young."""
        self.turns = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(generation.text) for generation in self.generations)

    def add(self, tokens: Sequence[int]) -> None:
        young = self.generations[1]
        if len(young.text) and len(young.text) + len(tokens) > self._most:
            young = SuffixAutomaton()
            self.generations = [self.generations[1], young]
            self.turns += 1
        young.extend(tokens[-self._most :])
        young.add(_SEPARATOR)


class SuffixProposer(Proposer):
    """The longer of two matches: in the sequence's own text, or in its domain's recent outputs."""

    def __init__(self, outputs: RecentOutputs, tokens: Sequence[int], num_prompt_tokens: int, least_match: int) -> None:
        self._own = NgramProposer(least_match)
        self._least = least_match
        self._outputs = outputs
        self._turns = outputs.turns
        self._tail = list(tokens[max(0, num_prompt_tokens - _CONTEXT) : num_prompt_tokens])
        """What this sequence will leave behind."""
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
            # The states belonged to generations that are gone: the last tokens tell where we are now.
            self._turns = self._outputs.turns
            self._places = [(0, 0), (0, 0)]
            tokens = self._tail[-_CONTEXT:]
        for i, generation in enumerate(self._outputs.generations):
            state, length = self._places[i]
            for token in tokens:
                state, length = generation.step(state, length, token)
            self._places[i] = state, length

    def propose(self, most: int) -> Proposal:
        self._follow(())
        best = self._own.propose(most)
        for generation, (state, length) in zip(self._outputs.generations, self._places, strict=True):
            if length >= self._least and length > best.evidence:
                found = generation.continuation(generation.place(state), most, repeat=False)
                if found:
                    best = Proposal(found, length)
        return best

    def finish(self) -> None:
        self._outputs.add(self._tail)


class SuffixSource(ProposerSource):
    """One store of outputs per domain; beyond `most_tokens` in all, domains not used lately are forgotten."""

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
