"""Texts that a head is trained on: answers of the model itself, to given questions or to its own."""

from __future__ import annotations

import itertools
import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from quire.errors import ConfigError
from quire.llm import LLM
from quire.sampling.params import SamplingParams

_MARK = "\u2063the question\u2063"
_TEMPERATURES = (0.0, 0.0, 0.0, 0.7, 0.7, 1.0)
"""Answers are drawn as they will be when the head is used: half of them greedily."""
_QUESTION_TOKENS = 96
_LOOP = 12
"""Tokens of a run that is looked for again."""
_FIRST_ROUND = 512
_LARGEST_ROUND = 2048
"""Conversations that are generated before it is looked whether there are enough."""
OPENINGS = (
    "", "", "", "", "", "", "What is", "What are", "How do I", "How does", "Why", "Explain", "Describe",
    "Tell me about", "Write a short story about", "Write a poem about", "Write a letter to", "Write an email",
    "Give me a list of", "Write a Python function that", "Write a program in JavaScript", "Write a SQL query",
    "Fix this code:\n```python\ndef ", "Translate the following sentence into French:", "Translate into Spanish:",
    "Translate into English:", "Summarize the following text:\n\n", "Solve this problem step by step:", "Compare",
    "Rewrite this paragraph in simple words:\n\n", "Can you help me", "I am", "Create a JSON object", "What happens if",
    "Who was", "Suggest", "How can I", "What is the difference between", "Give me tips for", "List three",
    "What are the benefits of", "Explain to a child", "Plan a", "Recommend", "Define", "Is it", "Should I", "My",
    "When did", "Where is", "Who is", "Correct the grammar:", "Answer the question:", "Write a function in C that",
    "Write a bash command", "Calculate", "If", "Convert", "Write a product description for", "Write an essay about",
    "Outline", "Hello", "I need", "Please", "Write a conversation between", "Here is a text:\n\n",
)
"""How questions begin, where the model makes them up: much of what people ask begins so."""


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
        return cls(flat, ends, torch.tensor([len(question) for question, _ in pairs]))


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


class Generator:
    """Lets the engine answer; everything it draws is a function of the seed."""

    def __init__(self, llm: LLM, seed: int, max_tokens: int, deadline: float = float("inf")) -> None:
        self._llm = llm
        self._random = random.Random(seed)
        self._max_tokens = max_tokens
        self._deadline = deadline

    def answer(self, conversations: Sequence[list[dict[str, str]]]) -> list[tuple[list[int], list[int]]]:
        """(question, answer) as ids, of those that got any; questions that take over half of the length get none."""
        prompts = [ids for ids in map(self._prompt_ids, conversations) if 2 * len(ids) <= self._llm.max_model_len]
        params = [self._params(self._random.choice(_TEMPERATURES), self._max_tokens, text=False) for _ in prompts]
        return [(list(output.prompt_token_ids), without_loop(list(output.outputs[0].token_ids)))
                for output in self._llm.generate(prompts, params, use_tqdm=False) if output.outputs[0].token_ids]

    def _prompt_ids(self, messages: list[dict[str, str]]) -> list[int]:
        text = self._llm.render_chat(messages, add_generation_prompt=True)
        assert self._llm.tokenizer is not None  # `render_chat` needs it too
        return self._llm.tokenizer.encode(text, add_special_tokens=False)

    def converse(self, num_tokens: int) -> Iterator[list[tuple[list[int], list[int]]]]:
        """Questions that the model makes up, and their answers, until there are so many tokens of answers."""
        opening = self._user_turn()
        made, done, began = 0, 0, time.monotonic()
        while made < num_tokens and time.monotonic() < self._deadline:
            wanted = -(-(num_tokens - made) // max(1, self._max_tokens // 2))
            count = min(wanted, self._in_time(done, began))
            done += count
            starts = [self._random.choice(OPENINGS) for _ in range(count)]
            prompts = [{"prompt": opening + start, "add_special_tokens": False} for start in starts]
            params = [self._params(1.0, _QUESTION_TOKENS, top_p=0.95) for _ in prompts]
            asked = self._llm.generate(prompts, params, use_tqdm=False)
            questions = [(start + output.outputs[0].text).strip() for start, output in zip(starts, asked, strict=True)]
            pairs = self.answer([[{"role": "user", "content": question}] for question in questions if question])
            made += sum(len(answer) for _, answer in pairs)
            yield pairs

    def _in_time(self, done: int, began: float) -> int:
        """Conversations that the time left allows, by the pace so far."""
        if done == 0 or self._deadline == float("inf"):
            return _FIRST_ROUND if self._deadline < float("inf") else _LARGEST_ROUND
        now = time.monotonic()
        return max(1, min(_LARGEST_ROUND, int(done * (self._deadline - now) / max(1e-9, now - began))))

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
