"""Proposes drafts with a model, on the device, before the target judges them in the same step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from quire.kernels.cpu.sampling import CpuSampling
from quire.kernels.types import StepContext
from quire.layers.stream import ResidualStream
from quire.sampling.batch import PlainDraw, SamplingBatch, SamplingRow
from quire.sampling.philox import Purpose
from quire.sampling.sampler import OK, draw_weights
from quire.scheduler.plan import BlockCopy, PlanEntry, TransferStart
from quire.speculation.verify import NoiseKeys, pick
from quire.worker.draws import draw_rows
from quire.worker.passes import Lists, Passes
from quire.worker.request_table import RequestTable
from quire.worker.tree_inputs import Node


class DraftModel(Protocol):
    """What makes the drafts: a smaller model with a cache of its own, the target without some layers, or a head that
    reads the target's hidden states."""

    @property
    def states(self) -> Sequence[str]:
        """Hidden states of the target that it reads: "final", "embed" or "layers.i"."""
        ...

    def watched(self, ctx: StepContext, stream: ResidualStream, captured: Mapping[str, Tensor]) -> None:
        """The target has computed a step's tokens: the stream after its last layer, and the states that are read."""
        ...

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        """Blocks of the cache were copied."""
        ...

    def moved(self, transfers: Sequence[TransferStart]) -> None:
        """Blocks begin to move between the device and a tier."""
        ...

    def written(self, entries: Sequence[PlanEntry]) -> None:
        """The target is about to write these tokens' KV."""
        ...

    def restart(self, row: int) -> None:
        """The row belongs to another sequence from now on."""
        ...

    def catch_up(self, entry: PlanEntry) -> tuple[int, int]:
        """(start, tokens) that it has to compute before it can say what follows `entry.start`, that one included."""
        ...

    def logits(self, passes: Sequence[PlanEntry]) -> Tensor | None:
        """Compute these, and give what may follow the last token of each; None on a rank that does not draw."""
        ...

    def node_logits(self, nodes: Sequence[Node]) -> Tensor | None:
        """Compute nodes of trees, whose ancestors were computed before, and give what may follow each of them; None on
        a rank that does not draw. What it keeps of them holds until the row's next `catch_up`."""
        ...

    def kept(self, row: int, num_tokens: int) -> None:
        """So many tokens of the row are known to be right."""
        ...


@runtime_checkable
class ChainModel(Protocol):
    """A draft model that takes tokens itself, one after the other."""

    def chains(self, passes: Sequence[PlanEntry], counts: Sequence[int], draws: Sequence[PlainDraw]) -> list[list[int]]:
        """Compute these, and give the tokens that may follow the last of each, up to so many: the likeliest, or drawn
        as `draws` say of the first."""
        ...


class Proposer(Protocol):
    """Who fills in the drafts of a step's entries."""

    @property
    def model(self) -> DraftModel: ...

    def propose(self, entries: Sequence[PlanEntry]) -> tuple[list[PlanEntry], dict[int, Tensor]]:
        """The entries with the values of their drafts (perhaps fewer than asked for, and then fewer tokens), and by
        place of the entry the integer weights [drafts, vocabulary] that its drafts were drawn with."""
        ...


MOST_AT_ONCE = 512
"""Tokens of a row that a draft model catches up with in one step; while it is behind it proposes nothing."""
_NO_TOKEN = -1


