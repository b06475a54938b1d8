"""The rows of one sampling pass, sorted by what they ask for, so that a plain row pays for nothing it did
not ask.

The worker keeps one `SamplingRow` per sequence and builds a `SamplingBatch` of those that draw a token in a
step. All decisions about who needs what are taken here on the host; the pass itself only runs over tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from quire.sampling.kernels import SamplingKernels
from quire.sampling.masks import TokenMasks
from quire.sampling.params import SamplingParams
from quire.sampling.penalties import Penalties, TokenHistory, gather_penalties
from quire.sampling.philox import Purpose, signed_seed, uniform, uniforms
from quire.sampling.sending import send, send_tensor

_NO_CUT = 2.0
"""A top_p no cumulative share can reach."""
_FEW_ROWS = 48


class SamplingRow:
    """What sampling knows of one sequence; `append` every token it draws.

    `token_ids` are prompt and output known so far (all of them after a preemption), `stop_ids` the ids that
    may not be drawn before `min_tokens`, `bad_words` the token sequences that may not appear in the output.
    """

    __slots__ = (
        "allowed",
        "bad_words",
        "history",
        "mask",
        "num_output",
        "params",
        "position",
        "recent",
        "seed",
        "seq_index",
        "stop_ids",
    )

    def __init__(
        self,
        params: SamplingParams,
        seed: int,
        seq_index: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        stop_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
    ) -> None:
        self.params = params
        self.seed = signed_seed(seed)
        self.seq_index = seq_index
        self.position = len(token_ids)
        """Position of the token to be drawn next: the counter of its random number."""
        self.num_output = len(token_ids) - num_prompt_tokens
        self.stop_ids = tuple(stop_ids)
        self.bad_words = tuple(tuple(word) for word in bad_words)
        output = list(token_ids[num_prompt_tokens:])
        self.history = TokenHistory(token_ids[:num_prompt_tokens], output) if params.penalised else None
        self.recent: list[int] | None = output if self.bad_words else None
        self.mask = b""
        """Which tokens the next draw may give, one bit for each, in words of 32; empty: all of them."""
        self.allowed: Tensor | None = None
        if params.allowed_token_ids is not None:
            self.allowed = torch.tensor(list(params.allowed_token_ids), dtype=torch.int64)

    def append(self, token: int) -> None:
        """Take note of a drawn token; the next draw is one position further."""
        self.position += 1
        self.num_output += 1
        if self.history is not None:
            self.history.append(token)
        if self.recent is not None:
            self.recent.append(token)

    def ahead(self, tokens: Sequence[int]) -> SamplingRow:
        """A copy of this row as it will be after `tokens`: one per draft, for a verifier."""
        other: SamplingRow = object.__new__(SamplingRow)
        for name in SamplingRow.__slots__:
            setattr(other, name, getattr(self, name))
        other.history = None if self.history is None else self.history.copy()
        other.recent = None if self.recent is None else list(self.recent)
        for token in tokens:
            other.append(token)
        return other

    def banned_ids(self) -> list[int]:
        """Ids that this one draw may not give: stop ids before min_tokens, last tokens of bad words."""
        banned = list(self.stop_ids) if self.num_output < self.params.min_tokens else []
        recent = self.recent or []
        for word in self.bad_words:
            head = word[:-1]
            if len(head) <= len(recent) and list(head) == recent[len(recent) - len(head) :]:
                banned.append(word[-1])
        return list(dict.fromkeys(banned))


@dataclass(slots=True)
class Edits:
    """Changes to logits before anything is drawn: grammars, allowed ids, biases, bans, then penalties."""

    masks: TokenMasks | None
    allowed: list[tuple[int, Tensor]]
    bias: tuple[Tensor, Tensor, Tensor] | None
    banned: tuple[Tensor, Tensor] | None
    penalties: Penalties | None

    def apply_(self, logits: Tensor, kernels: SamplingKernels | None = None) -> tuple[Tensor, Tensor | None]:
        """The largest logit of each row before, and after if that is known by the way."""
        if self.masks is None or kernels is None:
            before, after = logits.amax(-1), None
            if self.masks is not None:
                self.masks.apply_(logits)
        else:
            before, after = kernels.mask_(logits, self.masks.rows, self.masks.words)
        if self.allowed or self.bias is not None or self.banned is not None or self.penalties is not None:
            self._apply_rest(logits)
            after = None
        return before, after

    def _apply_rest(self, logits: Tensor) -> None:
        """All but the masks."""
        for row, ids in self.allowed:
            kept = logits[row, ids]
            logits[row] = -math.inf
            logits[row, ids] = kept
        if self.bias is not None:
            rows, ids, values = self.bias
            logits[rows, ids] += values
        if self.banned is not None:
            # Not by assignment of a number, which on a GPU copies it there and waits.
            logits.index_put_(self.banned, logits.new_full((), -math.inf))
        if self.penalties is not None:
            self.penalties.apply_(logits)


@dataclass(slots=True)
class Draws:
    """Rows that draw at random, as tensors over those rows (`rows`: their places in the batch)."""

    rows: Tensor
    temperature: Tensor
    log_min_p: Tensor
    keys: list[tuple[int, int, int]]
    """Whose random numbers are drawn with: seed, sequence index, position."""
    top_k: list[int]
    """0: no limit. On the host, since it decides how much is looked at."""
    top_p: Tensor
    uses_min_p: bool
    positions: Tensor | None = None
    """int64: those of `keys`, where the device alone knows them."""

    def key_columns(self) -> Tensor:
        """`keys` on the device: int64 [rows, 3]."""
        columns = send(self.keys, torch.int64, self.rows.device)
        if self.positions is not None:
            columns[:, 2] = self.positions
        return columns

    def noise(self, attempt: int = 0) -> Tensor:
        """One Philox number per row; a hundred tensor operations only pay for themselves over many rows."""
        if len(self.keys) <= _FEW_ROWS and self.positions is None:
            numbers = [uniform(*key, Purpose.SAMPLE, attempt) for key in self.keys]
            return send(numbers, torch.float64, self.rows.device)
        columns = self.key_columns()
        return uniforms(columns[:, 0], columns[:, 1], columns[:, 2], Purpose.SAMPLE, attempt)


@dataclass(slots=True)
class SamplingBatch:
    """One pass: rows are greedy but for `plain` (whole vocabulary), `nucleus` (top_p alone) and `filtered` (top_k, and
    perhaps top_p) ones."""

    num_rows: int
    any_greedy: bool
    edits: Edits | None
    plain: Draws | None
    nucleus: Draws | None
    filtered: Draws | None
    logprob_rows: list[int]
    logprob_counts: list[int]
    masks: TokenMasks | None = None
    """Those of the edits: log-probabilities are among the tokens that a grammar allows."""

    @classmethod
    def build(
        cls, rows: Sequence[SamplingRow], vocab_size: int, device: torch.device | str = "cpu"
    ) -> SamplingBatch:
        device = torch.device(device)
        plain: list[int] = []
        nucleus: list[int] = []
        filtered: list[int] = []
        wants: list[int] = []
        special: list[int] = []
        for place, row in enumerate(rows):
            params = row.params
            if not params.greedy and params.top_k != 1:
                by_share = nucleus if params.top_p < 1.0 else plain
                (filtered if 0 < params.top_k < vocab_size else by_share).append(place)
            if params.logprobs is not None:
                wants.append(place)
            if _needs_edits(row):
                special.append(place)
        masks = TokenMasks.of({place: rows[place].mask for place in special if rows[place].mask}, device)
        return cls(
            num_rows=len(rows),
            any_greedy=len(plain) + len(nucleus) + len(filtered) < len(rows),
            edits=_edits(rows, special, masks, device) if special else None,
            plain=_draws(rows, plain, vocab_size, device) if plain else None,
            nucleus=_draws(rows, nucleus, vocab_size, device) if nucleus else None,
            filtered=_draws(rows, filtered, vocab_size, device) if filtered else None,
            logprob_rows=wants,
            logprob_counts=[rows[place].params.logprobs or 0 for place in wants],
            masks=masks,
        )


@dataclass(frozen=True, slots=True)
class PlainDraw:
    """What a token is drawn with that nothing but temperature, min_p, top_k and top_p decide; numbers are those of
    `Draws`, but `top_k` may be larger than the vocabulary. A temperature of 0: the likeliest token."""

    temperature: float
    log_min_p: float
    top_k: int
    top_p: float
    key: tuple[int, int, int]

    @classmethod
    def of(cls, row: SamplingRow) -> PlainDraw | None:
        """None for rows whose logits are changed before they are drawn from: penalties, biases, masks and the like."""
        params, key = row.params, (row.seed, row.seq_index, row.position)
        if _needs_edits(row):
            return None
        if params.greedy or params.top_k == 1:
            return cls(0.0, -math.inf, 0, _NO_CUT, key)
        return cls(_temperature(row), _log_min_p(row), params.top_k, _top_p(row), key)


def _temperature(row: SamplingRow) -> float:
    return min(row.params.temperature, 1e30)


def _log_min_p(row: SamplingRow) -> float:
    return math.log(row.params.min_p) if row.params.min_p > 0 else -math.inf


def _top_p(row: SamplingRow) -> float:
    return row.params.top_p if row.params.top_p < 1.0 else _NO_CUT


def _needs_edits(row: SamplingRow) -> bool:
    return (
        row.allowed is not None
        or row.history is not None
        or bool(row.params.logit_bias)
        or bool(row.bad_words)
        or row.num_output < row.params.min_tokens
        or bool(row.mask)
    )


def _draws(rows: Sequence[SamplingRow], places: list[int], vocab_size: int, device: torch.device) -> Draws:
    chosen = [rows[place] for place in places]

    def tensor(value: Callable[[SamplingRow], float], dtype: torch.dtype) -> Tensor:
        return send([value(row) for row in chosen], dtype, device)

    return Draws(
        rows=send(places, torch.int64, device),
        temperature=tensor(_temperature, torch.float32),
        log_min_p=tensor(_log_min_p, torch.float32),
        keys=[(row.seed, row.seq_index, row.position) for row in chosen],
        top_k=[row.params.top_k if row.params.top_k < vocab_size else 0 for row in chosen],
        top_p=tensor(_top_p, torch.float64),
        uses_min_p=any(row.params.min_p > 0 for row in chosen),
    )


def _edits(
    rows: Sequence[SamplingRow], special: list[int], masks: TokenMasks | None, device: torch.device
) -> Edits:
    allowed, penalised = [], []
    bias: list[tuple[int, int, float]] = []
    banned: list[tuple[int, int]] = []
    for place in special:
        row = rows[place]
        if row.allowed is not None:
            allowed.append((place, send_tensor(row.allowed, device)))
        bias.extend((place, token, value) for token, value in (row.params.logit_bias or {}).items())
        banned.extend((place, token) for token in row.banned_ids())
        if row.history is not None:
            penalised.append((place, row.params, row.history))

    def index(pairs: Sequence[tuple[int, ...] | tuple[int, int, float]], column: int) -> Tensor:
        return send([int(pair[column]) for pair in pairs], torch.int64, device)

    return Edits(
        masks=masks,
        allowed=allowed,
        bias=(index(bias, 0), index(bias, 1), send([b[2] for b in bias], torch.float32, device))
        if bias
        else None,
        banned=(index(banned, 0), index(banned, 1)) if banned else None,
        penalties=gather_penalties(penalised, device),
    )
