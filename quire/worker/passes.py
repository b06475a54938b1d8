"""Passes through a decoder that ranks share: what stages hand on to each other, and what the drawing rank tells all."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from quire.errors import EngineError, StepError
from quire.kernels.types import LayerCache, StepContext
from quire.layers.stream import ResidualStream
from quire.models.decoder import Decoder
from quire.models.heads.spec import FINAL
from quire.parallel.collectives import Collectives, Link, receive_tensor, send_tensor

_FAILED = -1
Lists = Sequence[Sequence[int]]
"""A list of tokens for each of several entries."""
Watcher = Callable[[StepContext, ResidualStream, Mapping[str, Tensor]], None]
"""Is shown a step's stream after the last layer, and other hidden states by their names."""


class Passes:
    """This rank's part of each pass. With one rank it is the decoder's forward, and nothing is sent."""

    def __init__(self, decoder: Decoder, collectives: Collectives | None = None) -> None:
        self._decoder = decoder
        self.place = decoder.shard.place
        self._group = None if collectives is None else collectives.group
        self._before = None if collectives is None else collectives.before
        self._after = None if collectives is None else collectives.after
        self.recorder = decoder.ops.recorder(self._group)

    @property
    def alone(self) -> bool:
        return self.place.num_ranks == 1

    def forward(self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache],
                kept: Sequence[int] | None = None) -> ResidualStream:
        """The stream after this stage's layers, or after those of them that are `kept`."""
        self._decoder.reach(ctx)
        x = ids if self.place.is_first else self._take_over(_known(self._before), ids)
        if self.recorder is None:
            stream = self._run(x, ctx, caches, kept)
        else:
            stream = self._decoder.resumed(self.recorder.run(
                None if kept is None else tuple(kept), x, ctx, caches,
                lambda: self._run(x, ctx, caches, kept).settled()))
        self._hand_on(ids, stream)
        return stream

    def forward_watched(self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], states: Sequence[str],
                        watched: Watcher) -> ResidualStream:
        """As `forward`; `watched` is shown the stream and the hidden states that it reads. Where nobody else has a part
        of the step, what it computes is recorded with the step."""
        inner = [name for name in dict.fromkeys(states) if name != FINAL]
        if self.recorder is None or not self.alone:
            stream, captured = self._forward_capturing(ids, ctx, caches, inner)
            watched(ctx, stream, captured)
            return stream
        self._decoder.reach(ctx)

        def forward() -> Tensor:
            stream, captured = self._decoder.forward_capturing(ids, ctx, caches, inner)
            watched(ctx, stream, captured)
            return stream.settled()

        return self._decoder.resumed(self.recorder.run(("watched", *inner), ids, ctx, caches, forward))

    def _forward_capturing(self, ids: Tensor, ctx: StepContext, caches: Sequence[LayerCache], inner: Sequence[str]
                           ) -> tuple[ResidualStream, dict[str, Tensor]]:
        """As `forward`, with hidden states of other layers than the last. Each stage hands on those of its own layers
        and of the stages before it: the last has them all. Only one tensor rank of every stage asks for them."""
        if not inner:
            return self.forward(ids, ctx, caches), {}
        self._decoder.reach(ctx)
        x = ids if self.place.is_first else self._take_over(_known(self._before), ids)
        stages = {name: self._decoder.shard.stage_of(name) for name in inner}
        found = {name: receive_tensor(_known(self._before), (ids.numel(), self._decoder.spec.hidden_size))
                 for name in inner if stages[name] < self.place.stage}
        mine = [name for name in inner if stages[name] == self.place.stage]
        stream, captured = self._run_capturing(x, ctx, caches, mine)
        found |= captured
        self._hand_on(ids, stream, list(found.values()))
        return stream, found

    def _run_capturing(self, x: Tensor, ctx: StepContext, caches: Sequence[LayerCache], states: Sequence[str]
                       ) -> tuple[ResidualStream, dict[str, Tensor]]:
        if self.recorder is None:
            return self._decoder.forward_capturing(x, ctx, caches, states)

        def forward() -> tuple[Tensor, ...]:
            stream, captured = self._decoder.forward_capturing(x, ctx, caches, states)
            return stream.settled(), *(captured[name] for name in states)

        rows, *others = self.recorder.run_all(("capturing", *states), x, ctx, caches, forward)
        return self._decoder.resumed(rows), dict(zip(states, others, strict=True))

    def _hand_on(self, ids: Tensor, stream: ResidualStream, states: Sequence[Tensor] = ()) -> None:
        """To the next stage, if there is one."""
        if self.place.is_last:
            return
        after = _known(self._after)
        send_tensor(after, torch.cat((torch.tensor([ids.numel()]), ids)))
        for rows in (stream.settled(), *states):
            send_tensor(after, rows)

    def _run(self, x: Tensor, ctx: StepContext, caches: Sequence[LayerCache],
             kept: Sequence[int] | None) -> ResidualStream:
        if kept is None:
            return self._decoder.forward(x, ctx, caches)
        return self._decoder.forward_some(x, ctx, caches, kept)

    def _take_over(self, before: Link, ids: Tensor) -> Tensor:
        """The rows of the stage before, once it is sure that both speak of the same tokens."""
        count = int(receive_tensor(before, (1,), torch.int64))
        theirs = receive_tensor(before, (count,), torch.int64)
        if not torch.equal(theirs, ids):
            raise EngineError(f"stage {self.place.stage} was handed a step of {count} tokens that are not the "
                              f"{ids.numel()} of its own plan: ranks have lost step with each other")
        return receive_tensor(before, (count, self._decoder.spec.hidden_size))

    def logits(self, hidden: ResidualStream) -> Tensor | None:
        """On the rank that draws; None on the others. Every tensor rank of the last stage has to ask."""
        return self._decoder.gathered_logits(hidden) if self.place.is_last else None

    # ---- what was drawn

    def tell_group(self, lists: Lists | None, failure: Exception | None = None) -> Lists:
        """What the first tensor rank of this stage says, on all of them; a StepError where it says that it failed."""
        text = None if failure is None else f"{type(failure).__name__}: {failure}"
        if self._group is None:
            if text is not None:
                raise StepError(text) from failure
            return lists or ()
        message: bytes | None = None
        if text is not None:
            message = np.array([_FAILED], np.int32).tobytes() + text.encode()
        elif lists is not None:
            message = _packed(lists)
        found = self._group.broadcast(message)
        if np.frombuffer(found[:4], np.int32)[0] == _FAILED:
            raise StepError(found[4:].decode(errors="replace")) from failure
        return _unpacked(found)

    def tell_all(self, lists: Lists | None) -> Lists:
        """What the drawing rank says, on every rank of every stage: to the group, then round the ring of stages."""
        if self.place.is_last:
            found = self.tell_group(lists)
            if self.place.num_stages > 1:
                send_lists(_known(self._after), found)
            return found
        found = receive_lists(_known(self._before))
        if self.place.stage < self.place.num_stages - 2:
            send_lists(_known(self._after), found)
        return found


def _known(link: Link | None) -> Link:
    if link is None:
        raise EngineError("a stage without links to its neighbours")
    return link


def _packed(lists: Lists) -> bytes:
    """Their number, their lengths, their values."""
    lengths = [len(one) for one in lists]
    return np.array([len(lists), *lengths, *(value for one in lists for value in one)], np.int32).tobytes()


def _unpacked(message: bytes) -> Lists:
    count, *rest = np.frombuffer(message, np.int32).tolist()
    lists, at = [], count
    for length in rest[:count]:
        lists.append(rest[at : at + length])
        at += length
    return lists


def send_lists(link: Link, lists: Lists) -> None:
    """The other side knows nothing about them."""
    message = _packed(lists)
    send_tensor(link, torch.tensor([len(message)]))
    link.send(memoryview(message))


def receive_lists(link: Link) -> Lists:
    message = receive_tensor(link, (int(receive_tensor(link, (1,), torch.int64)),), torch.uint8)
    return _unpacked(message.numpy().tobytes())
