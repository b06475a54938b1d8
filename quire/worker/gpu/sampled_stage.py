"""What a step sends to the sampling kernels: its rows' settings, changes of single logits, and masks, in one buffer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from quire.kernels import sampled_row as at
from quire.kernels.sampled_row import Wants
from quire.sampling.params import SamplingParams
from quire.sampling.philox import signed_seed
from quire.scheduler.plan import RowStart

_NO_CUT = 2.0
_NOTHING = np.zeros(0, np.int32)


@dataclass(slots=True, eq=False)
class RowSettings:
    """How one sequence draws, as the kernels read it; made once, when it takes its row."""

    words: np.ndarray
    bits: int
    """Its `wants` as a plain number: every step puts those of all rows together."""
    biases: np.ndarray
    """A change for each token of the bias, without the number of the row."""
    stop_ids: tuple[int, ...]
    min_tokens: int
    num_prompt: int
    bad_words: tuple[tuple[int, ...], ...]
    allowed: np.ndarray | None
    """Mask of the allowed ids, in words of 32."""
    logprobs: int
    """How many of the likeliest are reported; -1: nothing is."""

    @classmethod
    def of(cls, start: RowStart, vocab_size: int) -> RowSettings:
        params = start.params
        words = tuple(tuple(word) for word in start.bad_words)
        return cls(
            words=_words(start, vocab_size),
            bits=int(_wants_of(params, bool(words), vocab_size)),
            biases=_biases(params.logit_bias or {}),
            stop_ids=tuple(dict.fromkeys(start.stop_ids)) if params.min_tokens else (),
            min_tokens=params.min_tokens,
            num_prompt=start.num_prompt_tokens,
            bad_words=words,
            allowed=_allowed_mask(params.allowed_token_ids, vocab_size),
            logprobs=-1 if params.logprobs is None else params.logprobs,
        )

    @property
    def wants(self) -> Wants:
        return Wants(self.bits)

    def unreported(self) -> RowSettings:
        """The same without log-probabilities."""
        words = self.words.copy()
        words[at.LOGPROBS] = -1
        return replace(self, words=words, bits=int(self.wants & ~Wants.LOGPROBS), logprobs=-1)


def _wants_of(params: SamplingParams, bad_words: bool, vocab_size: int) -> Wants:
    """All that a sequence may ever ask for; nothing: the drawing kernel of plain rows does."""
    wants = Wants(0)
    if not params.greedy and 1 < params.top_k < vocab_size:
        wants |= Wants.TOP_K
    elif not params.greedy and params.top_k != 1 and params.top_p < 1.0:
        wants |= Wants.TOP_P
    if params.allowed_token_ids is not None or params.structured_outputs is not None:
        wants |= Wants.MASKS
    if params.logit_bias or bad_words or params.min_tokens > 0:
        wants |= Wants.CHANGES
    if params.penalised:
        wants |= Wants.PENALTIES
    if wants:
        wants |= Wants.DRAW
    if params.logprobs is not None:
        wants |= Wants.LOGPROBS
    return wants


def _words(start: RowStart, vocab_size: int) -> np.ndarray:
    params = start.params
    words = np.full(at.WORDS, -1, np.int32)
    floats = words.view(np.float32)
    greedy = params.greedy or params.top_k == 1
    seed = signed_seed(start.seed) & ((1 << 64) - 1)
    words[at.NUM_PROMPT] = start.num_prompt_tokens
    floats[at.TEMPERATURE] = 0.0 if greedy else min(params.temperature, 1e30)
    floats[at.LOG_MIN_P] = math.log(params.min_p) if params.min_p > 0 else -math.inf
    words[at.SEED_LOW : at.SEED_LOW + 3] = np.array(
        [seed & 0xFFFFFFFF, seed >> 32, start.sequence_index], np.uint32).view(np.int32)
    words[at.TOP_K] = params.top_k if 0 < params.top_k < vocab_size else 0
    top_p = params.top_p if params.top_p < 1.0 else _NO_CUT
    words[at.TOP_P : at.TOP_P + 2] = np.array([top_p], np.float64).view(np.int32)
    floats[at.REPETITION : at.REPETITION + 3] = (
        params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    words[at.LOGPROBS] = -1 if params.logprobs is None else params.logprobs
    return words


def _biases(bias: Mapping[int, float]) -> np.ndarray:
    changes = np.zeros((len(bias), at.CHANGE_WORDS), np.int32)
    changes[:, 1] = list(bias)
    changes[:, 2] = np.array(list(bias.values()), np.float32).view(np.int32)
    return changes


def _allowed_mask(ids: Sequence[int] | None, vocab_size: int) -> np.ndarray | None:
    if ids is None:
        return None
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[list(ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@dataclass(slots=True)
class SampledRow:
    """One row of the logits: its place there, its table row, the position it draws, and its grammar's mask."""

    place: int
    row: int
    position: int
    mask: bytes = b""


