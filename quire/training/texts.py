"""Texts that a head is trained on: answers of the model itself, to given questions or to its own."""

from __future__ import annotations

import itertools
import json
import random
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from quire.errors import ConfigError
from quire.llm import LLM
from quire.sampling.params import SamplingParams
from quire.training.kept import reading, write_tensors
from quire.training.questions import Exchange, Question, question

_MARK = "\u2063the question\u2063"
_TEMPERATURES = (0.0, 0.0, 0.0, 0.0, 0.5, 0.8)
"""Answers are drawn as they will be when the head is used: two thirds of them greedily."""
_QUESTION_TOKENS = 96
_ASKING = 0.8
"""The temperature of questions that the model makes up."""
_LOOP = 12
"""Tokens of a run that is looked for again."""
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_PASSAGES = 64
"""Answers whose text is kept to ask about."""
_TOLD = 8
"""Of so many answers one is read as text."""
_SHORTEST = 24
"""Tokens of an answer that was cut off and is worth keeping."""
_MADE_WITH = "made_with"
_ANEW = "delete it, and the same command makes its texts again"
Pair = tuple[list[int], list[int]]
"""A question and its answer, as ids."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Token ids one after the other, where each text begins, and where its answer does."""

    tokens: Tensor
    """int32."""
    begins: Tensor
    """int64 [n + 1]."""
    answers: Tensor
    """int64 [n]: tokens before the answer."""

    def __len__(self) -> int:
        return len(self.answers)

    def text(self, index: int) -> Tensor:
        return self.tokens[int(self.begins[index]) : int(self.begins[index + 1])]

    def question(self, index: int) -> tuple[int, ...]:
        return tuple(self.text(index)[: int(self.answers[index])].tolist())

    @property
    def num_answered(self) -> int:
        """Tokens of answers."""
        return len(self.tokens) - int(self.answers.sum())

    def sorted(self) -> Texts:
        """The same, in an order that does not depend on when each was made."""
        pairs = [(list(self.question(index)), self.text(index)[int(self.answers[index]) :].tolist())
                 for index in range(len(self))]
        return Texts.of(sorted(pairs))

    def lengths(self) -> list[int]:
        return (self.begins[1:] - self.begins[:-1]).tolist()

    def commonest(self, count: int, vocab_size: int) -> Tensor:
        """The ids that occur most often in answers, in order of their number."""
        lengths = self.begins[1:] - self.begins[:-1]
        place = torch.arange(len(self.tokens)) - self.begins[:-1].repeat_interleave(lengths)
        answers = self.tokens[place >= self.answers.repeat_interleave(lengths)]
        counts = torch.bincount(answers.long(), minlength=vocab_size)
        order = torch.argsort(counts, descending=True, stable=True)
        return order[:count].sort().values

    def held_out(self, share: float) -> list[bool]:
        """Whether each is kept apart: about such a share, by its question alone, so that the same question is never on
        both sides, and neither short answers nor early ones are preferred."""
        flat, begins, answers = self.tokens.numpy(), self.begins.tolist(), self.answers.tolist()
        return [zlib.crc32(flat[begin : begin + count].tobytes()) < share * 2**32
                for begin, count in zip(begins, answers, strict=False)]

    def usable(self, depth: int) -> list[int]:
        """Those whose answers are long enough for so many drafted steps; refused where there are less than two."""
        lengths = (self.begins[1:] - self.begins[:-1] - self.answers).tolist()
        found = [index for index, length in enumerate(lengths) if length > depth]
        if len(found) < 2:
            raise ConfigError(f"there are not enough texts to train on: of {len(self)}, {len(found)} have answers "
                              f"longer than --depth {depth}, and two are needed: give more questions in --data, or a "
                              "larger --self", "data")
        return found

    def number(self) -> int:
        """One that other texts hardly have too."""
        return zlib.crc32(self.answers.numpy().tobytes(), zlib.crc32(self.tokens.numpy().tobytes()))

    def save(self, path: Path, made_with: Mapping[str, object] | None = None) -> None:
        """`made_with`: what they came of, which `origin` tells."""
        # One entry: of several the file has no order, and the same texts should be the same bytes.
        said = None if made_with is None else {_MADE_WITH: json.dumps(made_with)}
        write_tensors({"tokens": self.tokens, "begins": self.begins, "answers": self.answers}, path, said)

    @classmethod
    def load(cls, path: Path) -> Texts:
        with reading(path, _ANEW), safe_open(path, framework="pt") as file:
            return cls(*(file.get_tensor(name) for name in ("tokens", "begins", "answers")))

    @staticmethod
    def origin(path: Path) -> dict[str, object]:
        """What the texts of a file were made with; empty where it does not say."""
        with reading(path, _ANEW), safe_open(path, framework="pt") as file:
            return dict(json.loads((file.metadata() or {}).get(_MADE_WITH, "{}")))

    @classmethod
    def of(cls, pairs: Sequence[tuple[list[int], list[int]]]) -> Texts:
        """From questions and answers as ids."""
        texts = [question + answer for question, answer in pairs]
        ends = torch.tensor([0, *(len(text) for text in texts)]).cumsum(0)
        flat = torch.tensor([token for text in texts for token in text], dtype=torch.int32)
        return cls(flat, ends, torch.tensor([len(question) for question, _ in pairs], dtype=torch.int64))

    @classmethod
    def joined(cls, several: Sequence[Texts]) -> Texts:
        """All of them, one after the other."""
        ends = [each.begins[1:] + before for each, before in
                zip(several, _sums(len(each.tokens) for each in several), strict=True)]
        return cls(torch.cat([each.tokens for each in several]), torch.cat([torch.zeros(1, dtype=torch.int64), *ends]),
                   torch.cat([each.answers for each in several]))


