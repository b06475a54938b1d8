"""What was said in a chat, and the prompt it makes, kept within the model's context."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from quire.errors import InvalidRequestError

if TYPE_CHECKING:
    from quire.llm import LLM

_LEAST_ROOM = 64
"""Tokens that an answer should have at least before older messages are forgotten for it."""
_ROOM_SHARE = 0.25
"""Most of the context that is kept free for the answer, however long it may be."""


class Conversation:
    """Messages in turn: `ask` adds a question and gives the prompt, `answered` adds the answer."""

    def __init__(self, llm: LLM, system: str | None = None) -> None:
        self._llm = llm
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    @property
    def messages(self) -> list[dict[str, str]]:
        return [*self._system, *self._turns]

    def reset(self) -> None:
        self._turns.clear()

    def ask(self, text: str, max_tokens: int | None) -> tuple[dict[str, Any], int]:
        """The prompt that ends with this question, and how many old messages were dropped to make it fit.

        A question that does not fit by itself is refused, and is not part of the conversation.
        """
        before = list(self._turns)
        self._turns.append({"role": "user", "content": text})
        context = self._llm.max_model_len
        try:
            prompt, length = self._render()
            while length > context - self._room(max_tokens) and len(self._turns) > 1:
                del self._turns[:2]
                prompt, length = self._render()
            if length >= context:
                raise InvalidRequestError(
                    f"this message alone makes {length:,} tokens, the context has {context:,}: shorten it",
                    field="messages",
                )
        except InvalidRequestError:
            self._turns = before
            raise
        return prompt, len(before) + 1 - len(self._turns)

    def answered(self, text: str) -> None:
        self._turns.append({"role": "assistant", "content": text})

    def _render(self) -> tuple[dict[str, Any], int]:
        """The prompt and its number of tokens."""
        prompt = self._llm.chat_prompt(self.messages)
        if self._llm.tokenizer is None:
            return prompt, 0
        return prompt, len(self._llm.tokenizer.encode(prompt["prompt"], add_special_tokens=False))

    def _room(self, max_tokens: int | None) -> int:
        share = max(_LEAST_ROOM, int(self._llm.max_model_len * _ROOM_SHARE))
        return min(share if max_tokens is None else max_tokens, share, self._llm.max_model_len // 2)