class Drafter:
    """Draws up to k drafts of every row that asks for some, one pass for all of them after the other.

    Under the coupled verifier a draft is drawn with the noise that the target will draw with at that place,
    which makes them agree where the two distributions do; under rejection it has noise of its own.
    """

    def __init__(self, model: DraftModel, table: RequestTable, rejection: bool, passes: Passes | None = None) -> None:
        """`passes`: those of a model that ranks share; then what one of them draws all are told."""
        self.model = model
        self._table = table
        self._sampling = CpuSampling()
        self._rejection = rejection
        self.passes = passes

    def propose(self, entries: Sequence[PlanEntry]) -> tuple[list[PlanEntry], dict[int, Tensor]]:
        drafts: dict[int, list[int]] = {}
        weights: dict[int, list[Tensor]] = {}
        passes: dict[int, PlanEntry] = {}
        for i, entry in enumerate(entries):
            if entry.device_drafts:
                start, count = self.model.catch_up(entry)
                drafts[i], weights[i] = [], []
                passes[i] = PlanEntry(entry.row, start, min(count, MOST_AT_ONCE), count <= MOST_AT_ONCE)
        if passes and isinstance(self.model, ChainModel) and (draws := self._plain_draws(passes.values())) is not None:
            counts = [entries[i].device_drafts for i in passes]
            found = self.model.chains(list(passes.values()), counts, draws)
            return with_drafts(entries, dict(zip(passes, found, strict=True))), {}
        states = {i: without_logprobs(self._table.sampling(entries[i].row)) for i in passes}
        while passes:
            self._advance(entries, passes, states, drafts, weights)
        stacked = {i: torch.stack(rows) for i, rows in weights.items() if rows}
        return with_drafts(entries, drafts), stacked

    def _plain_draws(self, passes: Iterable[PlanEntry]) -> list[PlainDraw] | None:
        """What the drafts of each are drawn with; None if one of them catches up, has its logits changed, or has to
        keep the weights that it draws with."""
        found = []
        for one in passes:
            draw = PlainDraw.of(self._table.sampling(one.row)) if one.sample else None
            if draw is None or (self._rejection and draw.temperature > 0.0):
                return None
            found.append(draw)
        return found

    def _advance(self, entries: Sequence[PlanEntry], passes: dict[int, PlanEntry], states: dict[int, SamplingRow],
                 drafts: dict[int, list[int]], weights: dict[int, list[Tensor]]) -> None:
        """One pass: a draft more for everybody who goes on."""
        going = [i for i, one in passes.items() if one.sample]
        logits = self.model.logits(list(passes.values()))
        places = list(passes)
        tokens: list[int | None] = []
        if going and logits is not None:
            tokens = self._draw(logits[[places.index(i) for i in going]], [states[i] for i in going],
                                [weights[i] for i in going])
        if going and self.passes is not None:
            mine = None if logits is None else [[_NO_TOKEN if token is None else token for token in tokens]]
            tokens = [None if token == _NO_TOKEN else token for token in self.passes.tell_all(mine)[0]]
        passes_done = dict(passes)
        passes.clear()
        for i, token in zip(going, tokens, strict=True):
            if token is None:
                continue
            drafts[i].append(token)
            if len(drafts[i]) < entries[i].device_drafts:
                end = passes_done[i].start + passes_done[i].num_tokens
                self._table.tokens[entries[i].row, end] = token
                states[i] = states[i].ahead((token,))
                passes[i] = PlanEntry(entries[i].row, end, 1, True)

    def _draw(self, logits: Tensor, rows: list[SamplingRow], weights: list[list[Tensor]]) -> list[int | None]:
        """A token for each, or None where the draft model has none to give."""
        if not self._rejection:
            output = draw_rows(logits, rows, self._sampling)
            return [token if status == OK else None
                    for token, status in zip(output.tokens, output.status, strict=True)]
        batch = SamplingBatch.build(rows, logits.shape[1])
        found: list[int | None] = []
        for row, mine, kept in zip(rows, draw_weights(logits, batch), weights, strict=True):
            if not bool(mine.any()):
                found.append(None)
                continue
            kept.append(mine)
            found.append(int(pick(mine[None], NoiseKeys.of([row]).noise(Purpose.DRAFT))))
        return found


class ToldDrafter:
    """Drafts that only some ranks have a model for: the first tensor rank of every stage, or, where the model reads the
    target's hidden states, that of the last stage alone. It proposes, the others are told."""

    def __init__(self, proposer: Proposer | None, tell: Callable[[Lists | None], Lists],
                 states: Sequence[str] = ()) -> None:
        """`proposer`: on a rank that has the model; `tell` brings what it says to those that have not. `states`: of the
        target, that this rank hands on to the one that reads them."""
        self._proposer = proposer
        self._tell = tell
        self.model: DraftModel = NoKV(states) if proposer is None else proposer.model

    def propose(self, entries: Sequence[PlanEntry]) -> tuple[list[PlanEntry], dict[int, Tensor]]:
        asking = [i for i, entry in enumerate(entries) if entry.device_drafts]
        if self._proposer is None:
            told = self._tell(None)
            drafts, parents = told[: len(asking)], told[len(asking) :]
            return with_drafts(entries, dict(zip(asking, drafts, strict=True)),
                               dict(zip(asking, parents, strict=True))), {}
        filled, guesses = self._proposer.propose(entries)
        self._tell([filled[i].drafts for i in asking] + [filled[i].parents for i in asking])
        return filled, guesses


class NoKV:
    """The bookkeeping of a draft model that keeps nothing of its own: there is none."""

    def __init__(self, states: Sequence[str] = ()) -> None:
        self.states: Sequence[str] = states

    def watched(self, ctx: StepContext, stream: ResidualStream, captured: Mapping[str, Tensor]) -> None:
        pass

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        pass

    def moved(self, transfers: Sequence[TransferStart]) -> None:
        pass

    def written(self, entries: Sequence[PlanEntry]) -> None:
        pass

    def restart(self, row: int) -> None:
        pass

    def kept(self, row: int, num_tokens: int) -> None:
        pass

    def catch_up(self, entry: PlanEntry) -> tuple[int, int]:
        return entry.start, 1

    def logits(self, passes: Sequence[PlanEntry]) -> Tensor | None:
        return None

    def node_logits(self, nodes: Sequence[Node]) -> Tensor | None:
        return None


def with_drafts(entries: Sequence[PlanEntry], drafts: Mapping[int, Sequence[int]],
                parents: Mapping[int, Sequence[int]] | None = None) -> list[PlanEntry]:
    """The entries with the drafts of some of them, by place; `parents`: of those that are trees."""
    filled = list(entries)
    for i, tokens in drafts.items():
        filled[i] = replace(entries[i], drafts=tuple(tokens), num_tokens=1 + len(tokens), device_drafts=0,
                            parents=tuple((parents or {}).get(i, ())), draft_depth=0)
    return filled


def without_logprobs(row: SamplingRow) -> SamplingRow:
    """Log-probabilities of drafts are never requested."""
    own = row.ahead(())
    if own.params.logprobs is not None:
        own.params = replace(own.params, logprobs=None)
    return own
