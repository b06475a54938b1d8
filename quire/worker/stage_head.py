"""Which side of a shared head a stage is on."""

from __future__ import annotations

from quire.models.decoder import Decoder
from quire.parallel.shared_head import HeadHelper, HeadMemory, HeadOwner


def share_head(decoder: Decoder, head: HeadMemory | None) -> HeadHelper | None:
    """Of a tied head the first and the last stage both have the table: they compute it together. On the first, what
    helps the last one."""
    if head is None or not decoder.spec.tied_head:
        return None
    if decoder.shard.place.is_first:
        return HeadHelper(head, decoder.embed.packed)
    decoder.share_head(HeadOwner(head, decoder.head.packed, decoder.head))
    return None
