"""Where one sequence stands in its grammar, as a function of the tokens it has; and what may come next.

State follows the tokens, never events: a matcher is shown the output so far, goes forward over what is new
and back over what is no longer there. So preemption, swapping, forks, refused drafts and beams that change
places need no word about grammars.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from quire.structured.output import agreement
from quire.structured.vocabulary import Vocabulary, import_xgrammar


class CompiledGrammar:
    """A grammar over one model's vocabulary; any number of sequences start from it."""

    __slots__ = ("_compiled", "_drawable", "_named", "_vocabulary", "num_bytes")

    def __init__(self, compiled: Any, vocabulary: Vocabulary, named: frozenset[int] = frozenset()) -> None:
        """`named`: special tokens that the grammar asks for by their ids."""
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._named = named
        self._drawable = vocabulary.drawable_with(named)
        self.num_bytes = int(compiled.memory_size_bytes)

    def start(self, stop_ids: frozenset[int]) -> SequenceGrammar:
        """For one sequence; those of `stop_ids` that are no text may come where the text may end."""
        return SequenceGrammar(self._compiled, self._vocabulary, stop_ids, self._named, self._drawable)


class SequenceGrammar:
    """The matcher of one sequence."""

    __slots__ = ("_accepted", "_agreed", "_drawable", "_end_ids", "_matcher", "_silent", "_vocabulary", "_words")

    def __init__(self, compiled: Any, vocabulary: Vocabulary, stop_ids: frozenset[int], named: frozenset[int],
                 drawable: np.ndarray) -> None:
        self._matcher = import_xgrammar().GrammarMatcher(compiled)
        self._vocabulary = vocabulary
        self._silent = vocabulary.silent_ids - named if named else vocabulary.silent_ids
        self._drawable = drawable
        self._end_ids = sorted(stop_ids & vocabulary.silent_ids)
        self._accepted: list[int] = []
        self._agreed = 0
        """How many of these were in the output when it was last shown; drafts come after them."""
        self._words = np.zeros((1, -(-vocabulary.size // 32)), np.int32)

    def mask(self, output: Sequence[int]) -> bytes:
        """One bit for each token of the vocabulary, in words of 32: may it follow `output`?

        No bit is set after an output that is not the grammar's: whoever draws then finds nothing and says so.
        """
        return self._next() if self._follow(output) else bytes(self._words.nbytes)

    @staticmethod
    def masks_of_all(asking: Sequence[tuple[SequenceGrammar, Sequence[int]]]) -> list[bytes]:
        """The mask of each after its output, as `mask` gives it, filled by one call of the library on its threads."""
        words = np.zeros((len(asking), asking[0][0]._words.shape[1]), np.int32)
        going = [place for place, (grammar, output) in enumerate(asking) if grammar._follow(output)]
        if going:
            _batch_matcher().batch_fill_next_token_bitmask([asking[place][0]._matcher for place in going], words, going)
        for place in going:
            asking[place][0]._finish(words[place])
        return [row.tobytes() for row in words]

    def masks(self, output: Sequence[int], drafts: Sequence[int]) -> list[bytes]:
        """The mask after `output`, and after each of the drafts that follow it.

        After a draft that is not allowed nothing is: whoever verifies refuses that draft, and what came later.
        """
        found = [self.mask(output)]
        for place, token in enumerate(drafts):
            if not self._accept(token):
                nothing = bytes(self._words.nbytes)
                return found + [nothing] * (len(drafts) - place)
            found.append(self._next())
        return found

    is_over = False
    """What `over` said is all there is to say."""

    def ready(self, output: Sequence[int]) -> bool:
        """The mask is made when it is asked for."""
        return True

    def over(self, output: Sequence[int], must_know: bool = False) -> bool:
        """Is the text complete, with nothing that may follow it and no token that would say so?"""
        if self._end_ids:
            return False
        return self._follow(output) and bool(self._matcher.is_completed()) and not allows_any(self._next())

    def _follow(self, output: Sequence[int]) -> bool:
        """Bring the matcher to the end of `output`; false if the grammar does not go there."""
        known = self._accepted
        same = agreement(output, known, self._agreed)
        if same < len(known):
            self._matcher.rollback(len(known) - same)
            del known[same:]
        followed = all(self._accept(token) for token in output[same:])
        self._agreed = len(known)
        return followed

    def rewound(self, num_tokens: int) -> None:
        """Of what it was shown only the first `num_tokens` still hold."""
        self._agreed = min(self._agreed, num_tokens)

    def _accept(self, token: int) -> bool:
        if token in self._silent or not self._matcher.accept_token(token):
            return False
        self._accepted.append(token)
        return True

    def _next(self) -> bytes:
        self._matcher.fill_next_token_bitmask(self._words)
        self._finish(self._words[0])
        return self._words.tobytes()

    def _finish(self, words: np.ndarray) -> None:
        """What the library does not know of a mask that it has filled."""
        # Bits past the vocabulary are as they come, and free text has every token.
        words &= self._drawable
        vocabulary, accepted = self._vocabulary, self._accepted
        _set(words, vocabulary.after.get(accepted[-1], ()) if accepted else vocabulary.spaced_ids, False)
        if self._end_ids and self._matcher.is_completed():
            _set(words, self._end_ids, True)


def allows_any(mask: bytes) -> bool:
    """Whether any bit is set; not by looking at each byte, of which a large vocabulary has 19,000."""
    return mask != bytes(len(mask))


def _set(words: np.ndarray, tokens: Sequence[int], allowed: bool) -> None:
    bits = words.view(np.uint32)
    for token in tokens:
        if allowed:
            bits[token >> 5] |= np.uint32(1 << (token & 31))
        else:
            bits[token >> 5] &= np.uint32(~(1 << (token & 31)) & 0xFFFFFFFF)


@functools.cache
def _batch_matcher() -> Any:
    return import_xgrammar().BatchGrammarMatcher()
