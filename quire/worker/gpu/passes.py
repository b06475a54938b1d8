"""Passes through a decoder that ranks on GPUs share: what stages hand on to each other, launched like all the rest.

Tensor ranks of the last stage all have the logits, and draw the same tokens from them: nobody has to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import Tensor

from quire.errors import InvariantError
from quire.kernels.types import LayerCache, StepContext
from quire.layers.stream import ResidualStream
from quire.models.decoder import Decoder
from quire.models.heads.head import DraftHead
from quire.parallel.collectives import TensorGroup
from quire.parallel.peers import RowsLink


@dataclass(slots=True)
class DeviceRanks:
    """Everybody whom a rank's launches talk to."""

    group: TensorGroup | None = None
    before: RowsLink | None = None
    after: RowsLink | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Around whatever waits for the device on the host: ends with RankLostError if another rank did not come."""
        yield

    @property
    def waited_ns(self) -> int:
        """Nanoseconds that the device has waited for other ranks."""
        return 0

    def close(self) -> None:
        """Let go of memory and connections. Idempotent."""


class DevicePasses:
    """This rank's part of each pass; with one rank it is the decoder's own."""

    may_rest = False
    """There are passes that keep nothing for a draft head, beside those that do."""

    def __init__(self, decoder: Decoder, ranks: DeviceRanks | None) -> None:
        self.decoder: Decoder | DraftHead = decoder
        self._decoder = decoder
        self._ranks = DeviceRanks() if ranks is None else ranks
        self.place = decoder.shard.place

    def forward(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], rows: Tensor, places: Tensor
    ) -> ResidualStream:
        """The stream after this stage's layers. `rows`, `places`: of every token, int32: its row of the request table
        (-1: padding) and its position."""
        stream = self._decoder.forward(self._taken_over(ids), ctx, caches)
        self._hand_on(stream)
        return stream

    def _taken_over(self, ids: Tensor) -> Tensor:
        """What this stage's layers read: the rows of the stage before, or the tokens themselves."""
        return ids if self.place.is_first else self._received(ids)

    def _received(self, ids: Tensor) -> Tensor:
        return _known(self._ranks.before).receive(ids.shape[0], self._decoder.spec.hidden_size)

    def _hand_on(self, stream: ResidualStream, states: Iterable[Tensor] = ()) -> None:
        """To the next stage, if there is one."""
        if not self.place.is_last:
            for rows in (stream.settled(), *states):
                _known(self._ranks.after).send(rows)

    def unwatched(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], rows: Tensor, places: Tensor
    ) -> ResidualStream:
        """As `forward`, but nothing is kept of it for a draft head."""
        return DevicePasses.forward(self, ids, ctx, caches, rows, places)

    def forward_nodes(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], rows: Tensor, places: Tensor, after: Tensor
    ) -> ResidualStream:
        """The same of nodes of trees. `after`: one place further than that of the token that each follows."""
        return self.forward(ids, ctx, caches, rows, places)

    def logits(self, hidden: ResidualStream, ctx: StepContext | None = None, out: Tensor | None = None) -> Tensor:
        """On every tensor rank of the last stage, which all have to ask."""
        found = self._decoder.gathered_logits(hidden, ctx, out)
        if found is None:
            raise InvariantError("a rank of a GPU has no logits: its group was made for a CPU")
        return found

    def settle(self) -> None:
        """The launches of a step, or of a captured part of one, end here."""
        if self._ranks.group is not None:
            self._ranks.group.settle()


class CapturingPasses(DevicePasses):
    """Passes of a target whose hidden states a head on the last stage reads: each stage hands on those of its own
    layers, and of the stages before it."""

    def __init__(self, decoder: Decoder, ranks: DeviceRanks | None, states: Sequence[str]) -> None:
        """`states`: of layers before the last, by name; the same on all stages."""
        super().__init__(decoder, ranks)
        stages = {name: decoder.shard.stage_of(name) for name in dict.fromkeys(states)}
        self._earlier = [name for name, stage in stages.items() if stage < self.place.stage]
        self._own = [name for name, stage in stages.items() if stage == self.place.stage]
        self._so_far = [name for name, stage in stages.items() if stage <= self.place.stage]

    def forward(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], rows: Tensor, places: Tensor
    ) -> ResidualStream:
        return self._capture(ids, ctx, caches)[0]

    def _capture(
        self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache]
    ) -> tuple[ResidualStream, dict[str, Tensor]]:
        """The stream after this stage's layers, and the states up to here."""
        x = self._taken_over(ids)
        found = {name: self._received(ids) for name in self._earlier}
        if self._own:
            stream, captured = self._decoder.forward_capturing(x, ctx, caches, self._own)
            found |= captured
        else:
            stream = self._decoder.forward(x, ctx, caches)
        self._hand_on(stream, (found[name] for name in self._so_far))
        return stream, found


def _known(link: RowsLink | None) -> RowsLink:
    if link is None:
        raise InvariantError("a stage without links to its neighbours")
    return link
