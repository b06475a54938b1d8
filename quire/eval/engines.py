"""Those who are examined: Quire through its public API, and transformers with the same weights and tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from quire.eval.tasks import Scored
from quire.sampling.params import SamplingParams
from quire.tokenizer.tokenizer import Tokenizer

if TYPE_CHECKING:
    from quire.llm import LLM

_BATCH = 64
"""Prompts scored at a time: the log-probabilities of all their tokens are objects that take room."""


def split_tokens(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], int]:
    """Tokens of the whole text, and how many of them are the context's.

    The text is tokenized as one, since a model never saw it cut; spaces that end the context go to the
    continuation, whose first token they are part of.
    """
    bare = context.rstrip()
    continuation = context[len(bare):] + continuation
    whole = tokenizer.encode(bare + continuation)
    return whole, min(len(tokenizer.encode(bare)), len(whole) - 1)


def until(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stop strings in it."""
    return text[: min([at for stop in stops if (at := text.find(stop)) >= 0], default=len(text))]


class QuireEngine:
    """`prompt_logprobs` for scores, `generate` for texts."""

    def __init__(self, llm: LLM, progress: bool = False) -> None:
        if llm.tokenizer is None:
            raise ValueError("an evaluation needs the model's tokenizer")
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._progress = progress

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        found: list[Scored] = []
        for at in range(0, len(pairs), _BATCH):
            cut = [split_tokens(self._tokenizer, *pair) for pair in pairs[at : at + _BATCH]]
            outputs = self._llm.generate([ids for ids, _ in cut], params, use_tqdm=self._progress)
            for (ids, start), output in zip(cut, outputs, strict=True):
                positions = zip(ids[start:], (output.prompt_logprobs or [])[start:], strict=True)
                own = [position[token] for token, position in positions if position is not None]
                found.append(Scored(sum(p.logprob for p in own), all(p.rank == 1 for p in own)))
        return found

    def complete(self, contexts: Sequence[str], stops: Sequence[str], max_tokens: int) -> list[str]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, stop=list(stops))
        outputs = self._llm.generate(list(contexts), params, use_tqdm=self._progress)
        return [output.outputs[0].text for output in outputs]


class TransformersEngine:
    """The same examination of transformers, one text at a time."""

    def __init__(self, network: Any, tokenizer: Tokenizer) -> None:
        self._network = network
        self._tokenizer = tokenizer

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[Scored]:
        import torch

        found: list[Scored] = []
        for pair in pairs:
            ids, start = split_tokens(self._tokenizer, *pair)
            with torch.inference_mode():
                logits = self._network(torch.tensor([ids[:-1]]), logits_to_keep=len(ids) - start).logits[0]
            logprobs = logits.float().log_softmax(-1)
            own = torch.tensor(ids[start:])
            picked = logprobs.gather(1, own[:, None])
            found.append(Scored(float(picked.sum()), bool((logprobs.argmax(-1) == own).all())))
        return found

    def complete(self, contexts: Sequence[str], stops: Sequence[str], max_tokens: int) -> list[str]:
        return [self._complete(self._tokenizer.encode(context), stops, max_tokens) for context in contexts]

    def _complete(self, ids: list[int], stops: Sequence[str], max_tokens: int) -> str:
        import torch

        tokens: list[int] = []
        cache, step = None, torch.tensor([ids])
        while len(tokens) < max_tokens:
            with torch.inference_mode():
                out = self._network(step, past_key_values=cache, use_cache=True, logits_to_keep=1)
            cache, token = out.past_key_values, int(out.logits[0, -1].argmax())
            if token in self._tokenizer.eos_token_ids:
                break
            tokens.append(token)
            step = torch.tensor([[token]])
            # A stop string may end with any token, so each one is looked at.
            text = self._tokenizer.decode(tokens)
            if until(text, stops) != text:
                break
        return until(self._tokenizer.decode(tokens), stops)