@dataclass(slots=True)
class SampledRows:
    """Many of them, as arrays: a step has no time for an object for each."""

    places: np.ndarray
    owners: np.ndarray
    """Their rows of the table."""
    positions: np.ndarray
    masks: Sequence[bytes] = ()
    """One for each row; empty where nobody has one."""
    slots: np.ndarray | None = None
    """Their rows of the token counts, -1: none; None where nobody has penalties."""
    counted: np.ndarray | None = None
    """Positions that are counted there already."""

    def __len__(self) -> int:
        return len(self.places)

    def part(self, which: slice | np.ndarray) -> SampledRows:
        """Some of them; an array names them in any order, or is true where one is meant."""
        masks = self.masks
        if masks:
            masks = masks[which] if isinstance(which, slice) else np.array(masks, object)[which].tolist()
        return SampledRows(self.places[which], self.owners[which], self.positions[which], masks,
                           None if self.slots is None else self.slots[which],
                           None if self.counted is None else self.counted[which])

    def apart(self) -> list[SampledRow]:
        """One by one, for the full sampler."""
        numbers = zip(self.places.tolist(), self.owners.tolist(), self.positions.tolist(), strict=True)
        masks = self.masks or [b""] * len(self)
        return [SampledRow(*each, mask) for each, mask in zip(numbers, masks, strict=True)]


