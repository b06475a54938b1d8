"""Texts that a head is trained on: answers of the model itself, to given questions or to its own."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.engine.outputs.output import RequestOutput
from quire.errors import ConfigError
from quire.llm import LLM
from quire.sampling.params import SamplingParams
from quire.training.questions import question

_MARK = "\u2063the question\u2063"
_TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 0.7, 1.0)
"""Answers are drawn as they will be when the head is used: half of them greedily."""
_QUESTION_TOKENS = 96
_LOOP = 12
"""Tokens of a run that is looked for again."""
_PASSAGES = 64
"""Answers whose text is kept to ask about."""
_TOLD = 8
"""Of so many answers one is read as text."""
_SHORTEST = 24
"""Tokens of an answer that was cut off and is worth keeping."""
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

    def lengths(self) -> list[int]:
        return (self.begins[1:] - self.begins[:-1]).tolist()

    def commonest(self, count: int, vocab_size: int) -> Tensor:
        """The ids that occur most often in answers, in order of their number."""
        counts = torch.zeros(vocab_size, dtype=torch.int64)
        for index in range(len(self)):
            answer = self.text(index)[int(self.answers[index]) :].long()
            counts.scatter_add_(0, answer, torch.ones_like(answer))
        order = torch.argsort(counts, descending=True, stable=True)
        return order[:count].sort().values

    def save(self, path: Path) -> None:
        save_file({"tokens": self.tokens, "begins": self.begins, "answers": self.answers}, path)

    @classmethod
    def load(cls, path: Path) -> Texts:
        with safe_open(path, framework="pt") as file:
            return cls(*(file.get_tensor(name) for name in ("tokens", "begins", "answers")))

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
    seen: dict[tuple[int, ...], int] = {}
    for end in range(_LOOP, len(tokens) + 1):
        run = tuple(tokens[end - _LOOP : end])
        seen[run] = seen.get(run, 0) + 1
        if seen[run] == 3:
            return tokens[: end - _LOOP]
    return tokens


def read_questions(path: Path) -> list[list[dict[str, str]]]:
    """Conversations of a JSON-lines file: {"messages": [...]} or {"prompt": "..."}; their last turn is the user's."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            said = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}, is not JSON: {error}", field="data") from error
        messages = said.get("messages") if isinstance(said, dict) else None
        if messages is None and isinstance(said, dict) and isinstance(said.get("prompt"), str):
            messages = [{"role": "user", "content": said["prompt"]}]
        if not isinstance(messages, list) or not messages or not all(isinstance(one, dict) for one in messages):
            raise ConfigError(f'{path}, line {number}, has neither "messages" nor "prompt"', field="data")
        while messages and messages[-1].get("role") == "assistant":
            messages = messages[:-1]
        if messages:
            found.append(messages)
    if not found:
        raise ConfigError(f"{path} has no conversation in it", field="data")
    return found


@dataclass(frozen=True, slots=True)
class _Job:
    prompt: Any
    params: SamplingParams
    begins: str | None = None
    """Of a question that the model makes up: its first words. None: an answer."""


class Generator:
    """Lets the engine answer; everything it draws is a function of the seed. A place in the batch that gets free goes
    to the next at once. When the time is up answers end where they are."""

    def __init__(self, llm: LLM, seed: int, max_tokens: int, deadline: float = float("inf"), at_once: int = 64) -> None:
        """`at_once`: requests that the engine has at a time."""
        self._llm = llm
        self._random = random.Random(seed)
        self._max_tokens = max_tokens
        self._deadline = deadline
        self._at_once = at_once
        self._asked: deque[_Job] = deque()
        """Questions that are made, and wait for their answer to begin."""
        self._passages: deque[str] = deque(maxlen=_PASSAGES)
        """Of answers: texts to ask about."""
        self._count = self._done = self._made = 0

    def answer(self, conversations: Sequence[list[dict[str, str]]]) -> Iterator[Pair]:
        """(question, answer) as ids, of those that got any; questions that take over half of the length get none."""
        jobs = (job for job in map(self._to_answer, conversations) if job is not None)
        return self._pairs(lambda: next(jobs, None))

    def _to_answer(self, messages: list[dict[str, str]]) -> _Job | None:
        text = self._llm.render_chat(messages, add_generation_prompt=True)
        assert self._llm.tokenizer is not None  # `render_chat` needs it too
        ids = self._llm.tokenizer.encode(text, add_special_tokens=False)
        if 2 * len(ids) > self._llm.max_model_len:
            return None
        told = self._count % _TOLD == 0
        return _Job(ids, self._params(self._random.choice(_TEMPERATURES), self._max_tokens, text=told))

    def converse(self, num_tokens: int) -> Iterator[Pair]:
        """Questions that the model makes up, and their answers, until there are so many tokens of answers."""
        opening = self._user_turn()
        return self._pairs(lambda: self._question(opening, num_tokens))

    def _question(self, opening: str, num_tokens: int) -> _Job | None:
        """The next one; None where what is under way will do."""
        under_way = self._count - self._done + len(self._asked)
        if self._made + under_way * self._max_tokens // 2 >= num_tokens:
            return None
        said = question(self._random, self._passages)
        if said.whole:
            job = self._to_answer([{"role": "user", "content": said.text}])
            if job is not None:
                return job
        prompt = {"prompt": opening + said.begins, "add_special_tokens": False}
        return _Job(prompt, self._params(1.0, _QUESTION_TOKENS, top_p=0.95), said.begins)

    def _pairs(self, fresh: Callable[[], _Job | None]) -> Iterator[Pair]:
        for job, output in self._finished(fresh):
            found = output.outputs[0]
            if job.begins is not None:
                asked = (job.begins + found.text).strip()
                answering = self._to_answer([{"role": "user", "content": asked}]) if asked else None
                if answering is not None and time.monotonic() < self._deadline:
                    self._asked.append(answering)
                continue
            tokens = without_loop(list(found.token_ids))
            if len(tokens) < _SHORTEST and found.finish_reason != "stop":
                continue  # hardly begun when the time was up
            if found.text:
                self._passages.append(found.text)
            self._made += len(tokens)
            yield list(output.prompt_token_ids), tokens

    def _finished(self, fresh: Callable[[], _Job | None]) -> Iterator[tuple[_Job, RequestOutput]]:
        """Runs them, questions that wait for an answer first."""
        running: dict[str, _Job] = {}
        while True:
            late = time.monotonic() >= self._deadline
            while len(running) < self._at_once and not late:
                job = self._asked.popleft() if self._asked else fresh()
                if job is None:
                    break
                name, self._count = str(self._count), self._count + 1
                self._llm.add_request(name, job.prompt, job.params)
                running[name] = job
            if not running:
                return
            if late:
                self._llm.abort(list(running))
            for output in self._llm.step(until_done=running):
                if output.finished:
                    self._done += 1
                    yield running.pop(output.request_id), output

    def _params(self, temperature: float, max_tokens: int, top_p: float = 1.0, text: bool = True) -> SamplingParams:
        seed = self._random.randrange(1 << 31)
        return SamplingParams(temperature=temperature, max_tokens=max_tokens, top_p=top_p, seed=seed, detokenize=text)

    def _user_turn(self) -> str:
        """What the chat template writes before the user's first word."""
        text = self._llm.render_chat([{"role": "user", "content": _MARK}], add_generation_prompt=False)
        before, found, _ = text.partition(_MARK)
        if not found:
            raise ConfigError("the model's chat template does not show the user's text as it is: give --data", "self")
        return before
