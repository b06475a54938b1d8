"""The two kinds of model that make drafts: a smaller one with KV of its own, and the target without some layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
from torch import Tensor

from quire.errors import ConfigError, DownloadError, ModelLoadError
from quire.kernels.types import LayerCache, StepContext
from quire.layers.stream import ResidualStream
from quire.models.decoder import Decoder
from quire.models.spec import DecoderSpec
from quire.scheduler.plan import BlockCopy, PlanEntry, TransferStart
from quire.worker.block_flags import BlockFlags
from quire.worker.drafter import NoKV
from quire.worker.passes import Passes
from quire.worker.request_table import RequestTable
from quire.worker.step_inputs import step_inputs
from quire.worker.tree_inputs import Node, node_inputs

_FEW_BLOCKS = 8
"""That are faster marked one by one."""


class DraftProgress:
    """What a draft model has computed. Its KV lies in the same blocks as the target's full attention, behind it.

    So whatever happens to a block (shared, copied, moved to the host, found by its prefix) happens to both.
    What a block lacks is only what the draft model has not computed: it runs when drafts are asked for, and
    then catches up from the first block that it has not filled.
    """

    _marks_text = False
    """What it marks is full of text, and not of drafts that may be refused."""

    def __init__(self, table: np.ndarray, block_size: int, group: int, num_blocks: int, num_host_blocks: int) -> None:
        self._table = table
        """Block tables of the group, as the last plan left them."""
        self._block_size = block_size
        self._filled = BlockFlags(group, num_blocks, num_host_blocks)
        """Blocks whose every token has KV of the draft model."""
        self._computed: dict[int, int] = {}
        """By row: tokens that the draft model has KV for; absent: as many as its blocks say."""

    # ---- what the blocks hold

    def copied(self, copies: Sequence[BlockCopy]) -> None:
        self._filled.copied(copies)

    def moved(self, transfers: Sequence[TransferStart]) -> None:
        """What is filled stays so on its way. Of what does not arrive the target computes the KV again, and then it
        counts as not filled."""
        self._filled.moved(transfers)

    def written(self, entries: Sequence[PlanEntry], left_out: bool = False) -> None:
        """The target is about to write these tokens' KV. `left_out`: and keeps no hidden states of them."""
        size, table, flags = self._block_size, self._table, self._filled.few
        for entry in entries:
            if self._marks_text and entry.num_tokens == 1 and entry.start % size:
                continue  # into a block that is not full
            row, first, end = entry.row, entry.start // size, -(-(entry.start + entry.num_tokens) // size)
            if end - first > _FEW_BLOCKS:
                self._filled.device[table[row, first:end]] = False
            elif entry.num_tokens:
                for place in range(first, end):
                    flags[table.item(row, place)] = False

    def marked(self, decoding: tuple[list[int], list[int]] | None) -> bool:
        """Whether a step of these rows and positions that stores no hidden states changes nothing here: the step before
        was alike, and nobody begins a block. Then `all_kept` and `written` need not be called."""
        return False

    def restart(self, row: int) -> None:
        """The row belongs to another sequence from now on."""
        self._computed.pop(row, None)

    def kept(self, row: int, num_tokens: int) -> None:
        """So many tokens of the row are known to be right."""
        if row in self._computed:
            self._computed[row] = min(self._computed[row], num_tokens)

    def all_kept(self, entries: Sequence[PlanEntry]) -> None:
        """A step goes on after these texts."""
        if self._computed:
            for entry in entries:
                self.kept(entry.row, entry.start)

    # ---- drafts

    def catch_up(self, entry: PlanEntry) -> tuple[int, int]:
        """(start, tokens) to compute before the model can say what follows `entry.start`, that one included."""
        start = self._computed.get(entry.row)
        if start is None:
            filled = self._filled.device[self._table[entry.row, : entry.start // self._block_size]]
            start = self._block_size * (len(filled) if filled.all() else int(filled.argmin()))
        # The last token is computed in any case: its logits are wanted.
        self._computed[entry.row] = start = min(start, entry.start)
        return start, entry.start + 1 - start

    def refuses(self, entry: PlanEntry) -> bool:
        """Whether something that the model reads of the text before `entry.start` is missing, and will be for good."""
        return False

    def computed(self, entry: PlanEntry) -> None:
        """The draft model has KV of these tokens now."""
        self._computed[entry.row] = end = entry.start + entry.num_tokens
        first = entry.start // self._block_size
        self._filled.device[self._table[entry.row, first : end // self._block_size]] = True


class SmallerModel:
    """A draft model on a CPU."""

    states: Sequence[str] = ()

    def __init__(self, decoder: Decoder, caches: list[LayerCache], table: RequestTable, group: int,
                 num_blocks: int, num_host_blocks: int) -> None:
        self._decoder = decoder
        self._passes = Passes(decoder)
        self._caches = caches
        self._table = table
        self._groups = [group] * len(decoder.spec.cache_groups())
        progress = DraftProgress(table.tables[group], table.block_size, group, num_blocks, num_host_blocks)
        self._progress = progress
        self.copied, self.moved = progress.copied, progress.moved
        self.written, self.restart = progress.written, progress.restart
        self.kept, self.catch_up = progress.kept, progress.catch_up

    def watched(self, ctx: StepContext, stream: ResidualStream, captured: Mapping[str, Tensor]) -> None:
        pass

    def logits(self, passes: Sequence[PlanEntry]) -> Tensor:
        ids, ctx = step_inputs(self._table, passes, self._groups)
        hidden = self._passes.forward(ids, ctx, self._caches)
        for one in passes:
            self._progress.computed(one)
        return self._decoder.logits(hidden[ctx.query_start[1:].long() - 1])

    def node_logits(self, nodes: Sequence[Node]) -> Tensor:
        """What the target accepts of them is computed again, at the places that it then has."""
        ids, ctx = node_inputs(self._table, nodes, self._groups)
        return self._decoder.logits(self._passes.forward(ids, ctx, self._caches))


class SkippedLayers(NoKV):
    """The target without some of its layers, over the target's own KV.

    What it writes for its drafts is overwritten by the target, which judges them in the same step; of all
    tokens before it sees what the target computed.
    """

    def __init__(self, decoder: Decoder, caches: list[LayerCache], table: RequestTable,
                 skipped: Sequence[int] | None, passes: Passes | None = None) -> None:
        """`passes`: those of a decoder that ranks share, who all run them."""
        super().__init__()
        self._passes = Passes(decoder) if passes is None else passes
        self._caches = caches
        self._table = table
        self._kept = kept_layers(decoder.spec.num_layers, skipped)

    def logits(self, passes: Sequence[PlanEntry]) -> Tensor | None:
        ids, ctx = step_inputs(self._table, passes)
        return self._passes.logits(self._passes.forward(ids, ctx, self._caches, self._kept))

    def node_logits(self, nodes: Sequence[Node]) -> Tensor | None:
        ids, ctx = node_inputs(self._table, nodes)
        return self._passes.logits(self._passes.forward(ids, ctx, self._caches, self._kept))


def kept_layers(num_layers: int, skipped: Sequence[int] | None) -> list[int]:
    """The layers that a draft runs through; by default every second one but for the first and last few."""
    if skipped is None:
        edge = max(1, num_layers // 6)
        skipped = list(range(edge, num_layers - edge, 2)) or [num_layers - 1]
    beyond = [layer for layer in skipped if layer >= num_layers]
    kept = [layer for layer in range(num_layers) if layer not in set(skipped)]
    if beyond or not kept or len(kept) == num_layers:
        said = f"names layer {beyond[0]}" if beyond else "leaves no layer" if not kept else "skips no layer"
        raise ConfigError(f"speculative_config skipped_layers {said}; the model has layers 0 to {num_layers - 1}",
                          field="speculative_config")
    return kept


@contextmanager
def reading_draft_model(name: str | None) -> Iterator[None]:
    """Errors while a draft model loads name the draft model, so that nobody looks for them in the target."""
    try:
        yield
    except (ConfigError, DownloadError, ModelLoadError) as error:
        if isinstance(error, ConfigError) and error.field == "speculative_config":
            raise
        raise ConfigError(f"speculative_config model {name!r}: {error}", field="speculative_config") from error


def check_same_vocabulary(target: DecoderSpec, draft: DecoderSpec) -> None:
    if target.vocab_size != draft.vocab_size:
        raise ConfigError(
            f"speculative_config model has a vocabulary of {draft.vocab_size} tokens and the target one of "
            f"{target.vocab_size}: a draft model must have the target's vocabulary", field="speculative_config")