def _sums(lengths: Iterable[int]) -> list[int]:
    """Of all before each."""
    return list(itertools.accumulate(lengths, initial=0))[:-1]


def without_loop(tokens: list[int]) -> list[int]:
    """An answer up to where it only repeats itself: where the same run of tokens comes for the third time. Greedy
    answers of small models end so, anybody can guess them, and there is little to learn from them."""
    if len(tokens) < _LOOP + 2:
        return tokens
    said, count = np.array(tokens, np.uint64), len(tokens) - _LOOP + 1
    runs = np.zeros(count, np.uint64)  # a number for each run of tokens, by a hash of 64 bits
    for at in range(_LOOP):
        runs = runs * _FACTOR + said[at : at + count]
    order = runs.argsort(kind="stable")
    third = order[2:][runs[order[2:]] == runs[order[:-2]]]
    return tokens[: int(third.min())] if len(third) else tokens


@dataclass(frozen=True, slots=True)
class Said:
    """What came of a prompt."""

    prompt: list[int]
    tokens: list[int]
    text: str
    """Empty where nobody asked for it."""
    stopped: bool
    """It came to an end of its own."""


@dataclass(frozen=True, slots=True)
class Job:
    prompt: str | list[int]
    temperature: float
    max_tokens: int
    seed: int
    text: bool = True
    """What is said is wanted as text too."""
    asked: str = ""
    """The user's last words, where this is their answer."""
    unfinished: Question | None = None
    """A question that the model goes on with; None: this is an answer."""


