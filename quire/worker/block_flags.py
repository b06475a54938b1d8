"""One bit for every block of a cache group, which goes wherever the block's content goes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from quire.scheduler.plan import DEVICE, BlockCopy, TransferStart


class BlockFlags:
    """Of the blocks on the device and in tiers; all unset at first."""

    def __init__(self, group: int, num_blocks: int, num_host_blocks: int) -> None:
        self._group = group
        self.device = np.zeros(num_blocks, np.bool_)
        self.few = self.device.data
        """The same memory: a few of them are set at a fraction of what numpy takes, which lets go of the interpreter
        meanwhile and may not get it back at once."""
        self._num_host_blocks = num_host_blocks
        self._tiers = {DEVICE: self.device}

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        for copy in copies:
            if copy.group == self._group:
                self.device[copy.target] = self.device[copy.source]

    def moved(self, transfers: Sequence[TransferStart]) -> None:
        """A flag stays as it is on its way. Of what does not arrive the target computes the KV again."""
        for transfer in transfers:
            tier = self._tier(transfer.tier)
            for move in transfer.moves:
                if move.group == self._group and transfer.out:
                    tier[move.tier] = self.device[move.device]
                elif move.group == self._group:
                    self.device[move.device] = tier[move.tier]

    def _tier(self, name: str) -> np.ndarray:
        return self._tiers.setdefault(name, np.zeros(self._num_host_blocks, np.bool_))
