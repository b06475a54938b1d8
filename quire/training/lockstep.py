"""Answers in lockstep: keeps the rows of a batch busy, and cuts what they say into answers.

An engine does for every token of every request what a service needs of it, which on a GPU takes longer than the step of
a small model. Here the host looks at whole chunks of steps, with numpy.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from quire.errors import EngineError
from quire.tokenizer.tokenizer import Tokenizer
from quire.training.rows import CHUNK, Rows
from quire.training.target import Target
from quire.training.texts import Generator, Job, Said

_LOOKS = 4
"""Chunks between two looks for answers that repeat themselves."""
_REPEATED, _PERIOD = 60, 48
"""Tokens that were all said before, the same number of tokens earlier each, which is at most so many."""
_CHECKED, _AGREED = 24, 0.9
"""Greedy answers that are compared with what the target says of them, and the share of tokens that must be the same."""


@dataclass(slots=True)
class Spoken:
    """What a row said."""

    name: int
    prompt: list[int]
    tokens: list[int]
    stopped: bool
    """By an end of its own."""


@dataclass(slots=True)
class _Row:
    name: int
    prompt: list[int]
    most: int
    """Tokens of the answer at most."""


Fresh = Callable[[], tuple[int, list[int], float, int] | None]
"""The next one's name, prompt, temperature and most tokens; None: there is none now."""


class Lockstep:
    """Keeps rows busy, and cuts what they say into answers."""

    def __init__(self, rows: Rows, ends: Sequence[int]) -> None:
        self._batch = rows
        self._ends = np.array(sorted(ends))
        self._running: dict[int, _Row] = {}
        self._said = np.zeros((rows.count, rows.length + 2 * CHUNK), np.int64)
        self._lengths = np.zeros(rows.count, np.int64)
        self._chunks = 0

    def speak(self, fresh: Fresh, late: Callable[[], bool]) -> Iterator[list[Spoken]]:
        """What was finished, chunk by chunk, until nothing is left to say or it is late: then all end where they
        are."""
        while True:
            over = late()
            if over:
                found = [self._end(row, int(self._lengths[row]), False) for row in list(self._running)]
                yield [each for each in found if each.tokens]
                return
            began = self._fill(fresh)
            if not self._running:
                return
            yield self._took(self._batch.run(), began)

    def _fill(self, fresh: Fresh) -> list[int]:
        """The rows that begin."""
        began, prompts, temperatures = [], list[list[int]](), list[float]()
        free = [row for row in range(self._batch.count) if row not in self._running]
        for row in free:
            found = fresh()
            if found is None:
                break
            name, prompt, temperature, most = found
            if len(prompt) >= self._batch.length:
                raise EngineError(f"a prompt of {len(prompt)} tokens in rows of {self._batch.length}")
            self._running[row] = _Row(name, prompt, min(most, self._batch.length - len(prompt)))
            self._lengths[row] = 0
            began.append(row)
            prompts.append(prompt)
            temperatures.append(temperature)
        self._batch.begin(began, prompts, temperatures)
        return began

    def _took(self, drawn: np.ndarray, began: list[int]) -> list[Spoken]:
        """Add a chunk to what is running; what it finished."""
        self._chunks += 1
        self._said[began, 0] = drawn[0, began]
        self._lengths[began] = 1
        active = np.array(list(self._running))
        before = self._lengths[active]
        self._said[active[:, None], before[:, None] + np.arange(CHUNK)] = drawn[1:, active].T
        self._lengths[active] = before + CHUNK
        most = np.array([self._running[row].most for row in active.tolist()])
        # The first token of a new row came before the chunk.
        first = np.where(before == 1, 0, before)
        seen = first[:, None] + np.arange(CHUNK + 1)
        ended = np.isin(self._said[active[:, None], seen], self._ends) & (seen < (before + CHUNK)[:, None])
        stopped, at = ended.any(1), first + ended.argmax(1) + 1
        stopped &= at <= most
        length = np.where(stopped, at, np.minimum(before + CHUNK, most))
        done = stopped | (length >= most) | self._repeating(active)
        return [self._end(int(active[i]), int(length[i]), bool(stopped[i])) for i in done.nonzero()[0]]

    def _repeating(self, rows: np.ndarray) -> np.ndarray:
        """Of these rows, those whose last tokens repeat what came right before them. Looked for now and then."""
        found = np.zeros(len(rows), bool)
        if self._chunks % _LOOKS:
            return found
        span = _REPEATED + _PERIOD
        long = (self._lengths[rows] >= span).nonzero()[0]
        ends = self._lengths[rows[long]][:, None]
        last = self._said[rows[long][:, None], ends - span + np.arange(span)]
        for period in range(1, _PERIOD + 1):
            same = last[:, _PERIOD:] == last[:, _PERIOD - period : span - period]
            found[long[same.all(1)]] = True
        return found

    def _end(self, row: int, length: int, stopped: bool) -> Spoken:
        done = self._running.pop(row)
        return Spoken(done.name, done.prompt, self._said[row, :length].tolist(), stopped)


