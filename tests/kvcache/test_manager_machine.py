"""A random life of the cache manager: nobody ever reads a block whose content is not its own prefix.

Physical contents are simulated slot by slot. Plans name several sequences, stay in flight for a while, and in
between sequences come, fork, diverge, leave their windows and go.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kvcache.block_pool import NO_BLOCK
from quire.kvcache.manager import GroupWindow, KVCacheManager
from quire.kvcache.table import PrefixMatch, SequenceKV
from tests.kvcache.contents import BlockContents, fingerprints

TOKENS = st.integers(0, 1)
TAILS = st.lists(TOKENS, min_size=1, max_size=4)
PROMPTS = st.builds(lambda zeros, tail: [0] * zeros + tail, st.integers(0, 11), TAILS)
"""Many begin alike."""
CHUNKS = st.sampled_from([1, 2, 3, 20])
GROUPS = st.sampled_from([(None,), (None,), (3,), (None, 3), (5, None), (1,), (None, 2, 7)])


@dataclass(eq=False)
class Life:
    """One sequence of the model."""

    kv: SequenceKV
    tokens: list[int]
    computed: int = 0
    confirmed: int = 0
    alive: bool = True


@dataclass
class Flight:
    step: int
    ends: list[tuple[Life, int]] = field(default_factory=list)


class ManagerMachine(RuleBasedStateMachine):
    @initialize(num_blocks=st.integers(3, 12), block_size=st.integers(1, 4), windows=GROUPS,
                caching=st.sampled_from([True, True, True, False]), first=st.lists(PROMPTS, max_size=3))
    def make(self, num_blocks: int, block_size: int, windows: tuple[int | None, ...], caching: bool,
             first: list[list[int]]) -> None:
        self.cache = KVCacheManager(num_blocks, block_size, tuple(GroupWindow(w) for w in windows), caching)
        self.contents = BlockContents(num_blocks, block_size, windows)
        self.windows = windows
        self.lives: list[Life] = []
        self.flights: deque[Flight] = deque()
        self.step = 0
        self.waiting: list[tuple[SequenceKV, list[int]]] = []
        """Sequences that were looked up and not let in."""
        self.hash_of_prefix: dict[int | None, bytes] = {}
        """By fingerprint, of every full block ever written; worked out from the tokens alone."""
        for tokens in first:
            self.come(tokens, b"", 20)

    # ---- the oracle

    def longest_match(self, key: bytes, tokens: list[int]) -> int:
        """Brute force over what registered blocks contain; knows no hashes."""
        size, chain = self.cache.block_size, fingerprints(key, tokens)
        if not self.cache.prefix_caching:
            return 0
        offered = [
            {self.contents.full_prefix(g, b) for b in range(pool.num_blocks) if pool.hash_of(b) is not None}
            for g, pool in enumerate(self.cache.pools)]
        for length in range((len(tokens) - 1) // size * size, 0, -size):
            groups = range(len(self.windows))
            needed = {(g, p // size) for g in groups for p in self.contents.visible(g, length, length)}
            if all(chain[(i + 1) * size - 1] in offered[g] for g, i in needed):
                return length
        return 0

    def holds_its_prefix(self, match: PrefixMatch, chain: list[int]) -> None:
        size = self.cache.block_size
        for group, blocks in enumerate(match.blocks):
            assert len(blocks) == match.num_tokens // size
            for position in self.contents.visible(group, match.num_tokens, match.num_tokens):
                slot = self.contents.slots[group][blocks[position // size]][position % size]
                assert slot == chain[position], "a matched block holds another prefix"

    # ---- rules

    @rule(tokens=PROMPTS, key=st.sampled_from([b"", b"", b"", b"tenant"]), most=CHUNKS)
    def arrive(self, tokens: list[int], key: bytes, most: int) -> None:
        self.come(tokens, key, most)

    def come(self, tokens: list[int], key: bytes, most: int) -> None:
        tokens = tokens[: self.cache.max_tokens - 1]
        kv = SequenceKV(key)
        match = self.cache.match(kv, tokens)
        assert match.num_tokens < len(tokens)
        assert match.num_tokens == self.longest_match(key, tokens)
        self.holds_its_prefix(match, fingerprints(key, tokens))
        chunk = min(len(tokens) - match.num_tokens, most)
        if self.cache.fits(len(tokens), match, chunk):
            self.cache.open(kv, match)
            life = Life(kv, list(tokens), match.num_tokens, match.num_tokens)
            self.lives.append(life)
            self.submit([life], [chunk])
            assert life.computed == match.num_tokens + chunk, "fits() promised room that was not there"

    @rule(tokens=PROMPTS, key=st.sampled_from([b"", b"", b"tenant"]))
    def wait(self, tokens: list[int], key: bytes) -> None:
        self.waiting = [*self.waiting[-2:], (SequenceKV(key), tokens)]

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def look_again(self, data: st.DataObject) -> None:
        """Whatever happened since the last look, a match is what a search from nothing finds."""
        kv, tokens = data.draw(st.sampled_from(self.waiting))
        tokens = tokens[: data.draw(st.integers(1, len(tokens)))]
        match = self.cache.match(kv, tokens)
        assert match.num_tokens == self.longest_match(kv.key, tokens)
        self.holds_its_prefix(match, fingerprints(kv.key, tokens))
        assert self.cache.match(kv, tokens) is match or not self.cache.prefix_caching
        for pool, blocks in zip(self.cache.pools, match.blocks, strict=True):
            if pool.chained:
                assert pool.num_idle_of(blocks) == sum(pool.references(block) == 0 for block in blocks)

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), tokens=TAILS)
    def compute(self, data: st.DataObject, tokens: list[int]) -> None:
        for life in self.lives:
            if life.computed == len(life.tokens):
                self.learn(life, tokens)
        if not self.runnable():
            return
        chosen = data.draw(st.lists(st.sampled_from(self.runnable()), min_size=1, max_size=4, unique=True))
        counts = [data.draw(st.integers(1, len(s.tokens) - s.computed)) for s in chosen]
        others = [life for life in self.lives if life not in chosen]
        self.submit(chosen, counts, data.draw(st.sampled_from([None, None, None, *others])))
        while len(self.flights) > 3:
            self.take_in()

    def runnable(self) -> list[Life]:
        return [life for life in self.lives if life.computed < len(life.tokens)]

    def submit(self, chosen: list[Life], counts: list[int], victim: Life | None = None) -> None:
        """As scheduler and worker do: slots for all, then one plan, whose copies come before its writes.

        A victim is preempted while the plan is drafted.
        """
        planned = []
        for life, count in zip(chosen, counts, strict=False):
            before = [list(table.blocks) for table in life.kv.tables]
            if self.cache.extend(life.kv, life.computed + count, life.computed):
                planned.append((life, count))
            else:
                assert [table.blocks for table in life.kv.tables] == before, "a refusal changed something"
            if victim is not None and victim.alive:
                self.end(victim)
        copies = self.cache.take_copies()
        if not planned and not copies:
            return
        self.step += 1
        names = self.contents.begin(self.step)
        for group, source, target in copies:
            for life, _ in planned:
                if target in life.kv.tables[group].blocks:
                    index = life.kv.tables[group].blocks.index(target)
                    valid = life.computed - index * self.cache.block_size
                    self.contents.copy(names, group, source, target, life, index, valid)
        for life, count in planned:
            tables = [table.blocks for table in life.kv.tables]
            chain = fingerprints(life.kv.key, life.tokens)
            self.contents.run(names, life, tables, chain, life.computed, life.computed + count)
            life.computed += count
            size = self.cache.block_size
            hashes = self.cache.chain.extend(SequenceKV(life.kv.key), life.tokens, life.computed)
            self.hash_of_prefix |= {chain[(i + 1) * size - 1]: found for i, found in enumerate(hashes)}
        self.cache.steps_submitted(self.step)
        self.flights.append(Flight(self.step, [(life, life.computed) for life, _ in planned]))

    @precondition(lambda self: self.flights)
    @rule()
    def collect(self) -> None:
        self.take_in()

    def take_in(self) -> None:
        flight = self.flights.popleft()
        self.cache.steps_done(flight.step)
        self.contents.retire(flight.step)
        for life, end in flight.ends:
            if life.alive:
                life.confirmed = end
                self.cache.publish(life.kv, life.tokens, end)
                self.cache.leave_window(life.kv, life.computed)

    def learn(self, life: Life, tokens: list[int]) -> None:
        life.tokens = (life.tokens + tokens)[: self.cache.max_tokens]

    @precondition(lambda self: self.lives)
    @rule(data=st.data(), tail=TAILS, goes_on=st.booleans())
    def fork(self, data: st.DataObject, tail: list[int], goes_on: bool) -> None:
        """The child may differ from the first token not computed; both may write into the shared block."""
        life = data.draw(st.sampled_from(self.lives))
        tokens = (life.tokens[: life.computed] + tail)[: self.cache.max_tokens]
        child = Life(self.cache.fork(life.kv), tokens, life.computed, life.confirmed)
        self.lives.append(child)
        if goes_on:
            self.submit([x for x in (life, child) if x in self.runnable()], [1, 1])

    @precondition(lambda self: len(self.lives) > 1)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.lives)))

    def end(self, life: Life) -> None:
        self.lives.remove(life)
        self.cache.free(life.kv)
        life.alive = False

    # ---- what must hold after each

    @invariant()
    def adds_up(self) -> None:
        if hasattr(self, "cache"):
            self.cache.check([life.kv for life in self.lives])

    @invariant()
    def blocks_are_registered_under_the_hash_of_what_they_hold(self) -> None:
        if not hasattr(self, "cache"):
            return
        for group, pool in enumerate(self.cache.pools):
            for block in range(pool.num_blocks):
                if (found := pool.hash_of(block)) is not None:
                    assert found == self.hash_of_prefix[self.contents.full_prefix(group, block)]

    @invariant()
    def windows_are_left(self) -> None:
        """A sequence with nothing in flight holds no block behind its window longer than it must."""
        if not hasattr(self, "cache") or self.flights:
            return
        for life in self.lives:
            for group, table in enumerate(life.kv.tables):
                assert all(b == NO_BLOCK for b in table.blocks[: table.first_live])
                assert NO_BLOCK not in table.blocks[table.first_live :]
                if self.windows[group] is None:
                    assert table.first_live == 0

    def teardown(self) -> None:
        if not hasattr(self, "cache"):
            return
        while self.flights:
            self.take_in()
        for life in self.lives:
            self.cache.free(life.kv)
        self.cache.check([])
        assert all(pool.num_available == pool.num_blocks for pool in self.cache.pools)


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = settings(
    max_examples=300, stateful_step_count=40, deadline=None, database=None, print_blob=True)
