"""Tokenizer: one face over the `tokenizers` library, whatever file the vocabulary came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from quire.errors import ChatTemplateError, InvalidRequestError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as Backend

    from quire.tokenizer.chat_template import ChatTemplate

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
TOOL_TEMPLATE = "tool_use"


class Tokenizer:
    """Encodes and decodes text, and renders chat messages with the model's template.

    `encode` adds the special tokens that the model's own tokenizer adds (a BOS, for some). A text that
    already starts with the BOS, as the output of many chat templates does, does not get a second one; pass
    `add_special_tokens=False` for rendered chats all the same, as transformers does.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        special_tokens: Mapping[str, str] | None = None,
        eos_token_ids: Iterable[int] = (),
        chat_template: str | Mapping[str, str] | None = None,
    ) -> None:
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.bos_token = self.special_tokens.get("bos_token")
        self.eos_token = self.special_tokens.get("eos_token")
        self.bos_token_id = self._id_of(self.bos_token)
        self.eos_token_id = self._id_of(self.eos_token)
        own = [] if self.eos_token_id is None else [self.eos_token_id]
        self.eos_token_ids: tuple[int, ...] = tuple(dict.fromkeys([*own, *eos_token_ids]))
        added = backend.get_added_tokens_decoder()
        self.special_ids: frozenset[int] = frozenset(i for i, token in added.items() if token.special)
        self._templates = _named_templates(chat_template)
        self._compiled: dict[str, ChatTemplate] = {}
        self._known_bytes: dict[int, bytes] = {}

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self.backend.token_to_id(token)

    def special_id(self, text: str) -> int | None:
        """The id of the special token that is spelled so; None where there is none."""
        found = self._id_of(text)
        return found if found in self.special_ids else None

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included."""
        return self._vocab_size

    @cached_property
    def _vocab_size(self) -> int:
        # Ids may have gaps, so that counting the tokens is not enough.
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognized as such."""
        if not isinstance(text, str):
            raise InvalidRequestError(
                f"a prompt to tokenize must be text, not {type(text).__name__}", field="prompt"
            )
        try:
            ids: list[int] = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, ValueError, TypeError) as error:
            # A lone surrogate (half of a UTF-16 pair) has no UTF-8 form.
            raise InvalidRequestError(
                f"the prompt is not valid Unicode text: {error}", field="prompt"
            ) from error
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            del ids[0]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; bytes that are no UTF-8 become U+FFFD, ids without a token nothing."""
        try:
            return str(self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError(f"token ids must be integers from 0 to 2**32 - 1: {error}") from error

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it ('Ġthe', '▁the', '<0x0A>'); '' for an id without a token."""
        return self.backend.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for.

        Joined over a text's ids and decoded, with invalid UTF-8 replaced, they are
        `decode(ids, skip_special_tokens=False)`, but for the first space of a vocabulary that adds one.
        """
        found = self._known_bytes.get(token_id)
        if found is None:
            found = self._bytes_of_token(token_id)
            if len(self._known_bytes) < self.vocab_size:  # ids without a token are endless
                self._known_bytes[token_id] = found
        return found

    def _bytes_of_token(self, token_id: int) -> bytes:
        text = self.token_text(token_id)
        if self._is_byte_level:
            table = self._byte_of_char
            if all(char in table for char in text):
                return bytes(table[char] for char in text)
            return text.encode("utf-8")
        match = _BYTE_TOKEN.fullmatch(text)
        return bytes([int(match[1], 16)]) if match else text.replace("▁", " ").encode("utf-8")

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self.backend.decoder)

    @cached_property
    def _byte_of_char(self) -> dict[str, int]:
        """GPT-2's printable stand-ins: a printable Latin-1 byte is itself, the others are U+0100 and up."""
        shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        hidden = [byte for byte in range(256) if byte not in set(shown)]
        return {chr(b): b for b in shown} | {chr(0x100 + n): b for n, b in enumerate(hidden)}

    @property
    def chat_template(self) -> str | None:
        """The template that `apply_chat_template` uses for messages without tools."""
        return self._templates.get("default") or next(iter(self._templates.values()), None)

    @property
    def tool_template(self) -> str | None:
        """The template that `apply_chat_template` uses for messages with tools; None where none speaks of tools."""
        template = self._templates.get(TOOL_TEMPLATE) or self.chat_template
        return template if template is not None and "tools" in template else None

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        **kwargs: Any,
    ) -> str:
        """Render messages to a prompt.

        `chat_template` may be another template, or the name of one that the model has. Encode the result
        with `add_special_tokens=False`: the template writes the special tokens itself.
        """
        source = self._choose_template(chat_template, with_tools=bool(tools))
        template = self._compiled.get(source)
        if template is None:
            from quire.tokenizer.chat_template import ChatTemplate

            template = self._compiled[source] = ChatTemplate(source)
            while len(self._compiled) > 16:  # templates may come with requests
                del self._compiled[next(iter(self._compiled))]
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            documents=documents,
            special_tokens=self.special_tokens,
            variables=kwargs,
        )

    def _choose_template(self, wanted: str | None, with_tools: bool) -> str:
        if wanted is not None:
            return self._templates.get(wanted, wanted)
        if with_tools and TOOL_TEMPLATE in self._templates:
            return self._templates[TOOL_TEMPLATE]
        source = self.chat_template
        if source is None:
            raise ChatTemplateError(
                "this model has no chat template (a base model, perhaps): give generate() a plain prompt, "
                "or pass chat_template"
            )
        return source


def _named_templates(template: str | Mapping[str, str] | None) -> dict[str, str]:
    if template is None:
        return {}
    return {"default": template} if isinstance(template, str) else dict(template)