class SampledStage:
    """Puts one step's rows together."""

    def __init__(self, rows: SampledRows, settings: Sequence[RowSettings], vocab_size: int) -> None:
        self._rows = rows
        self._settings = settings
        self._mask_words = -(-vocab_size // 32)
        self._changes: list[np.ndarray] = []
        self._prefixes: list[int] = []
        self._masks: list[np.ndarray] = []
        bits = 0
        for one in settings:
            bits |= one.bits
        self.wants = Wants(bits)
        if any(rows.masks):
            self.wants |= Wants.MASKS | Wants.DRAW

    @classmethod
    def padding(cls, vocab_size: int) -> SampledStage:
        """Of no rows."""
        return cls(SampledRows(_NOTHING, _NOTHING, _NOTHING), [], vocab_size)

    def words(self, num_rows: int, ring: int) -> np.ndarray:
        """The buffer, with padding up to `num_rows`."""
        rows = np.full((num_rows, at.WORDS), -1, np.int32)
        if len(self._rows):
            mine = rows[: len(self._rows)]
            np.concatenate([one.words for one in self._settings], out=mine.reshape(-1))
            _number(mine, self._rows)
        if self.wants & Wants.CHANGES:
            self._add_biases()
        if self.wants & (Wants.MASKS | Wants.CHANGES):
            masks = self._rows.masks or [b""] * len(self._rows)
            for index, (mask, one) in enumerate(zip(masks, self._settings, strict=True)):
                if mask or one.allowed is not None:
                    self._add_masks(rows[index], mask, one)
                if one.stop_ids or one.bad_words:
                    self._add_bans(index, int(self._rows.positions[index]), one)
        return self._joined(rows, ring)

    def _add_biases(self) -> None:
        """Those of all rows at once: a bias may name many tokens."""
        sizes = [len(one.biases) for one in self._settings]
        if any(sizes):
            found = np.concatenate([one.biases for one in self._settings])
            found[:, 0] = np.repeat(np.arange(len(sizes)), sizes)
            self._changes.append(found)

    def _joined(self, rows: np.ndarray, ring: int) -> np.ndarray:
        changes = np.concatenate(self._changes).astype(np.int32) if self._changes else _NOTHING
        if not self._changes:
            self.wants &= ~Wants.CHANGES
        if not self._masks:
            self.wants &= ~Wants.MASKS
        parts = [rows.reshape(-1), changes.reshape(-1), np.array(self._prefixes, np.int32), *self._masks]
        head = np.zeros(at.HEAD, np.int32)
        head[at.RING] = ring
        head[at.NUM_CHANGES] = len(changes)
        head[at.CHANGES_AT] = at.HEAD + rows.size
        head[at.PREFIXES_AT] = head[at.CHANGES_AT] + changes.size
        head[at.MASKS_AT] = head[at.PREFIXES_AT] + len(self._prefixes)
        return np.concatenate([head, *parts])

    def _add_masks(self, words: np.ndarray, mask: bytes, one: RowSettings) -> None:
        if mask:
            words[at.MASK] = self._mask(np.frombuffer(mask, np.int32))
        if one.allowed is not None:
            words[at.ALLOWED] = self._mask(one.allowed)

    def _mask(self, words: np.ndarray) -> int:
        self._masks.append(words[: self._mask_words])
        return len(self._masks) - 1

    def _add_bans(self, index: int, position: int, one: RowSettings) -> None:
        drawn = position - one.num_prompt
        bans: list[tuple[int, tuple[int, ...]]] = []
        if drawn < one.min_tokens:
            bans += [(token, ()) for token in one.stop_ids]
        bans += [(word[-1], word[:-1]) for word in one.bad_words if len(word) - 1 <= drawn]
        if bans:
            found = np.zeros((len(bans), at.CHANGE_WORDS), np.int32)
            found[:, 0], found[:, 2] = index, _BAN
            for place, (token, prefix) in enumerate(bans):
                found[place, 1], found[place, 3], found[place, 4] = token, len(self._prefixes), len(prefix)
                self._prefixes += prefix
            self._changes.append(found)


class RepeatedStage:
    """The buffer of a step out of that of the step before, where the same rows draw again: only numbers change."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self.changing = True
        """Whether more of the last step's rows changes from token to token than numbers do: masks of grammars, bans."""
        self._settings: list[RowSettings] | None = None
        self._words = _NOTHING
        self._num_rows = 0
        self._wants = Wants(0)

    def words(self, rows: SampledRows, settings: Sequence[RowSettings], num_rows: int,
              ring: int) -> tuple[np.ndarray, Wants]:
        """As `SampledStage.words`, and what the rows ask for."""
        masked = any(rows.masks)
        if num_rows == self._num_rows and settings == self._settings and not masked:
            words = self._words.copy()
            mine = words[at.HEAD : at.HEAD + len(rows) * at.WORDS].reshape(-1, at.WORDS)
            words[at.RING] = ring
            _number(mine, rows)
            return words, self._wants
        stage = SampledStage(rows, settings, self._vocab_size)
        words = stage.words(num_rows, ring)
        self.changing = masked or any(one.stop_ids or one.bad_words for one in settings)
        self._settings = None if self.changing else list(settings)
        self._words, self._num_rows, self._wants = words, num_rows, stage.wants
        return words, stage.wants


def _number(words: np.ndarray, rows: SampledRows) -> None:
    """The numbers of rows that change from step to step."""
    words[:, at.PLACE], words[:, at.OWNER], words[:, at.POSITION] = rows.places, rows.owners, rows.positions
    if rows.slots is not None and rows.counted is not None:
        words[:, at.SLOT], words[:, at.COUNTED] = rows.slots, rows.counted


_BAN = int(np.array(-math.inf, np.float32).view(np.int32))
