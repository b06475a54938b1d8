"""A worker whose KV is numbers in lists: rows, block tables and contents as a real one keeps them, and no checks.

It does what plans say, right or wrong, as a real worker does: whatever is wrong with them shows in the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from quire.errors import InvariantError
from quire.executor.dummy import allowed_token
from quire.executor.kv_hash import (
    BlockStore,
    combined,
    content,
    drawn_token,
    log_likelihood,
    ranked_candidates,
    total,
    visible_from,
)
from quire.sampling.token_logprobs import LogprobRecord, TokenLogprobs
from quire.scheduler.plan import EntryResult, PlanEntry, RowStart, StepPlan
from quire.speculation.tree import ROOT, ancestry, child_with, depths, path_along


class KVPart(Protocol):
    """The part of every slot that this worker holds, where several ranks share them."""

    draws: bool
    """It has what all ranks read, and so draws the tokens."""

    def content(self, token: int, position: int) -> int: ...

    def total(self, sums: list[int]) -> list[int]:
        """From what this rank has read to what all have."""


class _Whole:
    """One worker that holds everything."""

    draws = True

    def content(self, token: int, position: int) -> int:
        return content(token, position)

    def total(self, sums: list[int]) -> list[int]:
        return sums


@dataclass(slots=True)
class _Row:
    """A row of the table. A new owner finds the tokens and tables of the one before, until a plan brings its own."""

    start: RowStart | None = None
    tokens: list[int] = field(default_factory=list)
    tables: list[list[int]] = field(default_factory=list)


class KVHashWorker:
    """Carries out plans on blocks of numbers."""

    def __init__(self, num_blocks: int, block_size: int, windows: Sequence[int | None] = (None,),
                 vocab_size: int = 1000, part: KVPart | None = None) -> None:
        self._part = _Whole() if part is None else part
        self.vocab_size = vocab_size
        self.device = [BlockStore(num_blocks, block_size) for _ in windows]
        self._windows = list(windows)
        self._block_size = block_size
        self._rows: dict[int, _Row] = {}
        self._states: dict[tuple[int, int], int] = {}
        """Of this step, by row and end: what is read there."""
        self._nodes: dict[tuple[int, tuple[int, ...]], int] = {}
        """Of this step, by row and nodes from the text on: what is read after the last of them."""
        self._undecided: dict[int, PlanEntry] = {}
        """By row, where another stage draws: the tree of its last step, until `learn` says what was kept."""

    def apply(self, plan: StepPlan) -> None:
        """Rows, tables and copies of a plan: all that comes before its forward pass."""
        for number in plan.freed_rows:
            self._row(number).start = None
        for start in plan.starts:
            row = self._row(start.row)
            row.start = start
            self._undecided.pop(start.row, None)
            row.tokens[: len(start.token_ids)] = start.token_ids
        for number, group, first, blocks in plan.diffs:
            table = self._row(number).tables[group]
            table.extend([0] * (first - len(table)))
            table[first : first + len(blocks)] = blocks
        for copy in plan.copies:
            self.device[copy.group].put(copy.target, self.device[copy.group].read(copy.source))

    def run(self, entries: Sequence[PlanEntry]) -> list[EntryResult]:
        """The forward pass: everybody writes, then everybody reads. No results where another rank draws."""
        for entry in entries:
            self._write(entry)
        wanted = list(dict.fromkeys(place for entry in entries for place in self._places_read(entry)))
        self._states = dict(zip(wanted, self._read(wanted), strict=True))
        trees = [entry for entry in entries if entry.parents]
        nodes = [(entry.row, entry.drawn_at, path) for entry in trees for path in ([], *ancestry(entry.parents))]
        self._nodes = {(row, tuple(path)): state
                       for (row, _, path), state in zip(nodes, self._read_nodes(nodes), strict=True)}
        if self._part.draws:
            return [self._draw(entry) for entry in entries]
        self._undecided |= {entry.row: entry for entry in trees}
        return []

    def learn(self, row: int, position: int, tokens: Sequence[int]) -> None:
        """Tokens that another rank has drawn. Of a tree this rank moves its part of what was kept."""
        _put(self._row(row).tokens, position, tokens)
        entry = self._undecided.pop(row, None)
        if entry is not None and entry.drawn_at == position:
            for place, node in enumerate(path_along(entry.drafts, entry.parents, tokens)):
                self._move_slot(self._row(row), position + node, position + place)

    def owner(self, row: int) -> RowStart | None:
        """Who has the row now."""
        return self._row(row).start

    def _row(self, row: int) -> _Row:
        if row not in self._rows:
            self._rows[row] = _Row(tables=[[] for _ in self._windows])
        return self._rows[row]

    # ---- writing

    def _write(self, entry: PlanEntry) -> None:
        row, end = self._row(entry.row), entry.start + entry.num_tokens
        known = entry.drafts or entry.given
        if known:
            _put(row.tokens, end - len(known), known)
        for place in range(entry.start, end - entry.num_drafts if entry.parents else end - entry.device_drafts):
            self._write_slot(row, place)
        for node, depth in enumerate(depths(entry.parents)):
            self._write_slot(row, entry.drawn_at + node, entry.start + depth)

    def _write_slot(self, row: _Row, place: int, position: int | None = None) -> None:
        """The token at a place; a node of a tree has a position that is not its place."""
        index, offset = divmod(place, self._block_size)
        value = self._part.content(row.tokens[place] if place < len(row.tokens) else 0,
                                   place if position is None else position)
        for store, table in zip(self.device, row.tables, strict=True):
            store.write(table[index] if index < len(table) else 0, offset, value)

    # ---- reading

    def _places_read(self, entry: PlanEntry) -> list[tuple[int, int]]:
        """Row and end of all that the results of an entry need. What the worker drafts itself it reads on its way."""
        row, end = self._row(entry.row), entry.start + entry.num_tokens
        if row.start is None:
            raise InvariantError(f"row {entry.row} of the request table is empty")
        if entry.device_drafts or entry.parents:
            return []
        if entry.drafts:
            return [(entry.row, end - place) for place in range(len(entry.drafts) + 1)]
        places = [(entry.row if entry.shares is None else entry.shares, end)]
        if entry.prompt_logprobs_from is not None:
            last = min(end, row.start.num_prompt_tokens - 1)
            places += [(entry.row, position + 1) for position in range(entry.prompt_logprobs_from, last)]
        return places

    def _read(self, places: Sequence[tuple[int, int]]) -> list[int]:
        """What the queries before these ends read, in all ranks together."""
        sums: list[int] = []
        for number, end in places:
            tables, blocks = self._row(number).tables, -(-end // self._block_size)
            sums += [store.sum([*table, *[0] * (blocks - len(table))], visible_from(window, end), end)
                     for store, table, window in zip(self.device, tables, self._windows, strict=True)]
        whole, size = self._part.total(sums), len(self._windows)
        return [combined(whole[at : at + size]) for at in range(0, len(whole), size)]

    def _state(self, row: int, end: int) -> int:
        """What the query at `end - 1` reads."""
        known = self._states.get((row, end))
        return self._read([(row, end)])[0] if known is None else known

    def _draw(self, entry: PlanEntry) -> EntryResult:
        row, end = self._row(entry.row), entry.start + entry.num_tokens
        if row.start is None:
            raise InvariantError(f"row {entry.row} of the request table is empty")
        if entry.parents or entry.draft_depth:
            return self._judge_tree(self._grown(entry, row, row.start), row, row.start)
        if entry.num_drafts:
            return self._judge(entry, row, row.start)
        state = self._state(entry.row if entry.shares is None else entry.shares, end)
        if entry.candidates:
            return EntryResult(candidates=ranked_candidates(state, entry.candidates, self.vocab_size))
        result = EntryResult()
        if entry.sample:
            result = self._drawn(state, row.start, end, entry.masks)
            if result.tokens:
                _put(row.tokens, end, result.tokens)
        if entry.prompt_logprobs_from is not None:
            result.prompt_logprobs = self._prompt_logprobs(entry, row, row.start)
        return result

    def _drawn(self, state: int, start: RowStart, position: int, masks: bytes) -> EntryResult:
        wanted = drawn_token(state, start.params, start.seed, start.sequence_index, position, self.vocab_size)
        result = allowed_token(masks, wanted) if masks else EntryResult([wanted])
        if start.params.logprobs is not None:
            result.logprobs = [self._described(state, token) for token in result.tokens]
        return result

    def _described(self, state: int, token: int) -> LogprobRecord:
        return TokenLogprobs(token, log_likelihood(state, token), 1 + state % 5, [], []).pack()

    def _prompt_logprobs(self, entry: PlanEntry, row: _Row, start: RowStart) -> list[LogprobRecord]:
        last = min(entry.start + entry.num_tokens, start.num_prompt_tokens - 1)
        return [self._described(self._state(entry.row, position + 1), row.tokens[position + 1])
                for position in range(entry.prompt_logprobs_from or 0, last)]

    def _judge(self, entry: PlanEntry, row: _Row, start: RowStart) -> EntryResult:
        """Keep drafts that are what is drawn at their places. Of its own it proposes every third one wrongly."""
        known = entry.start + entry.num_tokens - entry.num_drafts
        kept = EntryResult(num_drafts=entry.num_drafts, logprobs=None if start.params.logprobs is None else [])
        size = len(entry.masks) // (1 + entry.num_drafts)
        true = True
        for place in range(entry.num_drafts + 1):
            masks = entry.masks[place * size : (place + 1) * size]
            drawn = self._drawn(self._state(entry.row, known + place), start, known + place, masks)
            if drawn.error is not None:
                return kept if kept.tokens else drawn
            if true:
                kept.tokens += drawn.tokens
                if kept.logprobs is not None:
                    kept.logprobs += drawn.logprobs or []
            if place == entry.num_drafts:
                break
            proposed = entry.drafts[place] if entry.drafts else (drawn.tokens[0] + (place % 3 == 2)) % self.vocab_size
            true = true and proposed == drawn.tokens[0]
            if not entry.drafts:
                _put(row.tokens, known + place, [proposed])
                self._write_slot(row, known + place)
        _put(row.tokens, known, kept.tokens)
        return kept

    # ---- trees

    def _read_nodes(self, nodes: Sequence[tuple[int, int, Sequence[int]]]) -> list[int]:
        """What the queries of trees' nodes (row, place of node 0, nodes from the text to it) read, in all ranks
        together: the text before node 0, and the nodes from there to itself."""
        sums: list[int] = []
        for number, first, path in nodes:
            for store, table, window in zip(self.device, self._row(number).tables, self._windows, strict=True):
                low = visible_from(window, first + len(path))
                blocks = [*table, *[0] * (-(-(first + max(path, default=0) + 1) // self._block_size) - len(table))]
                known = store.sum(blocks, low, first) if low < first else 0
                for position, node in enumerate(path, start=first):
                    if position >= low:
                        index, offset = divmod(first + node, self._block_size)
                        known += store.at(blocks[index], offset, position)
                sums.append(total([known]))
        whole, size = self._part.total(sums), len(self._windows)
        return [combined(whole[at : at + size]) for at in range(0, len(whole), size)]

    def _drawn_after(self, entry: PlanEntry, start: RowStart, path: Sequence[int]) -> EntryResult:
        first = entry.drawn_at
        state = self._nodes.get((entry.row, tuple(path)))
        if state is None:
            state = self._read_nodes([(entry.row, first, path)])[0]
        return self._drawn(state, start, first + len(path), b"")

    def _grown(self, entry: PlanEntry, row: _Row, start: RowStart) -> PlanEntry:
        """The entry with a tree of its own, if it asks for one: two guesses at a place, of which the second is right,
        or the first, or none; the right branch grows on, else the first."""
        if entry.parents:
            return entry
        first, drafts, parents, path = entry.drawn_at, list[int](), list[int](), list[int]()
        for depth in range(entry.draft_depth):
            right = self._drawn_after(entry, start, path).tokens[0]
            guesses = [(right + step) % self.vocab_size for step in ((1, 0), (0, 1), (1, 2))[(first + depth) % 3]]
            parent, grows = path[-1] if path else ROOT, len(drafts)
            for guess in guesses[: entry.device_drafts - len(drafts)]:
                grows = len(drafts) if guess == right else grows
                parents.append(parent)
                _put(row.tokens, first + len(drafts), [guess])
                self._write_slot(row, first + len(drafts), first + depth)
                drafts.append(guess)
            path.append(grows)
            if len(drafts) == entry.device_drafts:
                break
        return replace(entry, drafts=tuple(drafts), parents=tuple(parents), num_tokens=1 + len(drafts),
                       device_drafts=0, draft_depth=0)

    def _judge_tree(self, entry: PlanEntry, row: _Row, start: RowStart) -> EntryResult:
        """Walk from the text to the node that is what was drawn, as far as there is one; what was kept goes to where
        its positions are."""
        first, path = entry.drawn_at, list[int]()
        kept = EntryResult(num_drafts=len(entry.drafts), parents=entry.parents,
                           logprobs=None if start.params.logprobs is None else [])
        node: int | None = ROOT
        while node is not None:
            drawn = self._drawn_after(entry, start, path)
            kept.tokens += drawn.tokens
            if kept.logprobs is not None:
                kept.logprobs += drawn.logprobs or []
            node = child_with(entry.drafts, entry.parents, node, drawn.tokens[0])
            if node is not None:
                path.append(node)
        kept.kept = tuple(path)
        for place, node in enumerate(path):
            self._move_slot(row, first + node, first + place)
        _put(row.tokens, first, kept.tokens)
        return kept

    def _move_slot(self, row: _Row, source: int, target: int) -> None:
        for store, table in zip(self.device, row.tables, strict=True):
            found = store.read(table[source // self._block_size])[source % self._block_size]
            store.write(table[target // self._block_size], target % self._block_size, found)


def _put(tokens: list[int], at: int, values: Sequence[int]) -> None:
    """Write values into a row of tokens, whatever was there."""
    tokens.extend([0] * (at - len(tokens)))
    tokens[at : at + len(values)] = values