class Generator:
    """Lets the engine answer; everything it draws is a function of the seed. A place in the batch that gets free goes
    to the next at once. When the time is up answers end where they are."""

    def __init__(self, llm: LLM | Any, seed: int, max_tokens: int, deadline: float = float("inf"),
                 at_once: int = 64) -> None:
        """`at_once`: requests that the engine has at a time."""
        self._llm = llm
        self._random = random.Random(seed)
        self._max_tokens = max_tokens
        self._deadline = deadline
        self._at_once = at_once
        self._asked: deque[Job] = deque()
        """Questions that are made, and wait for their answer to begin."""
        self._told: deque[Exchange] = deque(maxlen=_PASSAGES)
        """Answers to ask about."""
        self._known: set[int] = set()
        """Questions that were answered greedily, by their hash: nothing new would come of them."""
        self._around: dict[str | None, tuple[str, str]] = {}
        """What the chat template writes before and after a question, by the instructions before it."""
        self._count = self._done = self._made = 0

    @property
    def trusted(self) -> bool:
        """What it said so far may be kept."""
        return True

    def answer(self, conversations: Sequence[list[dict[str, str]]],
               done: Mapping[tuple[int, ...], int] | None = None) -> Iterator[Pair]:
        """(question, answer) as ids, of those that got any; questions that take over half of the length get none.
        `done`: how often a question, as ids, was answered before, which is not done again."""
        jobs = self._to_do(conversations, Counter(done or {}))
        return self._pairs(lambda: next(jobs, None))

    def _to_do(self, conversations: Sequence[list[dict[str, str]]], done: Counter[tuple[int, ...]]) -> Iterator[Job]:
        """All are drawn, so that each is answered as it would be if none had been before."""
        for job in map(self._to_answer, conversations):
            if job is None:
                continue
            ids = tuple(map(int, job.prompt))
            if done[ids]:
                done[ids] -= 1
            else:
                yield job

    def _to_answer(self, messages: list[dict[str, str]]) -> Job | None:
        text = self._rendered(messages)
        assert self._llm.tokenizer is not None  # `render_chat` needs it too
        ids = self._llm.tokenizer.encode(text, add_special_tokens=False)
        if 2 * len(ids) > self._llm.max_model_len:
            return None
        told, temperature = self._count % _TOLD == 0, self._random.choice(_TEMPERATURES)
        known = zlib.crc32(text.encode())
        if temperature == 0.0 and known in self._known:
            temperature = _TEMPERATURES[-1]
        if temperature == 0.0:
            self._known.add(known)
        return Job(ids, temperature, self._max_tokens, self._seed(), told, messages[-1]["content"])

    def _rendered(self, messages: list[dict[str, str]]) -> str:
        """By the chat template. What it writes around a question is the same for all questions that come after the same
        instructions, so it is asked once for each of these."""
        role, asked = messages[-1]["role"], messages[-1]["content"]
        if len(messages) > 2 or role != "user" or asked != asked.strip():
            return self._llm.render_chat(messages, add_generation_prompt=True)
        instructions = messages[0]["content"] if len(messages) == 2 else None
        around = self._around.get(instructions)
        if around is None:
            marked = [*messages[:-1], {"role": role, "content": _MARK}]
            parts = self._llm.render_chat(marked, add_generation_prompt=True).split(_MARK)
            whole = self._llm.render_chat(messages, add_generation_prompt=True)
            if len(parts) != 2 or whole != asked.join(parts):
                return whole
            around = self._around[instructions] = (parts[0], parts[1])
        return asked.join(around)

    def converse(self, num_tokens: int) -> Iterator[Pair]:
        """Questions that the model makes up, and their answers, until there are so many tokens of answers."""
        opening = self._user_turn()
        return self._pairs(lambda: self._question(opening, num_tokens))

    def _question(self, opening: str, num_tokens: int) -> Job | None:
        """The next one; None where what is under way will do."""
        under_way = self._count - self._done + len(self._asked)
        if self._made + under_way * self._max_tokens // 2 >= num_tokens:
            return None
        said = question(self._random, self._told)
        job = self._to_answer(said.messages()) if said.whole else None
        if job is not None:
            return job
        return Job(opening + said.begins, _ASKING, _QUESTION_TOKENS, self._seed(), unfinished=said)

    def _pairs(self, fresh: Callable[[], Job | None]) -> Iterator[Pair]:
        for job, found in self._finished(fresh):
            if job.unfinished is not None:
                asked = (job.unfinished.begins + found.text).strip()
                answering = self._to_answer(job.unfinished.messages(asked)) if asked else None
                if answering is not None and time.monotonic() < self._deadline:
                    self._asked.append(answering)
                continue
            tokens = without_loop(found.tokens)
            if len(tokens) < min(_SHORTEST, self._max_tokens) and not found.stopped:
                continue  # hardly begun when the time was up
            if found.text.strip():
                self._told.append(Exchange(job.asked, found.text))
            self._made += len(tokens)
            yield found.prompt, tokens

    def _finished(self, fresh: Callable[[], Job | None]) -> Iterator[tuple[Job, Said]]:
        """Runs them, questions that wait for an answer first."""
        running: dict[str, Job] = {}
        while True:
            late = time.monotonic() >= self._deadline
            while len(running) < self._at_once and not late:
                job = self._asked.popleft() if self._asked else fresh()
                if job is None:
                    break
                name, self._count = str(self._count), self._count + 1
                text = isinstance(job.prompt, str)
                prompt = {"prompt": job.prompt, "add_special_tokens": False} if text else job.prompt
                self._llm.add_request(name, prompt, SamplingParams(
                    temperature=job.temperature, max_tokens=job.max_tokens, seed=job.seed, detokenize=job.text))
                running[name] = job
            if not running:
                return
            if late:
                self._llm.abort(list(running))
            for output in self._llm.step(until_done=running):
                if output.finished:
                    self._done += 1
                    one = output.outputs[0]
                    yield running.pop(output.request_id), Said(list(output.prompt_token_ids), list(one.token_ids),
                                                               one.text, one.finish_reason == "stop")

    def _seed(self) -> int:
        return self._random.randrange(1 << 31)

    def _user_turn(self) -> str:
        """What the chat template writes before the user's first word."""
        text = self._llm.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        before, found, _ = text.partition(_MARK)
        if not found:
            raise ConfigError("the model's chat template does not show the user's text as it is: give --data", "self")
        return before
