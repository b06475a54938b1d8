"""What a rank is told when it starts, as plain data: where it stands, what it runs, how it talks to the others."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any

from quire.parallel.place import Place


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """A part of memory that a process of the same machine made (`SharedMemory`): its descriptor there, and the part."""

    pid: int
    fd: int
    offset: int = 0
    size: int = 0


@dataclass(frozen=True, slots=True)
class RankStart:
    place: Place
    worker: dict[str, Any]
    """What carries out plans: a name in `quire/ranks/workers.py`, and what that needs."""
    ranks_here: int
    """Ranks that share this machine's memory and processors."""
    spin_seconds: float = 0.0
    """How long it looks for the next plan before it sleeps."""
    ring: MemoryAddress | None = None
    """Where plans come from; None: they come as messages."""
    reader: int = 0
    num_readers: int = 1
    core: int | None = None
    """On which it waits for plans, where there are as many ranks as cores."""
    group: MemoryAddress | None = None
    """Of the tensor ranks of its stage, where they share a machine."""
    before: MemoryAddress | None = None
    after: MemoryAddress | None = None
    """Of its neighbours in the ring of stages, where they share a machine."""
    head: MemoryAddress | None = None
    """Of the first and the last stage, where they share a machine and each is one rank."""
    gpu: int | None = None
    """The GPU that this rank has to itself, as its process counts them; None: ranks deal out what there is."""
    network: dict[str, Any] = field(default_factory=dict)
    """Connections to ranks of other machines."""

    def to_json(self) -> bytes:
        return json.dumps(dataclasses.asdict(self)).encode()

    @classmethod
    def from_json(cls, data: bytes) -> RankStart:
        fields = json.loads(data)
        fields["place"] = Place(**fields["place"])
        for name in ("ring", "group", "before", "after", "head"):
            if fields[name] is not None:
                fields[name] = MemoryAddress(**fields[name])
        return cls(**fields)


def place_name(place: Place) -> str:
    """As messages name a rank."""
    parts = []
    if place.num_stages > 1:
        parts.append(f"stage {place.stage}")
    if place.tensor_size > 1:
        parts.append(f"tensor rank {place.tensor_rank}")
    name = f"rank {place.index} of {place.num_ranks}"
    return f"{name} ({', '.join(parts)})" if len(parts) > 1 else name