@dataclass(frozen=True, slots=True)
class Voice:
    """What a generator of texts asks of a model beside its answers; an engine has the same."""

    tokenizer: Tokenizer
    max_model_len: int

    def render_chat(self, messages: Sequence[dict[str, str]], *, add_generation_prompt: bool) -> str:
        return self.tokenizer.apply_chat_template(messages, add_generation_prompt=add_generation_prompt)


class LockstepGenerator(Generator):
    """Texts whose answers come from rows in lockstep. The first ones are checked against the target's own reading of
    them: kernels that go wrong here would be learned from."""

    def __init__(self, target: Target, voice: Voice, rows: Rows, ends: Sequence[int], seed: int, max_tokens: int,
                 deadline: float = float("inf")) -> None:
        super().__init__(voice, seed, max_tokens, deadline, rows.count)
        self._target, self._tokenizer = target, voice.tokenizer
        self._lockstep = Lockstep(rows, ends)
        self._checked = list[Spoken]()
        self.agreed: float | None = None
        """Of the answers that were checked, the share of tokens that the target would say too."""

    @property
    def trusted(self) -> bool:
        return self.agreed is not None and self.agreed >= _AGREED

    def _finished(self, fresh: Callable[[], Job | None]) -> Iterator[tuple[Job, Said]]:
        running: dict[int, Job] = {}

        def begun() -> tuple[int, list[int], float, int] | None:
            job = self._asked.popleft() if self._asked else fresh()
            if job is None:
                return None
            self._count += 1
            running[self._count] = job
            return self._count, self._ids(job.prompt), job.temperature, job.max_tokens

        for several in self._lockstep.speak(begun, lambda: time.monotonic() >= self._deadline):
            for spoken in several:
                job = running.pop(spoken.name)
                self._done += 1
                self._check(job, spoken)
                text = self._tokenizer.decode(spoken.tokens) if job.text else ""
                yield job, Said(spoken.prompt, spoken.tokens, text, spoken.stopped)

    def _ids(self, prompt: str | list[int]) -> list[int]:
        return self._tokenizer.encode(prompt, add_special_tokens=False) if isinstance(prompt, str) else prompt

    def _check(self, job: Job, spoken: Spoken) -> None:
        """Some greedy answers, once."""
        if self.agreed is not None or job.temperature > 0.0:
            return
        self._checked.append(spoken)
        if len(self._checked) < _CHECKED:
            return
        same = total = 0
        for each in self._checked:
            text = torch.tensor([each.prompt + each.tokens], device=self._target.device)
            best = self._target.see(text).best[0, len(each.prompt) - 1 : -1].tolist()
            same += sum(one == other for one, other in zip(best, each.tokens, strict=True))
            total += len(each.tokens)
        self.agreed = same / total
        self._checked.clear()
        if self.agreed < _AGREED:
            raise EngineError(f"answers in lockstep are not the target's: it would say {self.agreed:.1%} of the tokens")
