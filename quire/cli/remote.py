"""Flags of the commands that ask a server: its address, key and model; and sampling parameters as fields."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import Any

from quire.cli.options import SAMPLING_PREFIX
from quire.client.endpoint import DEFAULT_URL, Endpoint, EndpointError
from quire.server_config import default_api_key

NOT_REMOTE = ("best_of", "n", "logprobs", "prompt_logprobs", "detokenize")
"""Of SamplingParams, what these commands have no place to show."""
_OWN_KIND = {"logit_bias": lambda bias: {str(token): value for token, value in bias.items()}}


def add_endpoint_options(parser: argparse.ArgumentParser, *, url_default: str | None = DEFAULT_URL) -> None:
    server = parser.add_argument_group("server")
    shown = f" (default: {url_default})" if url_default else ""
    server.add_argument("--url", metavar="URL", default=url_default, help=f"server of the OpenAI API to ask{shown}")
    server.add_argument("--api-key", metavar="KEY", help="its key (default: the variable OPENAI_API_KEY)")
    server.add_argument("--model-name", metavar="NAME", help="model to ask for (default: the first that it lists)")


def endpoint_of(args: argparse.Namespace) -> Endpoint:
    return Endpoint(args.url, args.api_key or default_api_key(), args.model_name)


def request_fields(args: argparse.Namespace, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that were given, as fields of a request; what was not given stays the server's choice."""
    given = {name.removeprefix(SAMPLING_PREFIX): value for name, value in vars(args).items()
             if name.startswith(SAMPLING_PREFIX)}
    fields: dict[str, Any] = {}
    for name, value in {**defaults, **given}.items():
        outer, dot, inner = name.partition(".")
        if dot:  # a shape of the answer: a field of an object
            fields.setdefault(outer, {})[inner] = value
        else:
            fields[name] = _OWN_KIND.get(name, lambda same: same)(value)
    return fields


def text_pieces(chunks: Iterator[dict[str, Any]], ending: dict[str, Any]) -> Iterator[str]:
    """The text of a streamed answer as it comes; `ending` gets its finish_reason and, where told, its usage."""
    for chunk in chunks:
        if chunk.get("usage"):
            ending["usage"] = chunk["usage"]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta")
            text = choice.get("text") if delta is None else delta.get("content")
            if text:
                yield text
            if choice.get("finish_reason"):
                ending["finish_reason"] = choice["finish_reason"]
    if "finish_reason" not in ending:
        raise EndpointError("the answer ended without saying why")
