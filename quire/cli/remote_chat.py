"""`quire chat --url`: the same talk, with a model that a server holds."""

from __future__ import annotations

import argparse
import contextlib
from typing import Any

from quire.cli.options import engine_options, flag_of
from quire.cli.remote import endpoint_of, request_fields, text_pieces
from quire.cli.talk import DEFAULTS, Talk
from quire.cli.terminal import LiveText
from quire.client.endpoint import Endpoint, EndpointError
from quire.errors import ConfigError


def chat_with_server(args: argparse.Namespace) -> int:
    ours = sorted(engine_options(args))
    if ours:
        raise ConfigError(f"{flag_of(ours[0])} is for the server to decide: leave it out with --url", field=ours[0])
    if args.model is not None and args.model_name is not None:
        raise ConfigError("the model is named twice: give MODEL or --model-name", field="model_name")
    endpoint = endpoint_of(args)
    endpoint.model = endpoint.model or args.model
    endpoint.model_name()  # a server that is not there is told of before the first question
    return RemoteChat(endpoint, request_fields(args, DEFAULTS), args.system).talk()


class RemoteConversation:
    """Messages in turn; how many of them fit is the server's to say."""

    def __init__(self, system: str | None) -> None:
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self._turns: list[dict[str, str]] = []

    def reset(self) -> None:
        self._turns.clear()

    def ask(self, text: str, max_tokens: int | None) -> tuple[list[dict[str, str]], int]:
        self._turns.append({"role": "user", "content": text})
        return [*self._system, *self._turns], 0

    def answered(self, text: str) -> None:
        """An answer, or none: then the question is taken back, so that the next one stands for itself."""
        if text:
            self._turns.append({"role": "assistant", "content": text})
        else:
            self._turns.pop()


class RemoteChat(Talk):
    """With a model that a server holds."""

    def __init__(self, endpoint: Endpoint, fields: dict[str, Any], system: str | None) -> None:
        self._endpoint = endpoint
        self._fields = fields
        super().__init__(system)

    def _begin(self, system: str | None) -> RemoteConversation:
        return RemoteConversation(system)

    def _stream(self, prompt: Any) -> tuple[str, str | None]:
        answer, note, ending = "", None, dict[str, Any]()
        chunks = self._endpoint.stream("/v1/chat/completions", {"messages": prompt, **self._fields})
        try:
            with LiveText(status=False) as screen, contextlib.closing(chunks):  # type: ignore[type-var]
                for text in text_pieces(chunks, ending):
                    answer += text
                    screen.write(text)
            if ending["finish_reason"] == "length":
                note = "(cut off: --max-tokens, or the end of the context)"
        except EndpointError as error:
            self._failed, note = True, f"({error})"
        except KeyboardInterrupt:
            if not self._interactive:
                raise
            note = "(stopped)"
        return answer, note
