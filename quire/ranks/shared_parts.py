"""Who shares which part of one piece of memory: the tensor ranks of a stage, and neighbours in the ring of stages."""

from __future__ import annotations

import dataclasses

from quire.parallel.place import Place
from quire.ranks.start import MemoryAddress, RankStart

_PAGE = 4096


class SharedParts:
    """Parts for ranks of one machine, each with room of its own in one piece of memory."""

    def __init__(self, places: list[Place]) -> None:
        from quire.parallel.shared import shared_group_bytes, shared_link_bytes
        from quire.parallel.shared_head import HEAD_BYTES

        here = set(places)
        self._parts: dict[tuple[str, int, int], tuple[int, int]] = {}
        """(what, stage, tensor rank) -> (offset, bytes). The link of a stage and tensor rank leads to it."""
        self.size = 0
        for place in places:
            if place.tensor_size > 1:
                self._add(("group", place.stage, 0), shared_group_bytes(place.tensor_size))
            if place.num_stages > 1 and stage_before(place) in here:
                self._add(("link", place.stage, place.tensor_rank), shared_link_bytes())
            if place.num_stages > 1 and place.tensor_size == 1 and _ends(place) <= here:
                self._add(("head", 0, 0), HEAD_BYTES)

    def _add(self, name: tuple[str, int, int], size: int) -> None:
        if name not in self._parts:
            self._parts[name] = (self.size, size)
            self.size += -(-size // _PAGE) * _PAGE

    def give(self, start: RankStart, pid: int, fd: int) -> RankStart:
        """Tell a rank its parts of the memory that process `pid` has as `fd`."""
        place = start.place

        def address(what: str, stage: int, rank: int) -> MemoryAddress | None:
            part = self._parts.get((what, stage, rank))
            return None if part is None else MemoryAddress(pid, fd, *part)

        return dataclasses.replace(
            start, group=address("group", place.stage, 0), before=address("link", place.stage, place.tensor_rank),
            after=address("link", stage_after(place).stage, place.tensor_rank),
            head=address("head", 0, 0) if place.is_first or place.is_last else None)


def _ends(place: Place) -> set[Place]:
    return {Place(place.tensor_rank, place.tensor_size, stage, place.num_stages) for stage in (0, place.num_stages - 1)}


def stage_before(place: Place) -> Place:
    return Place(place.tensor_rank, place.tensor_size, (place.stage - 1) % place.num_stages, place.num_stages)


def stage_after(place: Place) -> Place:
    return Place(place.tensor_rank, place.tensor_size, (place.stage + 1) % place.num_stages, place.num_stages)
