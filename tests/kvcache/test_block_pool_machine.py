"""A random life of the block pool against a model made of plain dictionaries and lists."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from quire.kvcache.block_pool import NO_BLOCK, BlockPool
from quire.kvcache.eviction import LRU

Path = tuple[str, ...]


def key_of(path: Path) -> bytes:
    return "/".join(path).encode()


class Holder:
    """Holds a chain of blocks; the first `len(path)` of them are registered."""

    def __init__(self) -> None:
        self.blocks: list[int] = []
        self.path: Path = ()


class BlockPoolMachine(RuleBasedStateMachine):
    """Holders keep the pool's contract: they hold whole prefixes and let go of them deepest block first."""

    @initialize(num_blocks=st.integers(1, 8))
    def make(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks, LRU())
        self.num_blocks = num_blocks
        self.holders: list[Holder] = []
        self.index: dict[Path, int] = {}
        self.idle: list[int] = []
        """Registered blocks that nobody holds, least recently used first."""
        self.evicted = 0

    # ---- the model's own arithmetic

    def references(self, block: int) -> int:
        return sum(block in holder.blocks for holder in self.holders)

    def path_of(self, block: int) -> Path | None:
        return next((path for path, b in self.index.items() if b == block), None)

    def num_free(self) -> int:
        return sum(not self.references(b) and self.path_of(b) is None for b in range(self.num_blocks))

    def note_release(self, block: int) -> None:
        if not self.references(block) and self.path_of(block) is not None:
            self.idle.append(block)

    # ---- rules

    @rule()
    def a_holder_comes(self) -> None:
        self.holders.append(Holder())

    @precondition(lambda self: self.holders and self.pool.num_available)
    @rule(data=st.data())
    def allocate(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        free = self.num_free()
        block = self.pool.allocate()
        if free:
            assert not self.references(block) and self.path_of(block) is None
        else:
            victim = self.idle.pop(0)
            assert block == victim, "eviction is not in the exact order of last use"
            del self.index[self.path_of(victim) or ()]
            self.evicted += 1
        holder.blocks.append(block)

    @precondition(lambda self: any(len(h.path) < len(h.blocks) for h in self.holders))
    @rule(data=st.data(), label=st.sampled_from("ab"))
    def register(self, data: st.DataObject, label: str) -> None:
        holder = data.draw(st.sampled_from([h for h in self.holders if len(h.path) < len(h.blocks)]))
        depth = len(holder.path)
        path, block = (*holder.path, label), holder.blocks[depth]
        if path in self.index:
            other = self.index[path]
            assert self.pool.lookup(key_of(path)) == other
            self.pool.acquire(other)
            if other in self.idle:
                self.idle.remove(other)
            holder.blocks[depth] = other
            self.pool.release([block])
        else:
            assert self.pool.lookup(key_of(path)) == NO_BLOCK
            self.pool.register(block, key_of(path), holder.blocks[depth - 1] if depth else NO_BLOCK)
            self.index[path] = block
        holder.path = path

    @precondition(lambda self: self.index)
    @rule(data=st.data())
    def adopt_a_cached_prefix(self, data: st.DataObject) -> None:
        path = data.draw(st.sampled_from(sorted(self.index)))
        holder = Holder()
        for depth in range(1, len(path) + 1):
            block = self.pool.lookup(key_of(path[:depth]))
            assert block == self.index[path[:depth]], "a cached block is stranded behind an evicted parent"
            self.pool.acquire(block)
            if block in self.idle:
                self.idle.remove(block)
            holder.blocks.append(block)
        holder.path = path
        self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), keep=st.integers(0, 3))
    def let_go(self, data: st.DataObject, keep: int) -> None:
        """Of everything, or of the deepest part."""
        holder = data.draw(st.sampled_from(self.holders))
        given = holder.blocks[keep:][::-1]
        self.pool.release(given)
        holder.blocks, holder.path = holder.blocks[:keep], holder.path[:keep]
        for block in given:
            self.note_release(block)
        if not holder.blocks:
            self.holders.remove(holder)

    @rule()
    def drop_cached(self) -> None:
        assert self.pool.drop_cached() == len(self.idle)
        self.index = {path: b for path, b in self.index.items() if b not in self.idle}
        self.idle = []

    # ---- what must hold after each

    @invariant()
    def pool_agrees_with_model(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert [self.pool.references(b) for b in range(self.num_blocks)] == [
            self.references(b) for b in range(self.num_blocks)]
        assert self.pool.num_cached == len(self.idle)
        assert self.pool.num_available == self.num_free() + len(self.idle)
        assert self.pool.num_used == self.num_blocks - self.pool.num_available
        assert self.pool.num_evicted == self.evicted
        for path, block in self.index.items():
            assert self.pool.lookup(key_of(path)) == block and self.pool.hash_of(block) == key_of(path)
            assert path[:-1] == () or path[:-1] in self.index, "a child outlived its parent"


TestBlockPoolMachine = BlockPoolMachine.TestCase
TestBlockPoolMachine.settings = settings(
    max_examples=80, stateful_step_count=50, deadline=None, database=None, print_blob=True)
