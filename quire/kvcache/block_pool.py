"""Physical KV blocks: reference counts, which prefix each caches, which are free. Plain integers, O(1) per block."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice

from quire.errors import InvariantError
from quire.kvcache.eviction import EvictionPolicy
from quire.kvcache.examination import finish, parts, zeros

NO_BLOCK = -1


class BlockPool:
    """Blocks 0 … n-1 of one cache group, with reference counts and an index of cached prefixes.

    A block is in one of three states:
      used    references > 0; may also be registered under a hash, and then others can acquire it
      cached  references == 0, registered; kept until the eviction policy picks it
      free    references == 0, not registered

    If a tier copies an evicted block's content, the block counts as used until the copy is done (`left`).

    In a chained pool (full attention) a registered block is useful only while its parent is registered. Callers
    hold whole prefixes and release them deepest block first, so a parent is never evicted before its child.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy, chained: bool = True) -> None:
        self.num_blocks = num_blocks
        self.chained = chained
        self._policy = policy
        self._free: deque[int] = deque(range(num_blocks))
        self.counts = [0] * num_blocks
        """Reference count of each block. Others may read it; the manager does so for every decoded token."""
        self._hash: list[bytes | None] = [None] * num_blocks
        self._parent = [NO_BLOCK] * num_blocks
        self._children = [0] * num_blocks
        self._index: dict[bytes, int] = {}
        self._registered_at = [0] * num_blocks
        self.num_registrations = 0
        """Registrations over the pool's life; serves as a serial number."""
        self.num_changes = 0
        """Entries added to or removed from the prefix index so far."""
        self.num_evicted = 0
        """Cached blocks evicted over the pool's life."""
        self.num_leaving = 0
        """Evicted blocks whose content is still being copied to a tier."""
        self.num_promised = 0
        """Blocks requested in the current draft that were not free; reset by `begin_draft`."""
        self.on_evict: Callable[[int, bytes], bool] | None = None
        """Called with a block and its hash when it is evicted; true if a tier copies the content first."""

    def succeed(self, old: BlockPool) -> None:
        """Continue the counters of `old`; its cached prefixes are gone."""
        self.num_evicted, self.num_registrations = old.num_evicted, old.num_registrations
        self.num_changes = old.num_changes + 1

    # ---- counts

    @property
    def num_available(self) -> int:
        """Blocks that `allocate` could hand out now, evicting cached ones if necessary."""
        return len(self._free) + len(self._policy)

    @property
    def num_cached(self) -> int:
        return len(self._policy)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_available

    def at_most(self, wanted: int) -> int:
        """Blocks to ask for: `wanted`, but in a window pool no more than exist, since `wanted` overestimates there
        (sequences will soon give back blocks that have left the window)."""
        return wanted if self.chained else min(wanted, self.num_blocks)

    def references(self, block: int) -> int:
        return self.counts[block]

    def hash_of(self, block: int) -> bytes | None:
        return self._hash[block]

    @property
    def hashes(self) -> list[bytes | None]:
        """The hash each block is registered under; read-only."""
        return self._hash

    @property
    def parents(self) -> list[int]:
        """For each block its registered parent in the chain, or NO_BLOCK; read-only."""
        return self._parent

    # ---- taking and giving back

    def allocate(self) -> int:
        """A block with one reference and no content; evicts a cached block if none is free."""
        while not self._free and len(self._policy):
            self._evict()
        if not self._free:
            raise InvariantError("KV block asked for when none is left: callers check make_room first")
        block = self._free.popleft()
        if self.counts[block]:
            raise InvariantError(f"KV block {block} was handed out while {self.counts[block]} hold it")
        self.counts[block] = 1
        return block

    def allocate_into(self, blocks: list[int], count: int) -> None:
        """Append `count` blocks, as `allocate` returns them, without a call for each: a long prompt takes hundreds."""
        take, put, counts = self._free.popleft, blocks.append, self.counts
        at_hand = min(count, len(self._free))
        for _ in range(at_hand):
            block = take()
            if counts[block]:
                raise InvariantError(f"KV block {block} was handed out while {counts[block]} hold it")
            counts[block] = 1
            put(block)
        for _ in range(count - at_hand):
            put(self.allocate())

    def make_room(self, count: int) -> bool:
        """Are `count` blocks free? If not, evicts cached ones until they are, or will be once a tier has copied them.

        Evicts no more than needed. Blocks being copied out count, unless this draft promised them to another request.
        """
        while len(self._free) + self.num_leaving < count + self.num_promised and len(self._policy):
            self._evict()
        if len(self._free) >= count:
            return True
        self.num_promised += count
        return False

    def _evict(self) -> None:
        block = self._policy.pop()
        key = self._hash[block]
        self._forget(block)
        self.num_evicted += 1
        if self.on_evict is not None and key is not None and self.on_evict(block, key):
            self.counts[block] = 1
            self.num_leaving += 1
        else:
            self._free.append(block)

    def left(self, block: int) -> None:
        """The content of an evicted block has been copied, or will not be: free the block."""
        self.num_leaving -= 1
        self.release([block])

    def acquire(self, block: int) -> None:
        """Add a reference to a used or cached block."""
        if self.counts[block] == 0:
            if self._hash[block] is None:
                raise InvariantError(f"free KV block {block} acquired: it holds nothing")
            self._policy.remove(block)
        elif self._hash[block] is not None:
            self._policy.touch(block)
        self.counts[block] += 1

    def share(self, block: int) -> None:
        """Add a reference to a used block, for a fork of its holder; not counted as a reuse by the eviction policy."""
        if self.counts[block] == 0:
            raise InvariantError(f"KV block {block} shared while its reference count is 0")
        self.counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop one reference of each block; pass a chain deepest block first. Registered blocks stay cached.

        A block whose reference count is already 0 is left alone; the error is raised after the others were released.
        """
        overdrawn = NO_BLOCK
        counts, hashes, free = self.counts, self._hash, self._free
        for block in blocks:
            count = counts[block] - 1
            if count > 0:
                counts[block] = count
            elif count == 0:
                counts[block] = 0
                if hashes[block] is None:
                    free.append(block)
                else:
                    self._policy.add(block)
            else:
                overdrawn = block
        if overdrawn != NO_BLOCK:
            raise InvariantError(f"KV block {overdrawn} released more often than it was taken")

    # ---- the prefix index

    def lookup(self, key: bytes) -> int:
        """The block registered under `key`, or NO_BLOCK. Adds no reference."""
        return self._index.get(key, NO_BLOCK)

    def unchanged(self, block: int, key: bytes, since: int) -> bool:
        """Has `block` cached the prefix `key` ever since the pool had counted `since` registrations?"""
        return self._hash[block] == key and self._registered_at[block] <= since

    def num_idle_of(self, chain: list[int]) -> int:
        """Number of unreferenced blocks in a cached prefix, in O(log n): a holder of a block holds all before it."""
        return len(chain) - bisect_left(chain, True, key=lambda block: self.counts[block] == 0)

    def register(self, block: int, key: bytes, parent: int) -> None:
        """Make a full block findable under `key`; `parent`: the registered block before it, or NO_BLOCK."""
        if key in self._index or self._hash[block] is not None:
            raise InvariantError(f"KV block {block} registered twice")
        if self.counts[block] == 0:
            raise InvariantError(f"KV block {block} registered while its reference count is 0")
        linked = self.chained and parent != NO_BLOCK
        if linked and self._hash[parent] is None:
            raise InvariantError(f"KV block {block} registered behind unregistered parent {parent}")
        self._hash[block] = key
        self._index[key] = block
        self.num_registrations += 1
        self.num_changes += 1
        self._registered_at[block] = self.num_registrations
        if linked:
            self._parent[block] = parent
            self._children[parent] += 1
        self._policy.register(block, key, parent if linked else NO_BLOCK)

    def drop_cached(self) -> int:
        """Evict every cached block; returns how many."""
        dropped = 0
        while len(self._policy):
            block = self._policy.pop()
            self._forget(block)
            self._free.append(block)
            dropped += 1
        return dropped

    def _forget(self, block: int) -> None:
        key = self._hash[block]
        if key is None:
            raise InvariantError(f"KV block {block} evicted but never registered")
        if self._children[block]:
            raise InvariantError(f"KV block {block} evicted before its {self._children[block]} children")
        del self._index[key]
        self.num_changes += 1
        self._hash[block] = None
        parent = self._parent[block]
        if parent != NO_BLOCK:
            self._children[parent] -= 1
            self._parent[block] = NO_BLOCK

    # ---- self-examination

    def check(self) -> None:
        """Verify every invariant; O(blocks)."""
        finish(self.examination())

    def examination(self) -> Iterator[None]:
        """`check` in parts; valid only if nothing changes between the parts."""
        waiting = iter(self._free)
        free = bytearray(self.num_blocks)
        for part in parts(len(self._free)):
            for block in islice(waiting, len(part)):
                if free[block]:
                    raise InvariantError("a KV block is in the free list twice")
                free[block] = 1
            yield
        children = zeros(self.num_blocks)
        idle = registered = 0
        for part in parts(self.num_blocks):
            for block in part:
                self._check_block(block, free[block] == 1)
                key = self._hash[block]
                registered += key is not None
                idle += key is not None and self.counts[block] == 0
                if self._parent[block] != NO_BLOCK:
                    children[self._parent[block]] += 1
            yield
        for part in parts(self.num_blocks):
            if children[part.start : part.stop].tolist() != self._children[part.start : part.stop]:
                raise InvariantError("child counts of KV blocks do not add up")
            yield
        if idle != len(self._policy) or registered != len(self._index):
            raise InvariantError("the eviction policy or the prefix index has lost track of a KV block")

    def _check_block(self, block: int, free: bool) -> None:
        key, references = self._hash[block], self.counts[block]
        if free != (references == 0 and key is None):
            raise InvariantError(f"KV block {block} is misplaced: {references} references, hash {key!r}")
        if key is not None and self._index.get(key) != block:
            raise InvariantError(f"KV block {block} is not the one its hash leads to")
        if self._parent[block] != NO_BLOCK and self._hash[self._parent[block]] is None:
            raise InvariantError(f"KV block {block} is stranded behind an evicted parent")
